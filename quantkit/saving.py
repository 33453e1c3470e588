"""Saving a conversion step by step, and what of the saved steps another run may use."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantkit.artifact import WeightsWriter, tensor_sha256
from quantkit.journal import JournalWriter, Mark, Step
from quantkit.tensorfile import FileLayout

# Work is saved when it took so many times as long as saving did the last time.
_WORTH = 20


class Saver:
    """Makes steps durable: first the tensors, then the line of the journal that speaks of them.

    identify: the run as plain values, or None while it is not known (the source is still being hashed). mark: where
    a journal that is gone on with ends; without one it is made with the first step.
    """

    def __init__(
        self,
        path: Path,
        writer: WeightsWriter,
        identify: Callable[[], dict[str, Any] | None],
        mark: Mark | None = None,
    ) -> None:
        self._path, self._writer, self._identify = path, writer, identify
        self._journal = None if mark is None else JournalWriter.after(path, mark)
        self._cost = 0.0
        self._ended = time.monotonic()

    @property
    def worth_it(self) -> bool:
        """Whether saving now would cost little beside the work since the last time."""
        return time.monotonic() - self._ended >= _WORTH * self._cost

    def ready(self) -> bool:
        """Whether anything can be saved yet."""
        if self._journal is None and (run := self._identify()) is not None:
            self._journal = JournalWriter.create(self._path, run)
        return self._journal is not None

    def save(self, step: Step) -> None:
        """Make a step durable; only where `ready` has said yes."""
        assert self._journal is not None
        started = time.monotonic()
        self._writer.flush()
        self._journal.append(step)
        self._ended = time.monotonic()
        self._cost = self._ended - started

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()


def intact_steps(steps: list[Step], layouts: dict[str, FileLayout]) -> list[Step]:
    """Steps up to the first whose tensors do not all stand in the files as they were written."""
    entries = {name: entry for plan in layouts.values() for name, entry in plan.entries.items()}
    for number, step in enumerate(steps):
        found = all(name in entries and tensor_sha256(entries[name]) == known for name, known in step.tensors.items())
        if not found:
            return steps[:number]
    return steps


def remove_others(directory: Path, layouts: dict[str, FileLayout]) -> None:
    """Remove what an unfinished conversion has put beside its weight files: it is written again at the end."""
    for path in sorted(directory.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif path.parent != directory or path.name not in layouts:
            path.unlink()
