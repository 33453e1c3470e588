"""The check of a ledger's files against each other: every line, the head and every record."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

from quantkit.canonical import canonical_json, sha256_bytes
from quantkit.entries import HEAD_FILE, LEDGER_FILE, NOTHING_BEFORE, RECORDS, Entry, Head, Held, held_after
from quantkit.errors import LedgerError, QuantkitError, one_line
from quantkit.schema import validate


@dataclass(frozen=True)
class Findings:
    """What `check_files` found. notes: what is no damage and still worth knowing."""

    entries: list[Entry]
    problems: list[str]
    notes: list[str] = field(default_factory=list)


def check_files(directory: Path) -> Findings:
    """Every problem of the ledger in a directory; none where there is none. The caller holds its lock."""
    found = Findings([], [])
    if is_new(directory):
        return found
    data = read_bytes(directory / LEDGER_FILE, found.problems)
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
            held[entry.channel] = held_after(held.get(entry.channel, []), entry)
        before = None if entry is None else entry.sha256
    _check_head(directory, len(lines), found)
    _check_records(directory, found)
    return found


def is_new(directory: Path) -> bool:
    """Whether there is no ledger in a directory. Raises LedgerError where it is none."""
    if directory.exists() and not directory.is_dir():
        raise LedgerError(f"{directory} is not a directory", "name the ledger's folder with --ledger")
    return not any((directory / name).exists() for name in (LEDGER_FILE, HEAD_FILE))


def read_bytes(path: Path, problems: list[str]) -> bytes:
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


def _check_head(directory: Path, count: int, found: Findings) -> None:
    data = read_bytes(directory / HEAD_FILE, found.problems)
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
        data = read_bytes(directory / RECORDS / f"{name}.json", found.problems)
        if data and sha256_bytes(data) != name:
            found.problems.append(f"{RECORDS}/{name}.json was changed")
    kept = {path.stem for path in (directory / RECORDS).glob("*.json")}
    if kept - named:
        found.notes.append(
            f"{RECORDS} holds {len(kept - named)} that no entry names: of a stopped release, or of a removed line"
        )
