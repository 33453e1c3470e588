"""Crashes of a conversion at every point where it flushes something to the disk.

A conversion runs once, and at each flush the folder that it works in is copied twice: as a killed process leaves it
(the system still has what was written), and as a power cut may leave it (everything that was not flushed is gone).
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Disk:
    """Copies of `folder` after a crash, in `copies`: `killed-N` and `unplugged-N` of the Nth flush."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies = folder, copies
        self.flushes = 0
        # What a power cut leaves: bytes by file, and the names that stand in each folder.
        self._bytes: dict[Path, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}

    def before_flush(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not path.is_relative_to(self.folder):
            return
        shutil.copytree(self.folder, self.copies / f"killed-{self.flushes}")
        self._restore(self.folder, self.copies / f"unplugged-{self.flushes}")
        self.flushes += 1
        if path.is_dir():
            self._names[path] = {child.name: child.stat().st_ino for child in path.iterdir()}
        else:
            self._bytes[path] = path.read_bytes()

    def _restore(self, folder: Path, target: Path) -> None:
        """What of a folder is durable. A name counts only while it means the file that it meant when it was flushed."""
        target.mkdir(parents=True)
        for name, number in self._names.get(folder, {}).items():
            path = folder / name
            if not path.exists() or path.stat().st_ino != number:
                continue
            if path.is_dir():
                self._restore(path, target / name)
            else:
                (target / name).write_bytes(self._bytes.get(path, b""))


@contextmanager
def watched(folder: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk whose copies are made while the block runs."""
    disk, real = Disk(folder, copies), os.fsync

    def fsync(descriptor: int) -> None:
        disk.before_flush(descriptor)
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield disk
