"""Writing files so that they survive a crash: every file and folder is flushed to the disk before it counts."""

import os
import shutil
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and flush it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file under a sibling name and rename it: readers see the old bytes or the new ones, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write_file(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file byte for byte and flush it to the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with target.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_directory(directory: Path) -> None:
    """Flush a folder's entries (names made, renamed, removed) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
