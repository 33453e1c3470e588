"""Writing files so that they survive a crash: every file and folder is flushed to the disk before it counts."""

import os
import shutil
from collections.abc import Mapping
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
    replace_files({path: data})


def replace_files(files: Mapping[Path, bytes]) -> None:
    """Replace several files, in order. All are on the disk before the first takes its name, so that where there is no
    room for one none is replaced; and each has its name on the disk before the next.
    """
    partials = {path.with_name(f".{path.name}.{os.getpid()}.partial"): path for path in files}
    try:
        for partial, path in partials.items():
            write_file(partial, files[path])
        for partial, path in partials.items():
            partial.replace(path)
            sync_directory(path.parent)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


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
