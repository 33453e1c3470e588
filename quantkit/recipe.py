"""Recipes: the number format of the weights, the passes that choose the numbers, and what stays as it is."""

from typing import Annotated, Any, Literal

import regex
from pydantic import Field, ValidationError, field_validator, model_validator

from quantkit.canonical import sha256_json
from quantkit.errors import RecipeError
from quantkit.formats import FORMATS
from quantkit.passes import PASSES, QUANTISERS, REFINERS, TRANSFORMS, Quantiser
from quantkit.schema import Strict, find_document, parse_yaml, read_yaml, validate
from quantkit.types import QuantScheme

# A pattern is tried on some thousand names, each in microseconds.
_MATCH_SECONDS = 2


class WeightFormat(Strict):
    """The number format of weights. `scale_dtype: auto` is float16, or bfloat16 for a bfloat16 checkpoint."""

    bits: Literal[2, 3, 4, 8]
    type: Literal["int"] = "int"
    granularity: Literal["tensor", "channel", "group"]
    group_size: Annotated[int, Field(ge=1)] | None = None
    symmetric: bool = True
    scale_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"

    @model_validator(mode="after")
    def _group_size_belongs_to_groups(self) -> "WeightFormat":
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size belongs to granularity 'group', and only to it")
        return self

    def scheme(self, source_dtype: str) -> QuantScheme:
        """The scheme for a checkpoint whose dtype is named `source_dtype`."""
        auto = "bfloat16" if source_dtype == "bfloat16" else "float16"
        dtype = auto if self.scale_dtype == "auto" else self.scale_dtype
        return QuantScheme(self.bits, self.granularity, self.group_size, self.symmetric, dtype)


class Override(Strict):
    """Another format for what `match` (a module name on disk, or `re:` and a pattern) fits; null keeps it.

    Linears, and embeddings outside the blocks, which nothing but an override reaches.
    """

    match: str
    weights: WeightFormat | None

    @field_validator("match")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        return _checked_pattern(value)


class ActivationFormat(Strict):
    """The number format of a linear's inputs: int8, a scale a token, found when the token comes."""

    bits: Literal[8] = 8
    granularity: Literal["token"] = "token"
    dynamic: Literal[True] = True
    symmetric: Literal[True] = True


class CalibrationSpec(Strict):
    """The calibration set of calibrated passes. dtype: of matrix products while it runs; sums are float32 or better."""

    set: str
    samples: Annotated[int, Field(ge=1)]
    sequence_length: Annotated[int, Field(ge=2)]
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class Recipe(Strict):
    """A whole recipe. Passes are transforms, then exactly one quantiser, then refiners of its codes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str
    weights: WeightFormat
    activations: ActivationFormat | None = None
    group_fallback: list[Annotated[int, Field(ge=1)]] = []
    ignore: list[str] = []
    overrides: list[Override] = []
    passes: Annotated[list[str | dict[str, dict[str, Any] | None]], Field(min_length=1)]
    calibration: CalibrationSpec | None = None
    format: str = "compressed-tensors"

    @field_validator("ignore")
    @classmethod
    def _patterns_compile(cls, value: list[str]) -> list[str]:
        return [_checked_pattern(pattern) for pattern in value]

    @field_validator("format")
    @classmethod
    def _format_is_known(cls, value: str) -> str:
        if value not in FORMATS:
            raise ValueError(f"unknown format {value!r}; known: {', '.join(FORMATS)}")
        return value

    @model_validator(mode="after")
    def _activations_fit_the_weights(self) -> "Recipe":
        formats = [self.weights, *(override.weights for override in self.overrides)]
        for weights in formats:
            if self.activations is None or weights is None:
                continue
            if weights.bits != 8 or weights.granularity == "group" or not weights.symmetric:
                raise ValueError("activations: int8 products need 8-bit symmetric weights by channel or tensor")
        return self

    @model_validator(mode="after")
    def _passes_are_transforms_then_one_quantiser_then_refiners(self) -> "Recipe":
        names = [name for name, _ in self.steps]
        unknown = [name for name in names if name not in PASSES]
        if unknown:
            raise ValueError(f"passes: unknown pass {unknown[0]!r}; known: {', '.join(sorted(PASSES))}")
        quantisers = [name for name in names if name in QUANTISERS]
        if len(quantisers) != 1:
            found = " and ".join(quantisers) if quantisers else "none"
            raise ValueError(f"passes: needs exactly one quantiser ({', '.join(sorted(QUANTISERS))}), found {found}")
        before, after = names[: names.index(quantisers[0])], names[names.index(quantisers[0]) + 1 :]
        for name in before:
            if name in REFINERS:
                raise ValueError(f"passes: {name!r} refines codes and stands before the quantiser {quantisers[0]!r}")
        for name in after:
            if name in TRANSFORMS:
                raise ValueError(f"passes: the transform {name!r} stands after the quantiser {quantisers[0]!r}")
        if after and self.activations is not None:
            raise ValueError(f"passes: {after[0]!r} refines weights of float activations only")
        for name, options in self.steps:
            try:
                PASSES[name].options.model_validate(options)
            except ValidationError as invalid:
                first = invalid.errors()[0]
                raise ValueError(f"passes: {name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if self.calibrated and self.calibration is None:
            raise ValueError(f"calibration: {', '.join(names)} needs a calibration set")
        return self

    @property
    def steps(self) -> list[tuple[str, dict[str, Any]]]:
        """The passes as (name, options)."""
        pairs = ({step: None} if isinstance(step, str) else step for step in self.passes)
        return [(name, options or {}) for pair in pairs for name, options in pair.items()]

    @property
    def calibrated(self) -> bool:
        """Whether any step needs calibration data."""
        for name, options in self.steps:
            step = PASSES[name]
            if not isinstance(step, Quantiser) or step.calibrated(step.options.model_validate(options)):
                return True
        return False

    @property
    def quantiser(self) -> tuple[str, dict[str, Any]]:
        """The one quantiser among the passes."""
        return next((name, options) for name, options in self.steps if name in QUANTISERS)

    @property
    def values(self) -> dict[str, Any]:
        """The whole recipe as plain values, defaults included: what the manifest records."""
        return self.model_dump(mode="json")

    @property
    def sha256(self) -> str:
        return sha256_json(self.values)


def load_recipe(name: str, settings: list[str] | None = None) -> Recipe:
    """The recipe of a shipped name or a path, with `KEY=VALUE` settings applied (dotted keys, YAML values).

    Raises SchemaError (unreadable, unknown key, wrong value) and RecipeError (a setting that is not KEY=VALUE).
    """
    path = find_document("recipes", name)
    value = read_yaml(path)
    for setting in settings or []:
        _apply_setting(value, setting)
    return validate(Recipe, value, f"recipe {path.name}")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern (an exact name, or `re:` and a pattern matched from the start) fits a module name.

    Raises RecipeError for a pattern that backtracks without end.
    """
    if not pattern.startswith("re:"):
        return pattern == name
    try:
        return regex.match(pattern[3:], name, timeout=_MATCH_SECONDS) is not None
    except TimeoutError:
        raise RecipeError(
            f"the pattern {pattern!r} takes more than {_MATCH_SECONDS} s on {name!r}", "write it without nested repeats"
        ) from None


def _apply_setting(value: Any, setting: str) -> None:
    key, equals, text = setting.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {setting!r} is not KEY=VALUE", "write for example --set weights.group_size=64")
    place = value
    for part in parts[:-1]:
        if isinstance(place, dict):
            if not isinstance(place.get(part), dict | list):
                place[part] = {}
            place = place[part]
        elif isinstance(place, list) and _is_index(part) and int(part) < len(place):
            place = place[int(part)]
        else:
            raise RecipeError(
                f"--set {key}: there is no {part!r} to go into", "check the key with quantkit recipes NAME"
            )
    parsed = parse_yaml(text, f"--set {key}")
    if isinstance(place, dict):
        place[parts[-1]] = parsed
    elif isinstance(place, list) and _is_index(parts[-1]) and int(parts[-1]) < len(place):
        place[int(parts[-1])] = parsed
    else:
        raise RecipeError(f"--set {key}: there is no such entry", "check the key with quantkit recipes NAME")


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _checked_pattern(pattern: str) -> str:
    if not pattern:
        raise ValueError("an empty pattern matches nothing")
    if pattern.startswith("re:"):
        try:
            regex.compile(pattern[3:])
        except (regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None
    return pattern
