"""The header of a GGUF file, walked before any library reads it: every declared length against the bytes there are.

    | magic, version | counts | keys and values | tensor names, shapes, types, offsets | padding | tensor bytes |

Libraries loop over declared lengths; a file of a hundred bytes may declare 2**60 entries.
"""

import math
import os
import struct
from pathlib import Path
from typing import IO, Any

import gguf

from quantkit.errors import CheckpointError
from quantkit.limits import refuse_absurd_counts

_ARRAY, _STRING = int(gguf.GGUFValueType.ARRAY), int(gguf.GGUFValueType.STRING)
# struct codes of the scalar types, by their number in the file.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LARGEST_STRING = 1 << 24
# Vocabularies and merges: a million entries each would be a large model's.
_MOST_ENTRIES = 1 << 22
_MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 4
_DAMAGED = "download or copy the file again, or give the original safetensors checkpoint"


def check_gguf(path: Path) -> tuple[int, int]:
    """Number of tensors of a GGUF file, and of values in them.

    Raises CheckpointError: no GGUF file of version 2 or 3, cut off, or lengths and ranges that do not fit in it.
    """
    try:
        with path.open("rb") as stream:
            return _Header(path, stream).check()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check that the file is there") from None


class _Header:
    """A cursor on the file that never goes past its end."""

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._size = os.fstat(stream.fileno()).st_size
        self._entries = 0

    def check(self) -> tuple[int, int]:
        magic, version, tensors, pairs = self._unpack("IIQQ")
        if magic != gguf.constants.GGUF_MAGIC or version not in {2, 3}:
            raise self._damaged("it is no little-endian GGUF file of version 2 or 3")
        if tensors > _MOST_TENSORS or pairs > _MOST_ENTRIES:
            raise self._damaged(f"it declares {tensors} tensors and {pairs} keys")
        values = dict(self._pair() for _ in range(pairs))
        refuse_absurd_counts({key.rpartition(".")[2]: value for key, value in values.items()}, self._path)
        infos = [self._tensor() for _ in range(tensors)]
        alignment = values.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._damaged(f"its alignment is {alignment}")
        start = -(-self._stream.tell() // alignment) * alignment
        if any(start + offset + size > self._size for offset, size, _ in infos):
            raise self._damaged("a tensor ends behind the end of the file (truncated)")
        # Ranges that overlap would let a small file decode into any amount of memory.
        if sum(size for _, size, _ in infos) > max(self._size - start, 0):
            raise self._damaged("its tensors overlap")
        return len(infos), sum(numel for *_, numel in infos)

    def _pair(self) -> tuple[str, Any]:
        """A key, and its value where that is a single number; strings and arrays are stepped over."""
        key = self._string().decode(errors="replace")
        (kind,) = self._unpack("I")
        if kind in _SCALARS:
            return key, self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            self._array(key)
        else:
            raise self._damaged(f"the value of {key!r} has the unknown type {kind}")
        return key, None

    def _array(self, key: str) -> None:
        kind, length = self._unpack("IQ")
        self._entries += length
        if self._entries > _MOST_ENTRIES:
            raise self._damaged(f"{key!r} declares {length} entries")
        if kind in _SCALARS:
            self._skip(length * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(length):
                self._string()
        else:
            raise self._damaged(f"{key!r} is an array of the type {kind}")

    def _tensor(self) -> tuple[int, int, int]:
        """Offset, bytes and number of values of a tensor."""
        name = self._string().decode(errors="replace")
        (dimensions,) = self._unpack("I")
        if dimensions > _MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = self._unpack(f"{dimensions}Q")
        kind, offset = self._unpack("IQ")
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise self._damaged(f"tensor {name!r} has the unknown type {kind}") from None
        numel = math.prod(shape)
        return offset, -(-numel // block) * size, numel

    def _string(self) -> bytes:
        (length,) = self._unpack("Q")
        if length > _LARGEST_STRING:
            raise self._damaged(f"a text of {length} bytes is declared")
        return self._take(length)

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{codes}", self._take(struct.calcsize(f"<{codes}")))

    def _take(self, length: int) -> bytes:
        data = self._stream.read(length)
        if len(data) != length:
            raise self._damaged("its header is cut off")
        return data

    def _skip(self, length: int) -> None:
        if self._stream.tell() + length > self._size:
            raise self._damaged("its header is cut off")
        self._stream.seek(length, os.SEEK_CUR)

    def _damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is not a GGUF file that can be read: {problem}", _DAMAGED)
