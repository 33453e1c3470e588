"""Canonical JSON and hashes: one spelling for one value, so that a hash names a value and not its formatting."""

import hashlib
import json
from pathlib import Path
from typing import Any

_BLOCK = 1 << 22


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys, no spaces, no NaN, and a final newline.

    Raises ValueError for NaN and infinite numbers, which JSON cannot hold.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`."""
    return sha256_bytes(canonical_json(value))


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
