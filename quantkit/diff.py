"""`quantkit diff`: which components differ between two artifacts, and what else their manifests record differently."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.manifest import COMPONENTS, Component, Manifest, read_manifest, read_manifest_file

# Names shown of files or layers that differ; the rest is a number.
_SHOWN = 2
# Longer texts are named and not shown.
_SHORT = 40
# How a component came about is recorded beside it; these keys are the components themselves.
_COMPARED = {"schema_version", "components", "component_sha256", "recipe_sha256"}


@dataclass(frozen=True)
class ComponentDifference:
    """A component of two manifests: its hash in each (None: it has none), and what differs in words."""

    first: str | None
    second: str | None
    details: list[str]

    @property
    def same(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True)
class Difference:
    """Two manifests compared. record: keys of the manifest, beside the components, that differ."""

    identities: tuple[str, str]
    components: dict[Component, ComponentDifference]
    record: dict[str, str]

    @property
    def same(self) -> bool:
        """Whether every component is the same: then both answer alike, whatever else their manifests record."""
        return all(component.same for component in self.components.values())

    def values(self) -> dict[str, Any]:
        """The same as plain values for --json."""
        return {
            "same": self.same,
            "identities": list(self.identities),
            "components": {
                name: {"same": part.same, "sha256": [part.first, part.second], "details": part.details}
                for name, part in self.components.items()
            },
            "record": self.record,
        }


def diff(first: Manifest, second: Manifest) -> Difference:
    """Compare two manifests. Bytes are not read: that they are as recorded is for verify to say."""
    components = {}
    for name in COMPONENTS:
        pair = first.component_sha256[name], second.component_sha256[name]
        details = [] if pair[0] == pair[1] else _details(name, first, second)
        components[name] = ComponentDifference(*pair, details)
    values = first.model_dump(mode="json"), second.model_dump(mode="json")
    other = [key for key in values[0] if key not in _COMPARED and values[0][key] != values[1][key]]
    record = {key: _told(values[0][key], values[1][key]) for key in other}
    return Difference((first.identity, second.identity), components, record)


def named_manifest(path: Path) -> Manifest:
    """The manifest of an artifact directory, or of a manifest's own path, as the ledger keeps them."""
    return read_manifest_file(path) if path.is_file() else read_manifest(path)


def _details(name: Component, first: Manifest, second: Manifest) -> list[str]:
    details = _files(name, first, second)
    if name == "scheme":
        details += _schemes(first, second)
    own = {"chat_template": "tokenizer_config.json", "scheme": "config.json"}.get(name)
    if not details and own is not None:
        details = [f"in {own}"]
    if name == "system_prompt":
        details.append("what the chat template writes before the first message of a user")
    return details


def _files(name: Component, first: Manifest, second: Manifest) -> list[str]:
    a, b = ({record.name: record for record in manifest.components[name]} for manifest in (first, second))
    changed = sorted(key for key in a.keys() & b.keys() if a[key] != b[key])
    found = {"changed": changed, "only in A": sorted(a.keys() - b.keys()), "only in B": sorted(b.keys() - a.keys())}
    return [f"{what}: {_list(names)}" for what, names in found.items() if names]


def _schemes(first: Manifest, second: Manifest) -> list[str]:
    """The layers that have another scheme, those of one change together."""
    a, b = ({layer.name: layer.scheme.scheme.describe() for layer in m.layers} for m in (first, second))
    changes: dict[str, list[str]] = {}
    for layer in [*a, *(layer for layer in b if layer not in a)]:
        if a.get(layer) != b.get(layer):
            changes.setdefault(f"{a.get(layer, 'kept')} -> {b.get(layer, 'kept')}", []).append(layer)
    return [f"{change}: {len(layers)} layers ({_list(layers)})" for change, layers in changes.items()]


def _told(a: Any, b: Any) -> str:
    """How two values of one key differ, on one line."""
    if isinstance(a, dict) and isinstance(b, dict):
        inner = sorted(part for part in a.keys() | b.keys() if a.get(part) != b.get(part))
        plain = [f"{part} {a.get(part)} -> {b.get(part)}" for part in inner if _is_plain(a.get(part), b.get(part))]
        return "; ".join(plain + [part for part in inner if not _is_plain(a.get(part), b.get(part))])
    if _is_plain(a, b):
        return f"{a} -> {b}"
    sizes = len(a or ()), len(b or ())
    return f"{sizes[0]} -> {sizes[1]} entries" if sizes[0] != sizes[1] else f"some of {sizes[0]} entries"


def _is_plain(*values: Any) -> bool:
    return all(value is None or isinstance(value, int | float | str) for value in values) and all(
        len(str(value)) <= _SHORT for value in values
    )


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
