"""safetensors files by byte range: strict headers, reads without a memory map, writes at known offsets.

    | 8 bytes: header length, little endian | JSON header, padded with spaces | tensor bytes, no holes, no overlap |

The reader uses plain reads instead of a memory map, so that resident memory is what was asked for and nothing else. The
writer knows every shape beforehand, so a file is laid out once and filled in any order.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import ArtifactError, CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The limit of the reference implementation: a longer header is an attack or a mistake.
_LONGEST_HEADER = 100_000_000
# Libraries turn the numbers in a name into integers, which fails or takes long on absurd ones.
_LONGEST_NAME = 1024
_COPY_BYTES = 1 << 24
_DAMAGED = "download or copy the file again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in one file: dtype, shape, and its absolute byte range `[start, stop)`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name.

    Raises CheckpointError naming the file and the tensor: truncated file, oversized or unreadable header, repeated
    name, unknown dtype, impossible shape, a range that does not fit its shape, overlaps, holes, trailing bytes.
    """
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise CheckpointError(f"{path}: the header is truncated or its length is absurd", _DAMAGED)
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check that the shard is there") from None
    entries = {}
    for name, record in _parse_header(raw, path).items():
        if name != "__metadata__":
            entries[name] = _entry(name, record, path, 8 + length)
    _check_layout(sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)), path, 8 + length, size)
    return entries


def _parse_header(raw: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                raise CheckpointError(f"{path}: the header names {name!r} twice", _DAMAGED)
            seen[name] = value
        return seen

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error})", _DAMAGED) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object", _DAMAGED)
    return header


def _entry(name: str, record: Any, path: Path, base: int) -> TensorEntry:
    def whole(values: Any) -> bool:
        return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)

    if len(name) > _LONGEST_NAME:
        raise CheckpointError(f"{path}: a tensor's name has {len(name)} characters ({name[:40]!r}...)", _DAMAGED)
    where = f"{path}: tensor {name!r}"
    if not isinstance(record, dict) or not whole(record.get("shape")) or not whole(record.get("data_offsets")):
        raise CheckpointError(f"{where} has no usable shape and data_offsets", _DAMAGED)
    dtype_name = record.get("dtype")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{where} has the unknown dtype {dtype_name!r}", f"use one of {', '.join(DTYPES)}")
    dtype, shape, offsets = DTYPES[dtype_name], tuple(record["shape"]), record["data_offsets"]
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{where}: the byte range {offsets} does not fit shape {list(shape)}", _DAMAGED)
    return TensorEntry(name, dtype, shape, path, base + offsets[0], base + offsets[1])


def _check_layout(entries: list[TensorEntry], path: Path, base: int, size: int) -> None:
    position = base
    for entry in entries:
        if entry.stop > size:
            raise CheckpointError(
                f"{path}: tensor {entry.name!r} ends behind the end of the file (truncated)", _DAMAGED
            )
        if entry.start != position:
            kind = "overlaps another tensor" if entry.start < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {entry.name!r} {kind}", _DAMAGED)
        position = entry.stop
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes follow the last tensor", _DAMAGED)


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """The whole tensor in its dtype and shape, in its own memory. Raises CheckpointError for a file that is short."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    with entry.path.open("rb", buffering=0) as stream:
        _read_into(stream.fileno(), _bytes_of(data), entry.start, entry)
    return data.view(entry.dtype).reshape(entry.shape)


def read_chunks(entry: TensorEntry) -> Iterator[torch.Tensor]:
    """The tensor as flat pieces of at most 16 MB, for work that needs no shape (copy, finiteness)."""
    with entry.path.open("rb", buffering=0) as stream:
        for start in range(entry.start, entry.stop, _COPY_BYTES):
            data = torch.empty(min(_COPY_BYTES, entry.stop - start), dtype=torch.uint8)
            _read_into(stream.fileno(), _bytes_of(data), start, entry)
            yield data.view(entry.dtype)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read_into(descriptor: int, buffer: memoryview, start: int, entry: TensorEntry) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], start + done)
        if count == 0:
            raise CheckpointError(f"{entry.path}: tensor {entry.name!r} is cut off (the file shrank)", _DAMAGED)
        done += count


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file before its bytes: the header, and where each tensor goes."""

    header: bytes
    entries: dict[str, TensorEntry]

    @property
    def size(self) -> int:
        return len(self.header) + sum(entry.nbytes for entry in self.entries.values())


def layout(path: Path, specs: list[TensorSpec]) -> FileLayout:
    """Lay out a file: wide dtypes first, so that every tensor is aligned to its item size, then by name."""
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
    records: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in ordered:
        stop = position + spec.nbytes
        records[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(records, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    entries = {}
    for spec in ordered:
        start, stop = records[spec.name]["data_offsets"]
        entries[spec.name] = TensorEntry(
            spec.name, spec.dtype, spec.shape, path, len(header) + start, len(header) + stop
        )
    return FileLayout(header, entries)


class TensorFileWriter:
    """Fills one laid-out file, tensor by tensor, in any order.

    written: tensors that stand in the file already; without any it is made anew. Raises ArtifactError for a tensor that
    is not in the layout, comes twice, has another dtype or shape, or is missing at `close`; OSError (disk full) passes
    through.
    """

    def __init__(self, path: Path, plan: FileLayout, written: Set[str] = frozenset()) -> None:
        self._plan = plan
        self._path = path
        self._pending = plan.entries.keys() - written
        self._stream = path.open("r+b" if written else "wb", buffering=0)
        self._stream.truncate(plan.size)
        write_at(self._stream.fileno(), plan.header, 0)
        self._dirty = True

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write a tensor; returns the SHA-256 of its bytes."""
        entry = self._claim(name)
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ArtifactError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, planned {entry.dtype} {entry.shape}",
                "report this as a defect of quantkit",
            )
        data = _bytes_of(tensor.contiguous().reshape(-1))
        write_at(self._stream.fileno(), data, entry.start)
        return hashlib.sha256(data).hexdigest()

    def write_chunks(self, name: str, chunks: Iterator[torch.Tensor]) -> str:
        """Write a tensor from the flat pieces that `read_chunks` yields; returns the SHA-256 of its bytes."""
        entry = self._claim(name)
        position = entry.start
        digest = hashlib.sha256()
        for chunk in chunks:
            data = _bytes_of(chunk)
            write_at(self._stream.fileno(), data, position)
            digest.update(data)
            position += len(data)
        if position != entry.stop:
            raise ArtifactError(f"tensor {name!r} came with {position - entry.start} of {entry.nbytes} bytes", _DAMAGED)
        return digest.hexdigest()

    def flush(self) -> None:
        """Make durable what was written by now."""
        if self._dirty:
            os.fsync(self._stream.fileno())
            self._dirty = False

    def close(self) -> None:
        """Flush to the disk. Raises ArtifactError where a planned tensor was never written."""
        if self._pending:
            raise ArtifactError(f"{self._path.name}: {min(self._pending)!r} was never written", "convert again")
        self.flush()
        self._stream.close()

    def abort(self) -> None:
        self._stream.close()

    def _claim(self, name: str) -> TensorEntry:
        if name not in self._pending:
            raise ArtifactError(f"tensor {name!r} was not planned or came twice", "report this as a defect of quantkit")
        self._pending.remove(name)
        self._dirty = True
        return self._plan.entries[name]


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; OSError (no space left) passes through."""
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)
