"""The hidden folder in which an artifact is made, and the rename that makes it visible.

    .NAME.partial/artifact/        the artifact so far
    .NAME.partial/journal.jsonl    what of it is durable, and of what run
    .NAME.lock                     held by the process that writes

Nothing stands under NAME that is not complete. A run that ends early leaves the folder where its journal has a step for
another run to go on from, and removes it otherwise.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quantkit.artifact import disk_errors
from quantkit.errors import ArtifactError
from quantkit.files import sync_directory
from quantkit.journal import Journal, read_journal


@dataclass(frozen=True)
class Workspace:
    """Where the artifact `output` is made. The folders need not exist."""

    output: Path

    @property
    def root(self) -> Path:
        return self.output.parent / f".{self.output.name}.partial"

    @property
    def directory(self) -> Path:
        """The artifact so far."""
        return self.root / "artifact"

    @property
    def journal_path(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def lock_path(self) -> Path:
        return self.output.parent / f".{self.output.name}.lock"

    @property
    def used_bytes(self) -> int:
        """What the files of the artifact so far take on the disk: less than their sizes, where they have holes."""
        return sum(512 * path.stat().st_blocks for path in self.directory.rglob("*") if path.is_file())

    def unfinished(self) -> Journal | None:
        """The journal of a conversion that can be gone on with, or None."""
        journal = read_journal(self.journal_path) if self.directory.is_dir() else None
        return journal if journal is not None and journal.contents else None

    @property
    def progress(self) -> str | None:
        """What an unfinished conversion has done, in words, or None where there is none to go on with."""
        journal = self.unfinished()
        if journal is None:
            return None
        # Steps of another version may have other keys.
        named = [content.get("done") for content in journal.contents]
        tensors = sum(len(names) for names in named if isinstance(names, list))
        blocks = journal.contents[-1].get("blocks")
        return f"{f'{blocks} blocks and ' if blocks else ''}{tensors} tensors are done and kept in {self.root}"

    def discard(self) -> None:
        """Remove what was made."""
        # The journal first: what is left of a removal that is cut off must not look as if it could be gone on with.
        self.journal_path.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def writing(output: Path, *, resume: bool = False) -> Iterator[Workspace]:
    """A workspace to fill; its artifact is renamed to `output` at the end.

    resume: keep what an unfinished conversion has made. Raises ArtifactError: output exists or is being written, an
    unfinished conversion is there and `resume` is off, disk full, unwritable.
    """
    refuse_existing(output)
    work = Workspace(output)
    if work.root.is_symlink():
        raise ArtifactError(f"{work.root} is a link, where the artifact would be made", "remove it")
    with disk_errors(output, lambda: _how_to_go_on(work)):
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(work)
        try:
            refuse_unfinished(output, resume=resume)
            if work.unfinished() is None:
                work.discard()
                work.directory.mkdir(parents=True)
            sync_directory(work.root)
            sync_directory(output.parent)
            try:
                yield work
                _publish(work)
            except BaseException:
                if work.unfinished() is None:
                    work.discard()
                raise
        finally:
            work.lock_path.unlink(missing_ok=True)
            lock.close()


def _publish(work: Workspace) -> None:
    for path in [*work.directory.rglob("*"), work.directory]:
        if path.is_dir():
            sync_directory(path)
    refuse_existing(work.output)
    work.directory.rename(work.output)
    sync_directory(work.output.parent)
    work.discard()


def refuse_existing(output: Path) -> None:
    """Raises ArtifactError where `output` is there already: an artifact is never overwritten."""
    if output.exists() or output.is_symlink():
        raise ArtifactError(f"{output} exists", "choose another --output, or remove it")


def refuse_unfinished(output: Path, *, resume: bool) -> None:
    """Raises ArtifactError where a conversion to `output` was begun that `resume` could save from being lost."""
    work = Workspace(output)
    if not resume and work.unfinished() is not None:
        raise ArtifactError(
            f"an unfinished conversion to {output} is kept in {work.root}",
            "pass --resume to go on with it, or remove that folder to start again",
        )


def refuse_busy(output: Path) -> None:
    """Raises ArtifactError where another process is writing `output` at this moment."""
    try:
        with Workspace(output).lock_path.open("rb") as stream:
            # Shared: two that ask at once do not take each other for a writer.
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(output) from None
    except OSError:  # no lock, or none that we may look at: the writer itself will see
        return


def _how_to_go_on(work: Workspace) -> str:
    if work.unfinished() is None:
        return "free space, check permissions, or choose another --output"
    return "free space or check permissions, and run the same command with --resume to go on"


def _lock(work: Workspace) -> IO[bytes]:
    stream = work.lock_path.open("wb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file between our open and our lock: then the lock guards nothing.
        if os.fstat(stream.fileno()).st_ino != work.lock_path.stat().st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        stream.close()
        raise _busy(work.output) from None
    return stream


def _busy(output: Path) -> ArtifactError:
    return ArtifactError(f"another process is writing {output}", "wait for it, or choose another --output")
