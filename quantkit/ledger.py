"""The ledger: which artifact is released on which channel, one line a release, each line bound to the one before it.

    ledger.jsonl     one entry a line, canonical JSON; an entry holds the hash of the line before it and its own
    ledger.head      how many entries there are and the hash of the last: what a cut tail does not fit
    records/HASH.json   the manifest, report and policy of each release, under the SHA-256 of their bytes

An edited, dropped, repeated or reordered line breaks the chain; a cut tail does not fit the head. Who can write all of
it can write another ledger: that shows only against a head which was kept elsewhere (`check_ledger`, head).
"""

import fcntl
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from quantkit.canonical import canonical_json, sha256_bytes, sha256_json
from quantkit.errors import LedgerError, QuantkitError, one_line
from quantkit.files import replace_file, replace_files
from quantkit.schema import Strict, validate

DEFAULT_LEDGER = Path("manifests")
LEDGER_FILE = "ledger.jsonl"
HEAD_FILE = "ledger.head"
RECORDS = "records"
LOCK_FILE = ".ledger.lock"
LEDGER_VERSION: Literal[1] = 1
# What the first entry holds in the place of the line before it.
NOTHING_BEFORE = "0" * 64
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_CHANNEL = "[a-z0-9][a-z0-9._-]{0,63}"
Channel = Annotated[str, Field(pattern=f"^{_CHANNEL}$")]
Action = Literal["promote", "rollback"]

_RESTORE = "restore the ledger's folder from a copy that quantkit ledger verify accepts"


class Stamp(Strict):
    """Who releases, and when (UTC, as 2026-01-31T09:00:00Z). Given by the caller: nothing here asks a clock."""

    by: Annotated[str, Field(min_length=1, max_length=200)]
    at: str

    @field_validator("by")
    @classmethod
    def _is_one_line(cls, value: str) -> str:
        if not value.isprintable() or value != value.strip():
            raise ValueError("not one line of readable text")
        return value

    @field_validator("at")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        with suppress(ValueError):
            if datetime.strptime(value, TIME_FORMAT).strftime(TIME_FORMAT) == value:
                return value
        raise ValueError(f"{value!r} is not a time like 2026-01-31T09:00:00Z")


class Release(Strict):
    """What an entry says of an artifact: its identity and place, and the evidence on which it was released.

    artifact: its directory, relative to the ledger's where it lies beside or under it, else absolute.
    """

    identity: Digest
    artifact: Annotated[str, Field(min_length=1)]
    report_sha256: Digest
    policy: str
    policy_sha256: Digest
    verdict: Literal["pass"]

    @property
    def records(self) -> tuple[str, str, str]:
        """The hashes under which its manifest, report and policy are kept."""
        return self.identity, self.report_sha256, self.policy_sha256


class Entry(Strict):
    """One line. previous_identity: what the channel held before; restores: the entry that a rollback goes back to.

    previous_sha256: `sha256` of the entry before; sha256: of the canonical JSON of everything else in this one.
    """

    schema_version: Literal[1]
    sequence: Annotated[int, Field(ge=1)]
    action: Action
    channel: Channel
    release: Release
    stamp: Stamp
    previous_identity: Digest | None
    restores: int | None
    previous_sha256: Digest
    sha256: Digest

    @property
    def line(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def seal(self) -> str:
        """What `sha256` has to be."""
        return sha256_json(self.model_dump(mode="json", exclude={"sha256"}))


class Head(Strict):
    """How many entries a ledger has, and the hash of the last."""

    entries: Annotated[int, Field(ge=1)]
    sha256: Digest


@dataclass(frozen=True)
class Held:
    """A release that a channel holds, or could go back to. sequence: of its promotion; stamp: of what put it there."""

    sequence: int
    release: Release
    stamp: Stamp


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
                found = _held_after(found, entry)
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


@dataclass(frozen=True)
class Findings:
    """What `check_ledger` found. notes: what is no damage and still worth knowing."""

    entries: list[Entry]
    problems: list[str]
    notes: list[str] = field(default_factory=list)


def refuse_channel(name: str) -> None:
    """Raises LedgerError where a channel cannot have this name."""
    if not re.fullmatch(_CHANNEL, name):
        raise LedgerError(
            f"{name!r} cannot name a channel", "use lower-case letters, digits, '.', '_' and '-', as in production"
        )


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
    if _is_new(directory):
        raise LedgerError(f"{directory} holds no {LEDGER_FILE}", "name the ledger's folder with --ledger")
    with _lock(directory, fcntl.LOCK_SH):
        findings = _check(directory)
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
        (directory / LOCK_FILE).touch()
    with _lock(directory, fcntl.LOCK_EX, wait):
        for leftover in [*directory.glob(".ledger.*.partial"), *directory.glob(f"{RECORDS}/.*.partial")]:
            leftover.unlink(missing_ok=True)  # of a writer that was killed; nobody else writes now
        yield _read(directory)


def _read(directory: Path) -> Ledger:
    findings = _check(directory)
    if findings.problems:
        more = len(findings.problems) - 1
        others = f", and {more} more" if more else ""
        raise LedgerError(f"{directory}: {findings.problems[0]}{others}", _RESTORE)
    return Ledger(directory, findings.entries)


def _check(directory: Path) -> Findings:
    found = Findings([], [])
    if _is_new(directory):
        return found
    data = _bytes(directory / LEDGER_FILE, found.problems)
    lines = list(io.BytesIO(data))
    before: str | None = NOTHING_BEFORE
    held: dict[str, list[Held]] = {}
    for number, line in enumerate(lines, 1):
        place = f"{LEDGER_FILE} line {number}"
        entry = _entry(line, place, found.problems)
        if entry is not None:
            found.problems.extend(_broken_links(entry, number, before, place))
            if not found.problems:  # what a channel held is only known where every line is
                found.problems.extend(_broken_history(entry, held.get(entry.channel, []), place))
            found.entries.append(entry)
            held[entry.channel] = _held_after(held.get(entry.channel, []), entry)
        before = None if entry is None else entry.sha256
    _check_head(directory, len(lines), found)
    _check_records(directory, found)
    return found


def _is_new(directory: Path) -> bool:
    return not any((directory / name).exists() for name in (LEDGER_FILE, HEAD_FILE))


def _bytes(path: Path, problems: list[str]) -> bytes:
    """The bytes of a file; where it has none that is a problem."""
    name = path.name if path.parent.name != RECORDS else f"{RECORDS}/{path.name}"
    try:
        data = path.read_bytes()
    except OSError as error:
        problems.append(f"{name} cannot be read ({error.strerror})")
        return b""
    if not data:
        problems.append(f"{name} is empty")
    return data


def _entry(line: bytes, place: str, problems: list[str]) -> Entry | None:
    if not line.endswith(b"\n"):
        problems.append(f"{place} is cut off: what wrote it did not finish, and it released nothing")
        return None
    try:
        entry = validate(Entry, json.loads(line), place, LedgerError)
    except QuantkitError as error:
        problems.append(error.problem)
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"{place} is not JSON ({one_line(error)})")
        return None
    if entry.line != line or entry.seal != entry.sha256:
        problems.append(f"{place} was changed after it was written")
    return entry


def _broken_links(entry: Entry, number: int, before: str | None, place: str) -> list[str]:
    """What does not fit between an entry and the line before it. before: that line's hash, None where unreadable."""
    problems = []
    if entry.sequence != number:
        problems.append(f"{place} is entry {entry.sequence}: lines were dropped, repeated or reordered")
    if before is not None and entry.previous_sha256 != before:
        problems.append(f"{place} does not continue the line before it")
    return problems


def _broken_history(entry: Entry, held: list[Held], place: str) -> list[str]:
    """What does not fit between an entry and what its channel held before it."""
    problems = []
    if entry.previous_identity != (held[-1].release.identity if held else None):
        problems.append(f"{place} names another release before it than the channel held")
    target = held[-2] if entry.action == "rollback" and len(held) > 1 else None
    same = target is not None and target.sequence == entry.restores and target.release.records == entry.release.records
    if (entry.action == "rollback" and not same) or (entry.action == "promote" and entry.restores is not None):
        problems.append(f"{place} restores entry {entry.restores}, which is not the one before")
    return problems


def _held_after(held: list[Held], entry: Entry) -> list[Held]:
    """What a channel holds after one more entry of its own."""
    if entry.action == "rollback":
        kept = [release for release in held if release.sequence < (entry.restores or 0)]
        return [*kept, Held(entry.restores or 0, entry.release, entry.stamp)]
    if held and held[-1].release.identity == entry.release.identity:
        held = held[:-1]
    return [*held, Held(entry.sequence, entry.release, entry.stamp)]


def _check_head(directory: Path, count: int, found: Findings) -> None:
    data = _bytes(directory / HEAD_FILE, found.problems)
    if not data:
        return
    try:
        head = validate(Head, json.loads(data), HEAD_FILE, LedgerError)
    except (QuantkitError, ValueError, RecursionError):
        found.problems.append(f"{HEAD_FILE} is not readable")
        return
    hashes = {entry.sequence: entry.sha256 for entry in found.entries}
    if data != canonical_json(head.model_dump()):
        found.problems.append(f"{HEAD_FILE} was changed after it was written")
    elif hashes.get(head.entries) != head.sha256 or count - head.entries not in {0, 1}:
        found.problems.append(
            f"{HEAD_FILE} names {head.entries} entries, the last {head.sha256[:12]}, and {LEDGER_FILE} has {count}: "
            "lines were removed or replaced"
        )
    elif count > head.entries:
        found.notes.append(f"{HEAD_FILE} is one entry behind: its writer was stopped; the next release puts it right")


def _check_records(directory: Path, found: Findings) -> None:
    named = {name for entry in found.entries for name in entry.release.records}
    for name in sorted(named):
        data = _bytes(directory / RECORDS / f"{name}.json", found.problems)
        if data and sha256_bytes(data) != name:
            found.problems.append(f"{RECORDS}/{name}.json was changed")
    kept = {path.stem for path in (directory / RECORDS).glob("*.json")}
    if kept - named:
        found.notes.append(
            f"{RECORDS} holds {len(kept - named)} that no entry names: of a stopped release, or of a removed line"
        )


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


@contextmanager
def _write_errors(directory: Path, lines: bytes | None = None) -> Iterator[None]:
    """Turn the system's write errors into a line that says what stands. lines: the new bytes of the ledger."""
    try:
        yield
    except OSError as error:
        written = lines is not None and _bytes(directory / LEDGER_FILE, []) == lines
        problem = f"the ledger in {directory} cannot be written ({error.strerror or error})"
        if written:
            action = "look at it with quantkit ledger, and repair the disk"
            raise LedgerError(f"{problem}, but the new entry stands in it", action) from None
        action = "free space or check permissions, and run the same command again"
        raise LedgerError(f"{problem} and is as it was", action) from None
