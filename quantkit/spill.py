"""Large tables that live in an unnamed file instead of memory: the system keeps of it what it has room for."""

import math
import mmap
import os
import tempfile
from pathlib import Path

import torch

# Smaller tables stay in memory: 1 GiB is 128 samples of 512 tokens at width 4096.
_LARGEST_IN_MEMORY = 1 << 30


def float_table(shape: tuple[int, ...], directory: Path | None) -> torch.Tensor:
    """A float32 tensor of `shape`, uninitialised; a large one is mapped from a file in `directory`, if there is one.

    The file has no name and goes when the tensor goes, however the process ends. Its space is reserved at once: raises
    OSError where the disk cannot hold it.
    """
    size = 4 * math.prod(shape)
    if directory is None or size <= _LARGEST_IN_MEMORY:
        return torch.empty(shape)
    with tempfile.TemporaryFile(dir=directory) as file:
        if hasattr(os, "posix_fallocate"):
            # A hole in the file would be a bus error on a full disk, on the first write to it.
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.float32).reshape(shape)
