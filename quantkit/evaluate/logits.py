"""Logits of a reference, kept on disk: a base is run once, however many artifacts are compared with it.

One file a window: a line of JSON (dtype, shape, and the SHA-256 of both with the rest), then the bytes of the tensor as
it was computed. What does not hash to what its first line says is not used. The folder has a bound; what was not read
for longest goes first.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

from quantkit.canonical import sha256_json
from quantkit.checkpoint import cache_dir
from quantkit.files import replace_file

# Of all references together. A window of 512 tokens of a 150,000-word vocabulary in bfloat16 is 157 MB.
LARGEST_CACHE = 16 << 30

# Logits `[length - 1, vocabulary]` of the window of token ids `[length]`.
Logits = Callable[[torch.Tensor], torch.Tensor]


def cached_logits(
    compute: Logits, identity: str, dtype: torch.dtype, *, folder: Path | None = None, limit: int = LARGEST_CACHE
) -> Logits:
    """`compute`, read from disk where the same model has seen the same window before.

    identity: of the model's files. The arithmetic belongs to the key: dtype, versions, and the kernels of this kind of
    processor. A disk that is full or cannot be written only costs the next run its time.
    """
    facts = {
        "identity": identity,
        "dtype": str(dtype),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    root = folder or cache_dir() / "logits"
    place = root / sha256_json(facts)[:32]

    def logits(window: torch.Tensor) -> torch.Tensor:
        path = place / hashlib.sha256(window.numpy().astype("<i8").tobytes()).hexdigest()[:32]
        found = _read(path)
        if found is None:
            found = compute(window)
            with suppress(OSError):
                _write(path, found, root, limit)
        return found

    return logits


def _read(path: Path) -> torch.Tensor | None:
    """The tensor of a file; None where there is none, or a damaged one."""
    try:
        with path.open("rb") as stream:
            head = json.loads(stream.readline())
            data = bytearray(stream.read())
        path.touch()  # read last
        if _digest(head["dtype"], head["shape"], data) != head["sha256"]:
            return None
        return torch.frombuffer(data, dtype=getattr(torch, head["dtype"])).reshape(head["shape"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        return None


def _write(path: Path, logits: torch.Tensor, root: Path, limit: int) -> None:
    # Through uint8, for numpy has no bfloat16.
    data = logits.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    if len(data) > limit:
        return
    _make_room(root, limit - len(data))
    dtype, shape = str(logits.dtype).removeprefix("torch."), list(logits.shape)
    head = {"dtype": dtype, "shape": shape, "sha256": _digest(dtype, shape, data)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(head).encode() + b"\n" + data)


def _digest(dtype: str, shape: list[int], data: bytes | bytearray) -> str:
    whole = hashlib.sha256(json.dumps([dtype, shape]).encode())
    whole.update(data)
    return whole.hexdigest()


def _make_room(root: Path, allowed: int) -> None:
    """Remove files, those not read for longest first, until at most `allowed` bytes are left."""
    kept = []
    for path in root.glob("*/*"):
        with suppress(OSError):  # another process may have removed it
            status = path.stat()
            kept.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total <= allowed:
            return
        path.unlink(missing_ok=True)
        total -= size
