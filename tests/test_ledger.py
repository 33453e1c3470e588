"""The ledger: a chain that shows every change, an append that is whole or not at all, and writers that wait."""

import fcntl
import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.canonical import canonical_json, sha256_bytes, sha256_json
from quantkit.entries import Entry, Release, Stamp, refuse_channel
from quantkit.errors import LedgerError, SchemaError
from quantkit.ledger import Ledger, check_ledger, locked, read_ledger
from quantkit.schema import validate

STAMP = Stamp(by="ana", at="2026-01-31T09:00:00Z")
A, B, C = ("manifest a", "manifest b", "manifest c")
_FORK = multiprocessing.get_context("fork")


def records(manifest: str) -> dict[str, bytes]:
    """Stand-ins for the manifest, report and policy of a release: to the ledger they are bytes."""
    values = (manifest, f"report of {manifest}", "policy")
    return {sha256_bytes(value.encode()): value.encode() for value in values}


def release(manifest: str, place: str = "../artifact") -> Release:
    identity, report, policy = records(manifest)
    return Release(
        identity=identity, artifact=place, report_sha256=report, policy="release", policy_sha256=policy, verdict="pass"
    )


def promote(directory: Path, manifest: str, channel: str = "production", stamp: Stamp = STAMP) -> Entry:
    with locked(directory) as ledger:
        return ledger.append("promote", channel, release(manifest), stamp, records(manifest)).entries[-1]


def roll_back(directory: Path, channel: str = "production") -> Entry:
    with locked(directory) as ledger:
        return ledger.append("rollback", channel, ledger.held(channel)[-2].release, STAMP, {}).entries[-1]


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """Five entries: a, then b on two channels, back to a on one of them, then c there."""
    directory = tmp_path / "manifests"
    promote(directory, A)
    promote(directory, B, "canary")
    promote(directory, B)
    roll_back(directory)
    promote(directory, C)
    return directory


def lines(directory: Path) -> list[bytes]:
    return (directory / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def write_lines(directory: Path, content: list[bytes]) -> None:
    (directory / "ledger.jsonl").write_bytes(b"".join(content))


def identities(ledger: Ledger, channel: str = "production") -> list[str]:
    names = {next(iter(records(name))): name for name in (A, B, C)}
    return [names[held.release.identity] for held in ledger.held(channel)]


# What an entry says


def test_an_entry_is_one_canonical_line_that_holds_who_when_what_and_on_which_evidence(ledger: Path) -> None:
    first, _, third, back, last = read_ledger(ledger).entries
    identity, report, policy = records(A)
    assert json.loads(lines(ledger)[0]) == {
        "schema_version": 1, "sequence": 1, "action": "promote", "channel": "production",
        "release": {
            "identity": identity, "artifact": "../artifact", "report_sha256": report, "policy": "release",
            "policy_sha256": policy, "verdict": "pass",
        },
        "stamp": {"by": "ana", "at": "2026-01-31T09:00:00Z"}, "previous_identity": None, "restores": None,
        "previous_sha256": "0" * 64, "sha256": first.sha256,
    }  # fmt: skip
    values = json.loads(lines(ledger)[0])
    del values["sha256"]
    assert first.sha256 == sha256_json(values)
    assert (third.previous_identity, back.previous_identity) == (first.release.identity, third.release.identity)
    assert (back.action, back.restores, back.release) == ("rollback", 1, first.release)
    assert last.previous_sha256 == back.sha256


def test_the_same_arguments_give_the_same_bytes(ledger: Path, tmp_path: Path) -> None:
    promote(tmp_path / "again", A)
    assert lines(tmp_path / "again") == lines(ledger)[:1]


def test_the_records_of_every_release_lie_under_their_hashes(ledger: Path) -> None:
    kept = {path.name: path.read_bytes() for path in (ledger / "records").iterdir()}
    assert kept == {f"{name}.json": data for manifest in (A, B, C) for name, data in records(manifest).items()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"by": ""}, "by"),
        ({"by": "a\nb"}, "not one line"),
        ({"by": " ana"}, "not one line"),
        ({"by": "x" * 201}, "by"),
        ({"at": "2026-01-31"}, "is not a time like"),
        ({"at": "2026-02-30T09:00:00Z"}, "is not a time like"),
        ({"at": "2026-1-31T09:00:00Z"}, "is not a time like"),
        ({"at": "2026-01-31T09:00:00+01:00"}, "is not a time like"),
    ],
)
def test_a_stamp_that_says_nothing_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        validate(Stamp, {"by": "ana", "at": "2026-01-31T09:00:00Z"} | changes, "stamp")


@pytest.mark.parametrize("name", ["", "Production", "a b", "../x", ".hidden", "a" * 65, "a\n", "中"])
def test_a_name_that_no_channel_can_have_is_refused(name: str) -> None:
    with pytest.raises(LedgerError, match="cannot name a channel"):
        refuse_channel(name)
    refuse_channel("canary-2.eu_west")


# What a channel holds


def test_a_channel_holds_its_last_release_and_a_rollback_goes_to_the_one_before(tmp_path: Path) -> None:
    for manifest, expected in ((A, [A]), (B, [A, B]), (C, [A, B, C])):
        promote(tmp_path, manifest)
        assert identities(read_ledger(tmp_path)) == expected
    roll_back(tmp_path)
    assert identities(read_ledger(tmp_path)) == [A, B]
    roll_back(tmp_path)
    assert identities(read_ledger(tmp_path)) == [A]
    promote(tmp_path, C)
    assert identities(read_ledger(tmp_path)) == [A, C]


def test_channels_do_not_see_each_other(ledger: Path) -> None:
    found = read_ledger(ledger)
    assert found.channels == ["canary", "production"]
    assert identities(found) == [A, C]
    assert identities(found, "canary") == [B]
    assert identities(found, "unknown") == []


def test_promoting_what_is_there_already_adds_an_entry_and_no_way_back_to_itself(tmp_path: Path) -> None:
    for manifest in (A, B, B):
        promote(tmp_path, manifest)
    found = read_ledger(tmp_path)
    assert len(found.entries) == 3
    assert identities(found) == [A, B]
    assert [held.sequence for held in found.held("production")] == [1, 3]


def test_a_place_is_relative_to_the_ledger_and_moves_with_it(ledger: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    moved = ledger.rename(tmp_path / "new" / "manifests")
    assert read_ledger(moved).place(release(A)) == tmp_path / "new" / "artifact"
    assert read_ledger(moved).place(release(A, "/srv/artifact")) == Path("/srv/artifact")


def test_a_ledger_that_is_not_there_has_no_entries_and_cannot_be_checked(tmp_path: Path) -> None:
    assert read_ledger(tmp_path / "nothing").entries == []
    with pytest.raises(LedgerError, match=r"nothing holds no ledger\.jsonl; name the ledger's folder"):
        check_ledger(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# What shows


def test_an_untouched_ledger_has_no_problems(ledger: Path) -> None:
    found = check_ledger(ledger)
    assert (found.problems, found.notes, len(found.entries)) == ([], [], 5)


def test_every_changed_byte_of_every_file_is_found_and_its_file_named(ledger: Path) -> None:
    files = [path for path in sorted(ledger.rglob("*")) if path.is_file() and path.name != ".ledger.lock"]
    assert len(files) == 9
    for path in files:
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 100)):
            changed = bytearray(original)
            changed[position] ^= 1
            path.write_bytes(changed)
            problems = check_ledger(ledger).problems
            assert any(path.name.partition(".json")[0] in problem for problem in problems), (path, position)
        path.write_bytes(original)
    assert check_ledger(ledger).problems == []


@pytest.mark.parametrize("number", range(5))
def test_a_dropped_line_is_found(number: int, ledger: Path) -> None:
    kept = lines(ledger)
    del kept[number]
    write_lines(ledger, kept)
    problems = check_ledger(ledger).problems
    assert any("lines were" in problem and "removed or replaced" in problem for problem in problems)
    if number < 4:
        assert any(f"ledger.jsonl line {number + 1} " in problem for problem in problems)


def test_every_other_order_is_found(ledger: Path) -> None:
    kept = lines(ledger)
    for order in itertools.permutations(range(5)):
        write_lines(ledger, [kept[number] for number in order])
        assert bool(check_ledger(ledger).problems) == (order != (0, 1, 2, 3, 4)), order


def test_a_repeated_line_is_found(ledger: Path) -> None:
    kept = lines(ledger)
    for number, place in itertools.product(range(5), range(6)):
        write_lines(ledger, [*kept[:place], kept[number], *kept[place:]])
        assert check_ledger(ledger).problems, (number, place)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_a_cut_tail_does_not_fit_the_head(count: int, ledger: Path) -> None:
    write_lines(ledger, lines(ledger)[:count])
    problems = check_ledger(ledger).problems
    assert any(problem.startswith("ledger.head names 5 entries") for problem in problems)


def test_a_line_that_was_edited_and_sealed_again_breaks_the_line_after_it_or_the_head(ledger: Path) -> None:
    for number in range(5):
        kept = lines(ledger)
        values = json.loads(kept[number])
        values["stamp"]["by"] = "eve"
        del values["sha256"]
        write_lines(ledger, [
            *kept[:number], canonical_json(values | {"sha256": sha256_json(values)}), *kept[number + 1 :],
        ])  # fmt: skip
        expected = f"line {number + 2} does not continue" if number < 4 else "ledger.head names 5 entries"
        assert any(expected in problem for problem in check_ledger(ledger).problems)
        write_lines(ledger, kept)


def test_a_line_or_head_of_the_same_values_in_another_form_is_found(ledger: Path) -> None:
    kept, head = lines(ledger), (ledger / "ledger.head").read_bytes()
    for form in (json.dumps(json.loads(kept[2])).encode() + b"\n", b'{"sequence":3,' + kept[2][1:]):
        write_lines(ledger, [*kept[:2], form, *kept[3:]])
        assert check_ledger(ledger).problems == ["ledger.jsonl line 3 was changed after it was written"]
    write_lines(ledger, kept)
    (ledger / "ledger.head").write_bytes(head.replace(b":", b": "))
    assert check_ledger(ledger).problems == ["ledger.head was changed after it was written"]


@pytest.mark.parametrize("changes", [{"previous_identity": None}, {"restores": 2}, {"action": "rollback"}])
def test_a_last_line_that_contradicts_the_history_is_found_even_when_chain_and_head_fit(
    changes: dict[str, Any], ledger: Path
) -> None:
    kept = lines(ledger)
    values = json.loads(kept[-1]) | changes
    del values["sha256"]
    values["sha256"] = sha256_json(values)
    write_lines(ledger, [*kept[:-1], canonical_json(values)])
    (ledger / "ledger.head").write_bytes(canonical_json({"entries": 5, "sha256": values["sha256"]}))
    (problem,) = check_ledger(ledger).problems
    assert problem.startswith("ledger.jsonl line 5 ")


def test_a_ledger_that_was_written_anew_shows_against_a_head_kept_elsewhere(ledger: Path, tmp_path: Path) -> None:
    kept = read_ledger(ledger).entries
    forged = tmp_path / "forged"
    for manifest in (A, C):
        promote(forged, manifest)
    assert check_ledger(forged).problems == []
    (problem,) = check_ledger(forged, head=kept[-1].sha256).problems
    assert problem.startswith(f"no entry has the hash {kept[-1].sha256}")
    for entry in kept:
        assert check_ledger(ledger, head=entry.sha256).problems == []


@pytest.mark.parametrize("name", ["ledger.jsonl", "ledger.head"])
def test_a_missing_file_is_named(name: str, ledger: Path) -> None:
    (ledger / name).unlink()
    assert any(f"{name} cannot be read" in problem for problem in check_ledger(ledger).problems)


def test_a_missing_record_is_named_and_one_too_many_is_a_note(ledger: Path) -> None:
    path = next((ledger / "records").iterdir())
    path.rename(path.with_name(f"{'0' * 64}.json"))
    found = check_ledger(ledger)
    assert found.problems == [f"records/{path.name} cannot be read (No such file or directory)"]
    assert found.notes == ["records holds 1 that no entry names: of a stopped release, or of a removed line"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\n", "line 6 is not JSON"),
        (b"[]\n", "line 6"),
        (b'{"a":1}\n', "line 6"),
        (b"\xff\n", "line 6 is not JSON"),
        (b"[" * 100_000 + b"\n", "line 6"),
        (b'{"action":"prom', "line 6 is cut off: what wrote it did not finish, and it released nothing"),
    ],
)
def test_what_is_no_entry_is_named_by_its_line(content: bytes, words: str, ledger: Path) -> None:
    write_lines(ledger, [*lines(ledger), content])
    assert any(words in problem for problem in check_ledger(ledger).problems)


def test_nothing_is_released_on_a_damaged_ledger_and_the_error_says_what_to_do(ledger: Path) -> None:
    write_lines(ledger, [line.replace(b"ana", b"eve") for line in lines(ledger)])
    before = {path: path.read_bytes() for path in ledger.rglob("*") if path.is_file()}
    with pytest.raises(LedgerError, match=r"line 1 was changed after it was written, and 4 more; restore the ledger's"):
        promote(ledger, B)
    assert {path: path.read_bytes() for path in ledger.rglob("*") if path.is_file()} == before


# Writing


def crash_at(directory: Path, function: str, count: int) -> int:
    """Promote in a child that dies without a word at call `count` of an os function; its exit code."""

    def child() -> None:
        calls = itertools.count(1)
        real = getattr(os, function)

        def dying(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == count:
                os._exit(9)
            return real(*arguments, **keywords)

        setattr(os, function, dying)
        promote(directory, B)

    process = _FORK.Process(target=child)
    process.start()
    process.join(60)
    return int(process.exitcode or 0)


@pytest.mark.parametrize(("function", "at_least"), [("fsync", 10), ("replace", 5), ("open", 6)])
def test_a_writer_that_dies_anywhere_leaves_a_ledger_that_is_whole_and_goes_on(
    function: str, at_least: int, ledger: Path
) -> None:
    for count in itertools.count(1):
        before = read_ledger(ledger).entries
        code = crash_at(ledger, function, count)
        found = check_ledger(ledger)
        assert found.problems == []
        assert found.entries[: len(before)] == before
        if code == 0:
            assert len(found.entries) == len(before) + 1
            break
        assert len(found.entries) - len(before) in {0, 1}
        promote(ledger, A)
        assert not [note for note in check_ledger(ledger).notes if "behind" in note]
    assert count > at_least, "it died nowhere"
    assert list(ledger.rglob("*.partial")) == []


def test_a_head_that_is_one_entry_behind_is_a_note_and_the_next_release_puts_it_right(ledger: Path) -> None:
    before = (ledger / "ledger.head").read_bytes()
    promote(ledger, B)
    (ledger / "ledger.head").write_bytes(before)
    found = check_ledger(ledger)
    assert found.problems == []
    assert found.notes == ["ledger.head is one entry behind: its writer was stopped; the next release puts it right"]
    promote(ledger, A)
    assert check_ledger(ledger).notes == []
    (ledger / "ledger.head").write_bytes(before)
    assert check_ledger(ledger).problems != [], "two behind is a removed line or a replaced head"


def test_a_disk_that_fails_at_any_write_leaves_the_ledger_as_it_was_or_says_that_the_entry_stands(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, itertools.count(1)
    fails_from = 10**6

    def full(descriptor: int) -> None:
        if next(calls) >= fails_from:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    promote(ledger, B)
    writes = next(calls) - 1
    outcomes = []
    for number in range(1, writes + 1):
        fails_from = number
        known = {name: (ledger / name).read_bytes() for name in ("ledger.jsonl", "ledger.head")}
        calls = itertools.count(1)
        with pytest.raises(LedgerError, match=r"cannot be written \(No space left on device\)") as caught:
            promote(ledger, B)
        outcomes.append("is as it was" if "is as it was; free space" in str(caught.value) else "stands")
        unchanged = {name: (ledger / name).read_bytes() for name in known} == known
        assert unchanged == (outcomes[-1] == "is as it was")
        assert check_ledger(ledger).problems == []
        assert list(ledger.rglob("*.partial")) == []
    # Both files are on the disk before either takes its name; what can fail then is to flush the folder.
    assert outcomes == ["is as it was"] * (writes - 2) + ["stands"] * 2


def test_a_file_that_may_not_grow_leaves_the_ledger_as_it_was(ledger: Path) -> None:
    known = (ledger / "ledger.jsonl").read_bytes()

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(known) + 100, len(known) + 100))
        try:
            promote(ledger, B)
        except LedgerError as error:
            os._exit(7 if "File too large" in error.problem else 8)

    process = _FORK.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert (ledger / "ledger.jsonl").read_bytes() == known
    assert check_ledger(ledger).problems == []


def test_a_file_in_the_place_of_the_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for read in (read_ledger, check_ledger):
        with pytest.raises(LedgerError, match=r"file is not a directory; name the ledger's folder"):
            read(tmp_path / "file")


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"cannot be written \(.*\) and is as it was"):
        promote(tmp_path / "file" / "manifests", A)


# Several writers


def race(directory: Path, start: Any, number: int, rounds: int) -> None:
    start.wait()
    for n in range(rounds):
        promote(directory, (A, B, C)[n % 3], f"channel-{number % 3}", Stamp(by=f"p{number}-{n}", at=STAMP.at))


def test_eight_processes_at_once_lose_no_entry(tmp_path: Path) -> None:
    start = _FORK.Barrier(8)
    processes = [_FORK.Process(target=race, args=(tmp_path, start, number, 6)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    found = check_ledger(tmp_path)
    assert found.problems == []
    assert found.notes == []
    assert sorted(entry.stamp.by for entry in found.entries) == sorted(f"p{p}-{n}" for p in range(8) for n in range(6))
    for number in range(8):  # each process's own entries stand in its order
        own = [entry.stamp.by for entry in found.entries if entry.stamp.by.startswith(f"p{number}-")]
        assert own == [f"p{number}-{n}" for n in range(6)]


def test_readers_beside_writers_never_see_damage(tmp_path: Path) -> None:
    promote(tmp_path, A)
    start = _FORK.Barrier(3)
    processes = [_FORK.Process(target=race, args=(tmp_path, start, number, 15)) for number in range(2)]
    for process in processes:
        process.start()
    start.wait()
    seen = []
    while any(process.is_alive() for process in processes):
        seen.append(len(read_ledger(tmp_path).entries))
    assert seen == sorted(seen)
    assert len(read_ledger(tmp_path).entries) == 31


def hold(directory: Path, ready: Any) -> None:
    with locked(directory):
        ready.set()
        time.sleep(60)


def holding(directory: Path, body: Callable[[], None]) -> None:
    """Run `body` while another process holds the ledger; it is killed then."""
    ready = _FORK.Event()
    process = _FORK.Process(target=hold, args=(directory, ready))
    process.start()
    try:
        assert ready.wait(30)
        body()
    finally:
        process.kill()
        process.join()


def test_a_writer_that_waits_too_long_says_so(ledger: Path) -> None:
    def wait() -> None:
        with pytest.raises(LedgerError, match=r"another process has held the ledger in .* for 0\.1 s; wait for it"):
            locked(ledger, wait=0.1).__enter__()

    holding(ledger, wait)


def test_a_disk_without_locks_is_one_error(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(LedgerError, match=r"cannot be locked \(No locks available\); keep the ledger on a disk"):
        promote(ledger, B)


def test_the_lock_of_a_killed_writer_is_free(ledger: Path) -> None:
    holding(ledger, lambda: None)
    promote(ledger, B)
    assert len(check_ledger(ledger).entries) == 6


def test_a_copy_without_its_lock_file_can_be_read(ledger: Path) -> None:
    (ledger / ".ledger.lock").unlink()
    assert len(read_ledger(ledger).entries) == 5
    assert not (ledger / ".ledger.lock").exists()


def test_the_lock_is_released_where_the_work_under_it_fails(ledger: Path) -> None:
    with pytest.raises(ValueError, match="mine"), locked(ledger):
        raise ValueError("mine")
    with (ledger / ".ledger.lock").open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
