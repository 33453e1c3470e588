"""Strict documents: YAML and pydantic models in which an unknown key is an error that names the nearest known one."""

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from quantkit.data import data_dir, shipped_names
from quantkit.errors import QuantkitError, SchemaError

# A recipe, suite or policy is a page long. A larger file is not one, and YAML parsing is not linear.
_LARGEST_DOCUMENT = 1 << 18
# The largest JSON is the manifest or the index of a model with very many experts.
_LARGEST_JSON = 1 << 27


class Strict(BaseModel):
    """A frozen model without unknown keys, NaN, or silent coercion of numbers from text."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML with repeated keys and aliases refused: the first hides a value, the second can expand without bound."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for node_of_key, _ in node.value:
            key = self.construct_object(node_of_key, deep=True)
            if key in seen:  # TypeError for a key that is a list or mapping
                raise yaml.YAMLError(f"the key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, origin: str) -> Any:
    """The value of a YAML text. Raises SchemaError naming `origin` and the line."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader subclass
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise SchemaError(f"{origin} is not readable YAML: {reason}", "correct that place") from None


def find_document(kind: str, name: str) -> Path:
    """The file of a document given by path or by the name of a shipped one in folder `kind`.

    Raises SchemaError that lists the nearest names where there is neither.
    """
    path = Path(name)
    if path.suffix in {".yaml", ".yml"} or "/" in name:
        if path.is_file():
            return path
        raise SchemaError(f"{name} does not exist", f"give an existing file, or one of the shipped names in {kind}/")
    shipped = data_dir(kind) / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    known = shipped_names(kind)
    near = difflib.get_close_matches(name, known, n=3) or known
    raise SchemaError(f"nothing named {name!r} is shipped in {kind}/", f"use one of: {', '.join(near)}, or a path")


def read_yaml(path: Path) -> Any:
    """The value of a YAML file. Raises SchemaError for a missing, oversized or unreadable one."""
    try:
        _refuse_special(path)
        if path.stat().st_size > _LARGEST_DOCUMENT:
            raise SchemaError(f"{path} is larger than {_LARGEST_DOCUMENT} bytes", "give the YAML document itself")
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path} cannot be read: {error}", "give a readable UTF-8 file") from None


def read_json(path: Path, error: type[QuantkitError], action: str) -> Any:
    """The value of a JSON file with unique keys. Raises `error` naming the file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise ValueError("a key stands twice")
        return dict(pairs)

    try:
        _refuse_special(path)
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"larger than {_LARGEST_JSON} bytes")
        return json.loads(path.read_bytes(), object_pairs_hook=unique)
    except FileNotFoundError:
        raise error(f"{path} does not exist", action) from None
    except (OSError, ValueError, RecursionError) as reason:
        raise error(f"{path} is not readable JSON ({reason})", action) from None


def _refuse_special(path: Path) -> None:
    """Raises OSError for a pipe or device, on which a reader would wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("it is no regular file")


def validate(
    model: type[Model], value: Any, origin: str, error: type[QuantkitError] = SchemaError, action: str = ""
) -> Model:
    """`value` as `model`. Raises `error` with the first problem: its key, what is wrong, and the nearest known key."""
    try:
        return model.model_validate_json(json.dumps(value))
    except ValidationError as invalid:
        problem, default_action = _first_problem(invalid, model)
        raise error(f"{origin}: {problem}", action or default_action) from None
    except (TypeError, ValueError, RecursionError) as reason:
        raise error(f"{origin} holds a value that is not plain data ({reason})", "use plain YAML") from None


def _first_problem(invalid: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The problem most worth reading, and the next action. Unknown keys come first: they explain missing ones."""
    found = invalid.errors()
    # Of a value that may be of several kinds, the kind that was followed into is the one that was meant.
    followed = {problem["loc"][:-2] for problem in found if len(problem["loc"]) > 1}
    problems = sorted(
        found, key=lambda problem: (problem["type"] != "extra_forbidden", problem["loc"][:-1] in followed)
    )
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(_known_keys(model))
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        return f"unknown key {key!r}", f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    message = first["msg"].removeprefix("Value error, ")
    return (f"{key}: {message}" if key else message), "correct that value"


def _known_keys(model: type[BaseModel]) -> set[str]:
    """Every key that may stand somewhere in a document of this model."""
    properties = [model.model_json_schema()]
    keys: set[str] = set()
    while properties:
        schema = properties.pop()
        keys |= set(schema.get("properties", {}))
        properties += list(schema.get("$defs", {}).values())
    return keys
