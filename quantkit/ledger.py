"""The ledger: which artifact is released on which channel, one line a release, each line bound to the one before it.

    ledger.jsonl     one entry a line, canonical JSON; an entry holds the hash of the line before it and its own
    ledger.head      how many entries there are and the hash of the last: what a cut tail does not fit
    records/HASH.json   the manifest, report and policy of each release, under the SHA-256 of their bytes

An edited, dropped, repeated or reordered line breaks the chain; a cut tail does not fit the head. Who can write all of
it can write another ledger: that shows only against a head which was kept elsewhere (`check_ledger`, head).
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.canonical import canonical_json, sha256_json
from quantkit.chain import Findings, check_files, is_new, read_bytes
from quantkit.entries import (
    HEAD_FILE,
    LEDGER_FILE,
    LEDGER_VERSION,
    NOTHING_BEFORE,
    RECORDS,
    Action,
    Entry,
    Held,
    Release,
    Stamp,
    held_after,
)
from quantkit.errors import LedgerError
from quantkit.files import replace_file, replace_files

LOCK_FILE = ".ledger.lock"

_RESTORE = "restore the ledger's folder from a copy that quantkit ledger verify accepts"


@dataclass(frozen=True)
class Ledger:
    """A ledger as it was read: the directory, and its entries in order."""

    directory: Path
    entries: list[Entry]

    def held(self, channel: str) -> list[Held]:
        """What a rollback could go back to: the channel's releases, oldest first; the last is the one it holds.

        A promotion adds one, a rollback takes the last away. To promote what is there already replaces it, so that a
        rollback never goes to the same bytes.
        """
        found: list[Held] = []
        for entry in self.entries:
            if entry.channel == channel:
                found = held_after(found, entry)
        return found

    @property
    def channels(self) -> list[str]:
        return sorted({entry.channel for entry in self.entries})

    def place(self, release: Release) -> Path:
        """Where an artifact lies."""
        return Path(os.path.normpath(self.directory.resolve() / release.artifact))

    def append(
        self, action: Action, channel: str, release: Release, stamp: Stamp, records: dict[str, bytes]
    ) -> "Ledger":
        """The ledger with one more entry, on the disk. records: bytes by their hash. Call it inside `locked`.

        Raises LedgerError where it cannot be written, which says that the ledger is as it was: it is, unless the disk
        failed after the new file had taken its name.
        """
        held = self.held(channel)
        values: dict[str, Any] = {
            "schema_version": LEDGER_VERSION,
            "sequence": len(self.entries) + 1,
            "action": action,
            "channel": channel,
            "release": release.model_dump(mode="json"),
            "stamp": stamp.model_dump(mode="json"),
            "previous_identity": held[-1].release.identity if held else None,
            "restores": held[-2].sequence if action == "rollback" else None,
            "previous_sha256": self.entries[-1].sha256 if self.entries else NOTHING_BEFORE,
        }
        entry = Entry(**values | {"release": release, "stamp": stamp, "sha256": sha256_json(values)})
        lines = b"".join(known.line for known in [*self.entries, entry])
        head = canonical_json({"entries": entry.sequence, "sha256": entry.sha256})
        with _write_errors(self.directory, lines):
            for name, data in records.items():
                replace_file(self.directory / RECORDS / f"{name}.json", data)
            replace_files({self.directory / LEDGER_FILE: lines, self.directory / HEAD_FILE: head})
        return Ledger(self.directory, [*self.entries, entry])


def read_ledger(directory: Path) -> Ledger:
    """The ledger in a directory; one without entries where there is none.

    Raises LedgerError with the first problem, and how many there are, where it is damaged.
    """
    with _lock(directory, fcntl.LOCK_SH):
        return _read(directory)


def check_ledger(directory: Path, head: str | None = None) -> Findings:
    """Every line, the head and every record of a ledger against each other.

    head: the hash of an entry that is known from elsewhere, as a promotion printed it: the ledger has to hold it, and
    with it everything up to it. Raises LedgerError where there is no ledger.
    """
    if is_new(directory):
        raise LedgerError(f"{directory} holds no {LEDGER_FILE}", "name the ledger's folder with --ledger")
    with _lock(directory, fcntl.LOCK_SH):
        findings = check_files(directory)
    if head is not None and head not in {entry.sha256 for entry in findings.entries}:
        findings.problems.append(f"no entry has the hash {head}: it was removed, or the ledger was replaced")
    return findings


@contextmanager
def locked(directory: Path, *, wait: float = 60) -> Iterator[Ledger]:
    """The ledger, as nobody else changes it meanwhile. Makes the directory.

    Raises LedgerError: damaged, unwritable, or held by another process for more than `wait` seconds.
    """
    with _write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not (directory / LOCK_FILE).exists():
            (directory / LOCK_FILE).touch()
    with _lock(directory, fcntl.LOCK_EX, wait):
        for leftover in [*directory.glob(".ledger.*.partial"), *directory.glob(f"{RECORDS}/.*.partial")]:
            leftover.unlink(missing_ok=True)  # of a writer that was killed; nobody else writes now
        yield _read(directory)


def _read(directory: Path) -> Ledger:
    findings = check_files(directory)
    if findings.problems:
        more = len(findings.problems) - 1
        others = f", and {more} more" if more else ""
        raise LedgerError(f"{directory}: {findings.problems[0]}{others}", _RESTORE)
    return Ledger(directory, findings.entries)


@contextmanager
def _lock(directory: Path, kind: int, wait: float = 60) -> Iterator[None]:
    """Hold the ledger's lock. Readers of a copy without lock file, or without the right to open it, need none."""
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDONLY)
    except OSError:
        if kind == fcntl.LOCK_EX:
            raise LedgerError(f"{directory / LOCK_FILE} cannot be opened", "check the folder's permissions") from None
        yield
        return
    try:
        _acquire(lambda: fcntl.flock(descriptor, kind | fcntl.LOCK_NB), wait, directory)
        yield
    finally:
        os.close(descriptor)  # which also releases it


def _acquire(attempt: Callable[[], None], wait: float, directory: Path) -> None:
    last = time.monotonic() + wait
    while True:
        try:
            return attempt()
        except BlockingIOError:
            if time.monotonic() > last:
                raise LedgerError(
                    f"another process has held the ledger in {directory} for {wait:g} s", "wait for it, or end it"
                ) from None
            time.sleep(0.01)
        except OSError as error:
            raise LedgerError(
                f"{directory} cannot be locked ({error.strerror})", "keep the ledger on a disk that supports flock"
            ) from None


@contextmanager
def _write_errors(directory: Path, lines: bytes | None = None) -> Iterator[None]:
    """Turn the system's write errors into a line that says what stands. lines: the new bytes of the ledger."""
    try:
        yield
    except OSError as error:
        written = lines is not None and read_bytes(directory / LEDGER_FILE, []) == lines
        problem = f"the ledger in {directory} cannot be written ({error.strerror or error})"
        if written:
            action = "look at it with quantkit ledger, and repair the disk"
            raise LedgerError(f"{problem}, but the new entry stands in it", action) from None
        action = "free space or check permissions, and run the same command again"
        raise LedgerError(f"{problem} and is as it was", action) from None
