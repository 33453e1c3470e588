"""manifest.json: what an artifact is, in canonical JSON without time, host or path. Its SHA-256 is the identity."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from quantkit.canonical import canonical_json, sha256_bytes, sha256_json
from quantkit.errors import ArtifactError
from quantkit.formats import FORMATS
from quantkit.schema import Strict, read_json, validate
from quantkit.types import Granularity, QuantScheme

MANIFEST_FILE = "manifest.json"
RUN_FILE = "run.json"
SCHEMA_VERSION: Literal[2] = 2

# What determines the answers; a release may change each by itself. Some have no file of their own: see components.py.
Component = Literal[
    "weights", "scheme", "config", "tokenizer", "chat_template", "system_prompt", "generation", "other"
]  # fmt: skip
COMPONENTS: tuple[Component, ...] = get_args(Component)


class FileRecord(Strict):
    """A file by its bytes."""

    name: Annotated[str, Field(min_length=1, max_length=255)]
    sha256: str
    size: int

    @field_validator("name")
    @classmethod
    def _stays_inside(cls, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            raise ValueError(f"the file {name!r} is not inside the directory")
        return name


class SchemeRecord(Strict):
    """A QuantScheme as the manifest holds it."""

    bits: int
    granularity: Granularity
    group_size: int | None
    symmetric: bool
    scale_dtype: str

    @model_validator(mode="after")
    def _is_a_scheme(self) -> "SchemeRecord":
        QuantScheme(**self.model_dump())  # raises ValueError with the reason
        return self

    @classmethod
    def of(cls, scheme: QuantScheme) -> "SchemeRecord":
        return cls(**vars(scheme))

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(**self.model_dump())


class LayerError(Strict):
    """What rounding did to a weight, against the float weight: relative is |W - Q| / |W| (Frobenius), to 6 digits."""

    relative: float
    max_abs: float


class OutputError(Strict):
    """Squared error of a layer's output on its calibration inputs over the output's own square.

    before: of rounding the original weight to nearest on min-max scales; after: of what stands in the file.
    """

    before: float
    after: float


class LayerRecord(Strict):
    """One quantised linear, or embedding: its shape is vocabulary and width.

    error: against the weight that was rounded, after folds. output_error, tokens, damping: of calibrated passes, else
    null. bytes: all its tensors on disk. fallback: what differs from the recipe, or null.
    """

    name: str
    module: str
    shape: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    scheme: SchemeRecord
    passes: list[str]
    error: LayerError
    output_error: OutputError | None = None
    tokens: int | None = None
    damping: float | None = None
    notes: list[str] = []
    bytes: int
    fallback: str | None

    @model_validator(mode="after")
    def _scheme_fits_the_shape(self) -> "LayerRecord":
        self.scheme.scheme.groups(self.shape[1])  # raises ValueError with the reason
        return self


class KeptRecord(Strict):
    """One tensor that stands in the artifact as it stood in the source, and why."""

    name: str
    dtype: str
    shape: list[int]
    reason: str


class DroppedRecord(Strict):
    """One tensor of the source that is not in the artifact, and why nothing is lost."""

    name: str
    reason: str


class FoldRecord(Strict):
    """One place where scales could move from a producer into its consumers, and what came of it.

    residual: largest relative change of the block's output in the equivalence check. used: what each transform did
    there, with its setting and the error that it estimated; refused: why nothing was folded, or null.
    """

    kind: Literal["norm", "offset_norm", "linear"]
    producer: str
    consumers: list[str]
    residual: float
    used: list[dict[str, str | float]]
    refused: str | None


class FallbackRecord(Strict):
    """One thing that was done differently from the recipe."""

    layer: str
    kind: Literal["group_size", "kept", "fold", "damping", "quantiser"]
    detail: str


class SourceRecord(Strict):
    """The checkpoint: every file that the artifact depends on."""

    name: str
    revision: str | None
    files: list[FileRecord]


class Totals(Strict):
    """Sizes, from the bytes on disk.

    bits_per_weight counts every tensor of the quantised layers (codes, scales, zero-points, shape records) over their
    weights; bits_per_weight_nominal is the schemes' own arithmetic; bits_per_parameter is all weight files over all
    parameters of the model.
    """

    weight_bytes: int
    source_weight_bytes: int
    parameters: int
    quantised_parameters: int
    bits_per_weight: float | None
    bits_per_weight_nominal: float | None
    bits_per_parameter: float

    @model_validator(mode="after")
    def _bits_of_quantised_layers_come_together(self) -> "Totals":
        if (self.bits_per_weight is None) != (self.bits_per_weight_nominal is None):
            raise ValueError("bits_per_weight and bits_per_weight_nominal are both there, or neither")
        return self


class Manifest(Strict):
    """The whole document. components: files by component; component_sha256: the hash of each, or null for nothing."""

    schema_version: Literal[2]
    versions: dict[str, str]
    format: str
    recipe: dict[str, Any]
    recipe_sha256: str
    source: SourceRecord
    calibration: dict[str, Any] | None
    layers: list[LayerRecord]
    fold_sites: list[FoldRecord]
    kept: list[KeptRecord]
    dropped: list[DroppedRecord]
    fallbacks: list[FallbackRecord]
    notes: list[str]
    readers: dict[str, str]
    components: dict[Component, list[FileRecord]]
    component_sha256: dict[Component, str | None]
    totals: Totals

    @field_validator("format")
    @classmethod
    def _format_is_known(cls, value: str) -> str:
        if value not in FORMATS:
            raise ValueError(f"unknown format {value!r}")
        return value

    @field_validator("components", "component_sha256")
    @classmethod
    def _every_component_is_there(cls, value: dict[Component, Any]) -> dict[Component, Any]:
        missing = [name for name in COMPONENTS if name not in value]
        if missing:
            raise ValueError(f"no {missing[0]}")
        return value

    @field_validator("recipe")
    @classmethod
    def _recipe_has_a_name(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("name"), str):
            raise ValueError("it has no name")
        return value

    @property
    def data(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def identity(self) -> str:
        return sha256_bytes(self.data)

    @property
    def source_identity(self) -> str:
        """The identity of the source checkpoint, as reports name it."""
        return files_identity(self.source.files)

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every file of the artifact that the identity covers, by name."""
        return {record.name: record for records in self.components.values() for record in records}

    def metric(self, name: str) -> float | None:
        """A number that a policy can bound as `manifest.<name>`, or None where there is no such number."""
        numbers = {**self.totals.model_dump(), "fallbacks": len(self.fallbacks), "kept": len(self.kept)}
        value = numbers.get(name)
        return None if value is None else float(value)


def files_identity(files: list[FileRecord]) -> str:
    """The identity of a checkpoint: the hash of its files' names, hashes and sizes."""
    return sha256_json([record.model_dump() for record in files])


def read_manifest(artifact: Path) -> Manifest:
    """The manifest of an artifact directory. Raises ArtifactError: none there, unreadable, or not canonical."""
    if not artifact.is_dir():
        raise ArtifactError(f"{artifact} is not a directory", "give the output directory of quantkit convert")
    return read_manifest_file(artifact / MANIFEST_FILE)


def read_manifest_file(path: Path) -> Manifest:
    """A manifest by its own path. Raises ArtifactError: none there, another version, unreadable, or not canonical."""
    value = read_json(path, ArtifactError, "give a directory that quantkit convert wrote")
    found = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(found, int) and found != SCHEMA_VERSION:
        raise ArtifactError(
            f"{path} is of schema_version {found}, this quantkit reads {SCHEMA_VERSION}",
            "convert the source again with this quantkit (same recipe, same weights), or use the one that wrote it",
        )
    manifest = validate(Manifest, value, str(path), ArtifactError, "convert again with this version of quantkit")
    try:
        canonical = path.read_bytes() == manifest.data
    except ValueError:  # NaN, or half a character pair: canonical JSON holds neither
        canonical = False
    if not canonical:
        raise ArtifactError(f"{path} is not in canonical form", "restore the file that quantkit convert wrote")
    return manifest


def component_of(name: str) -> Component:
    """The component that a file of an artifact belongs to, by its name."""
    if name.startswith("model") and (name.endswith(".safetensors") or name.endswith(".safetensors.index.json")):
        return "weights"
    if name == "config.json":
        return "config"
    if name.startswith(("chat_template", "additional_chat_templates/")):
        return "chat_template"
    if name == "generation_config.json":
        return "generation"
    if name.lower().startswith("system_prompt"):
        return "system_prompt"
    tokenizer = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "spiece", "sentencepiece")
    return "tokenizer" if name.startswith(tokenizer) else "other"
