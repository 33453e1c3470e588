"""Answers of a reference, kept on disk: a base is run once, however many artifacts are compared with it.

One file an answer: a line with the SHA-256 of the rest, then the rest. What does not hash to its first line is not
used. The folder has a bound; what was not read for longest goes first.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch

from quantkit.canonical import sha256_json
from quantkit.checkpoint import cache_dir
from quantkit.evaluate.scoring import Logits
from quantkit.files import replace_file

# Of all references together. A window of 512 tokens of a 150,000-word vocabulary in bfloat16 is 157 MB.
LARGEST_CACHE = 16 << 30


class Kept:
    """What one model answers, read from disk where the same model was asked the same before.

    identity: of the model's files. The arithmetic belongs to the key as well: dtype, versions, threads, and the kernels
    of this kind of processor. own_code: whether code that the checkpoint brings may run in place of transformers' own,
    which need not answer the same. limit: bytes of the folder, which also takes no more than half of the disk that is
    free. A disk that is full or cannot be written only costs the next run its time.
    """

    def __init__(
        self,
        identity: str,
        dtype: torch.dtype,
        *,
        own_code: bool = False,
        folder: Path | None = None,
        limit: int = LARGEST_CACHE,
    ) -> None:
        facts = {
            "identity": identity,
            "dtype": str(dtype),
            "own_code": own_code,
            "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }
        self._root = folder or cache_dir() / "kept"
        self._place = self._root / sha256_json(facts)[:32]
        self._limit = limit
        self._started = time.time_ns()
        self.found = 0  # answers that were read

    def logits(self, compute: Logits) -> Logits:
        """`compute` for windows of token ids `[length]`, to the bit."""

        def logits(window: torch.Tensor) -> torch.Tensor:
            path = self._place / hashlib.sha256(window.numpy().astype("<i8").tobytes()).hexdigest()[:32]
            found = _tensor_of(self._read(path))
            if found is None:
                found = compute(window)
                self._write(path, _bytes_of(found))
            return found

        return logits

    def document(self, question: Any, compute: Callable[[], Any]) -> Any:
        """`compute()`, plain data, for a question that is plain data too. What JSON would change is not kept."""
        path = self._place / sha256_json(question)
        if (data := self._read(path)) is not None:
            return json.loads(data)
        answer = compute()
        with suppress(TypeError, ValueError):
            text = json.dumps(answer)
            if json.loads(text) == answer:
                self._write(path, text.encode())
        return answer

    def _read(self, path: Path) -> bytearray | None:
        """The data of a file; None where there is none, or a damaged one."""
        with suppress(OSError):
            with path.open("rb") as stream:
                digest = stream.readline().strip()
                data = bytearray(stream.read())
            with suppress(OSError):  # a folder that only others may write is good to read
                path.touch()  # read last
            if hashlib.sha256(data).hexdigest().encode() == digest:
                self.found += 1
                return data
        return None

    def _write(self, path: Path, data: bytes) -> None:
        whole = hashlib.sha256(data).hexdigest().encode() + b"\n" + data
        with suppress(OSError):
            self._place.mkdir(parents=True, exist_ok=True)
            if self._make_room(len(whole)):
                replace_file(path, whole)

    def _make_room(self, size: int) -> bool:
        """Remove files, those not read for longest first, until `size` more bytes fit; False where they never will.

        Nothing that this run has used goes: a run larger than the folder would push out each answer before it is asked
        for again.
        """
        kept = []
        for path in self._root.glob("*/*"):
            with suppress(OSError):  # another process may have removed it
                status = path.stat()
                if S_ISREG(status.st_mode):
                    kept.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in kept)
        allowed = min(self._limit, total + shutil.disk_usage(self._root).free // 2) - size
        for used, length, path in sorted(kept):
            if total <= allowed or used >= self._started:
                break
            with suppress(OSError):  # another user's
                path.unlink(missing_ok=True)
                total -= length
        return total <= allowed


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """A line of JSON (dtype and shape), then the tensor as it was computed."""
    head = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    # Through uint8, for numpy has no bfloat16.
    return json.dumps(head).encode() + b"\n" + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _tensor_of(data: bytearray | None) -> torch.Tensor | None:
    if data is None:
        return None
    line, _, values = data.partition(b"\n")
    head = json.loads(line)
    return torch.frombuffer(values, dtype=getattr(torch, head["dtype"])).reshape(head["shape"])
