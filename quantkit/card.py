"""README.md of an artifact: its model card, made from the manifest, with the YAML head that model hubs read.

It lies outside the identity, so that `quantkit eval` can put its tables there and people can write in it. The source's
own README is kept as source/README.md, byte for byte and inside the identity; licence and language are taken from its
head. Every text that comes from a model, a recipe or a report is escaped: it stays text.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from jinja2 import ChainableUndefined, Environment, PackageLoader

from quantkit.artifact import CARD_FILE
from quantkit.errors import SchemaError
from quantkit.manifest import Manifest
from quantkit.schema import parse_yaml

QUALITY_START, QUALITY_END = "<!-- quantkit:quality -->", "<!-- /quantkit:quality -->"
NOT_MEASURED = "Not measured yet: `quantkit eval` on this directory writes its figures here."

# A folder that no checkpoint's folder can meet in an artifact: folders of a source are not copied.
_SOURCE_FOLDER = "source"
# The head of a card is a page long.
_LARGEST_HEAD = 1 << 16
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_WORD = r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,99}"
# What is taken from the head of the source's card, and what each value must look like to be taken.
_CARRIED = {
    "license": _WORD,
    "license_name": _WORD,
    "license_link": r"(https?://[^\s<>\"'`]{1,500}|[\w./-]{1,200})",
    "language": r"[A-Za-z]{2,8}(-[A-Za-z0-9]{2,8})*",
}
# Characters that mean something to Markdown or to the HTML inside it.
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~&!$@])")


class Markdown(str):
    """Text that is Markdown already."""


def place_of(name: str) -> str:
    """Where a side file of the source stands in the artifact: its README moves aside, all else keeps its name."""
    return f"{_SOURCE_FOLDER}/{name}" if name.lower() == CARD_FILE.lower() else name


def escape_markdown(value: object) -> Markdown:
    """`value` as one line of Markdown that shows it and does nothing: no links, no HTML, no table cells."""
    if isinstance(value, Markdown):
        return value
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return Markdown(_MARKDOWN.sub(r"\\\1", text).replace("://", r":\//"))


def model_card(manifest: Manifest, artifact: Path, quality: str = NOT_MEASURED) -> str:
    """The whole card. quality: Markdown of what was measured, escaped already."""
    environment = Environment(
        loader=PackageLoader("quantkit", "templates"),
        autoescape=False,  # noqa: S701 - for HTML; every value passes through finalize instead
        finalize=escape_markdown,
        undefined=ChainableUndefined,  # a recipe or calibration of another version may lack what is shown of it
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    carried = carried_facts(manifest, artifact)
    return environment.get_template("card.md").render(
        manifest=manifest,
        head=Markdown(yaml.safe_dump(_head(manifest, carried), sort_keys=False, allow_unicode=True)),
        schemes=Counter(layer.scheme.scheme.describe() for layer in manifest.layers),
        steps=_steps(manifest.recipe.get("passes")),
        license=carried.get("license"),
        license_files=[name for name in sorted(manifest.files) if name.upper().startswith(("LICEN", "COPYING"))],
        source_card=_source_card(manifest),
        region=Markdown(f"{QUALITY_START}\n{quality}\n{QUALITY_END}"),
    )


def with_quality(card: str, quality: str) -> str | None:
    """A card with `quality` between its two markers and nothing else changed; None where it lacks them."""
    before, start, rest = card.partition(QUALITY_START)
    _, end, after = rest.partition(QUALITY_END)
    return f"{before}{start}\n{quality}\n{end}{after}" if start and end else None


def carried_facts(manifest: Manifest, artifact: Path) -> dict[str, Any]:
    """Licence and language as the head of the source's card states them; what is not plainly that is left out."""
    name = _source_card(manifest)
    found = _read_head(artifact / name) if name else {}
    facts: dict[str, Any] = {}
    for key, pattern in _CARRIED.items():
        value = found.get(key)
        values = value if isinstance(value, list) else [value]
        plain = [text for text in values[:200] if isinstance(text, str) and re.fullmatch(pattern, text, re.ASCII)]
        if plain:
            facts[key] = plain if isinstance(value, list) else plain[0]
    return facts


def _steps(passes: Any) -> list[str]:
    """The names of the passes in order."""
    steps = passes if isinstance(passes, list) else []
    return [str(name) for step in steps for name in (step if isinstance(step, dict) else [step])]


def _source_card(manifest: Manifest) -> str | None:
    """The name in the artifact of the source's README, if it had one."""
    return next((name for name in sorted(manifest.files) if name.lower() == place_of(CARD_FILE).lower()), None)


def _read_head(path: Path) -> dict[str, Any]:
    """The YAML between the first two lines of dashes; nothing where there is none or it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            text = stream.read(_LARGEST_HEAD)
        head = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|\Z)", text, re.DOTALL)
        value = parse_yaml(head[1], str(path)) if head else {}
    except (OSError, UnicodeDecodeError, SchemaError):
        return {}
    return value if isinstance(value, dict) else {}


def _head(manifest: Manifest, carried: dict[str, Any]) -> dict[str, Any]:
    """The card's metadata. base_model is left out where the source's name could not be that of a repository."""
    name = manifest.source.name
    bits = sorted({layer.scheme.bits for layer in manifest.layers})
    tags = ["quantkit", *(["compressed-tensors", "quantized"] if bits else []), *(f"{n}-bit" for n in bits)]
    return {
        **({"base_model": name, "base_model_relation": "quantized"} if _REPOSITORY.fullmatch(name) else {}),
        **carried,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
