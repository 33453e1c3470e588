"""The hash of each component: of everything that determines a model's answers, so that a release shows what changed.

Components are contents, not files: config.json holds the scheme beside the architecture, tokenizer_config.json may hold
the chat template, and the default system prompt is what that template writes when nobody gives one.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.canonical import canonical_json, sha256_json
from quantkit.chat import opening
from quantkit.manifest import COMPONENTS, Component, FileRecord

# Files with a key that belongs to another component, and to which.
SHARED: dict[str, tuple[str, Component]] = {
    "config.json": ("quantization_config", "scheme"),
    "tokenizer_config.json": ("chat_template", "chat_template"),
}


def component_hashes(
    directory: Path,
    files: Mapping[Component, Sequence[FileRecord]],
    recorded: Mapping[Component, str | None] | None = None,
) -> dict[Component, str | None]:
    """SHA-256 of each component of an artifact; None for one of which it has nothing.

    files: the records of all files, which stand for their bytes. recorded: earlier hashes; then the system prompt is
    only rendered again where the template or a token has changed, because a later library may render differently.
    """
    contents: dict[Component, Any] = {
        name: {record.name: _own_content(directory, record) for record in files.get(name, ())} for name in COMPONENTS
    }
    templates = chat_templates(directory)
    contents["scheme"] = (_values(directory / "config.json") or {}).get("quantization_config")
    contents["chat_template"] = templates
    hashes = {name: sha256_json(content) if content else None for name, content in contents.items()}
    changed = recorded is None or any(hashes[name] != recorded[name] for name in ("chat_template", "tokenizer"))
    if recorded is not None and not changed:
        return hashes | {"system_prompt": recorded["system_prompt"]}
    start = opening(templates["default"], _special_tokens(directory)) if "default" in templates else None
    if start is not None:
        hashes["system_prompt"] = sha256_json(contents["system_prompt"] | {"": start})
    return hashes


def chat_templates(directory: Path) -> dict[str, str]:
    """The chat templates of a directory by name, wherever they stand; a file goes before tokenizer_config.json."""
    found: dict[str, str] = {}
    inline = (_values(directory / "tokenizer_config.json") or {}).get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    for entry in inline if isinstance(inline, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            found[entry["name"]] = entry["template"]
    legacy = (_values(directory / "chat_template.json") or {}).get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    for name, path in (files | {"default": directory / "chat_template.jinja"}).items():
        if path.is_file():
            found[name] = path.read_text(encoding="utf-8", errors="replace")
    return found


def _own_content(directory: Path, record: FileRecord) -> Any:
    """What a file holds of its own component: its hash, or its values without those of another component."""
    values = _values(directory / record.name) if record.name in SHARED else None
    if values is None:
        return record.sha256
    return {key: value for key, value in values.items() if key != SHARED[record.name][0]}


def _values(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no readable one, which is then known by its bytes alone."""
    try:
        values = json.loads(path.read_bytes())
        canonical_json(values)  # NaN and broken characters have no canonical form
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens that templates may name (bos_token, eos_token, ...)."""
    tokens = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (_values(directory / name) or {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens
