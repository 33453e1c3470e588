"""The journal: what was appended comes back, and nothing that a crash or a changed byte has touched is believed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import ArtifactError
from quantkit.journal import (
    JournalWriter,
    Mark,
    Step,
    first_difference,
    generator_state,
    read_journal,
    set_generator,
)
from quantkit.manifest import FallbackRecord, FoldRecord, LayerError, LayerRecord, OutputError, SchemeRecord
from quantkit.types import QuantScheme

RUN = {"recipe": {"weights": {"bits": 4}}, "calibration": None, "source": {"name": "模型"}}


def step(number: int) -> Step:
    layer = LayerRecord(
        name="a.b", module="m", shape=(3, 64), scheme=SchemeRecord.of(QuantScheme(4, "group", 32)), passes=["gptq"],
        error=LayerError(relative=0.1 + 0.2, max_abs=1e-17), output_error=OutputError(before=1 / 3, after=0.0),
        tokens=7, damping=0.1, notes=['a "note"\n'], bytes=99, fallback=None,
    )  # fmt: skip
    fold = FoldRecord(
        kind="norm", producer="p", consumers=["c"], residual=3e-6, used=[{"pass": "awq", "setting": -1.0}], refused=None
    )
    return Step(
        blocks=number,
        done=[f"{number}.weight"],
        tensors={f"{number}.packed": "ab" * 32},
        layers=[layer] * number,
        fold_sites=[fold],
        fallbacks=[FallbackRecord(layer="a.b", kind="damping", detail="raised")],
        generators={"fold": "AAAA"},
    )


def steps() -> list[Step]:
    return [step(number) for number in range(1, 5)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "journal.jsonl"
    writer = JournalWriter.create(target, RUN)
    for one in steps():
        writer.append(one)
    writer.close()
    return target


def test_run_and_steps_come_back_as_they_were(path: Path) -> None:
    journal = read_journal(path)
    assert journal is not None
    assert (journal.run, journal.steps) == (RUN, steps())
    assert journal.steps[0].layers[0].error.relative == 0.1 + 0.2
    assert journal.marks[-1].end == path.stat().st_size


def test_cut_off_anywhere_only_whole_lines_count(path: Path) -> None:
    data = path.read_bytes()
    ends = [len(b"".join(data.splitlines(keepends=True)[: n + 1])) for n in range(5)]
    for size in range(0, len(data) + 1, 7):
        path.write_bytes(data[:size])
        journal = read_journal(path)
        whole = sum(end <= size for end in ends)
        assert (journal is None) == (whole == 0)
        assert journal is None or journal.steps == steps()[: whole - 1]


def test_a_changed_byte_takes_its_line_and_all_behind_it_away(path: Path) -> None:
    data = path.read_bytes()
    for position in range(0, len(data), 11):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        journal = read_journal(path)
        before = data[:position].count(b"\n")
        assert (journal is None) == (before == 0), position
        assert journal is None or journal.steps == steps()[: before - 1], position


def test_lines_of_another_journal_or_in_another_order_do_not_count(path: Path, tmp_path: Path) -> None:
    other = JournalWriter.create(tmp_path / "other", RUN | {"recipe": None})
    other.append(steps()[0])
    other.close()
    lines = path.read_bytes().splitlines(keepends=True)
    foreign = (tmp_path / "other").read_bytes().splitlines(keepends=True)
    for mixed, expected in (
        ([lines[0], foreign[1]], 0),
        ([*lines[:3], lines[2]], 2),
        ([lines[0], lines[2], lines[1]], 0),
        ([lines[0], lines[0]], 0),
    ):
        path.write_bytes(b"".join(mixed))
        journal = read_journal(path)
        assert journal is not None
        assert len(journal.contents) == expected


def test_steps_of_another_version_are_there_and_an_error_only_where_they_are_used(tmp_path: Path) -> None:
    writer = JournalWriter.create(tmp_path / "j", {"version": "next"})
    writer._append("step", {"done": ["a"], "colour": "blue"})
    journal = read_journal(tmp_path / "j")
    assert journal is not None
    assert (journal.run, len(journal.contents)) == ({"version": "next"}, 1)
    with pytest.raises(ArtifactError, match=r"'colour'.*start again"):
        _ = journal.steps


@pytest.mark.parametrize("content", [None, b"", b"{}\n", b'{"chain": "", "run": {}}\n', b"\x00\xff\n"])
def test_a_journal_without_a_whole_first_line_is_none(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "j").write_bytes(content)
    assert read_journal(tmp_path / "j") is None


def test_it_is_gone_on_with_behind_any_step_and_what_was_torn_is_cut_off(path: Path) -> None:
    whole = path.read_bytes()
    for kept in range(5):
        path.write_bytes(whole + b'{"chain": "half a li')
        journal = read_journal(path)
        assert journal is not None
        writer = JournalWriter.after(path, journal.mark(kept))
        for one in steps()[kept:]:
            writer.append(one)
        writer.close()
        assert path.read_bytes() == whole


def test_a_step_is_on_the_disk_when_append_returns_and_short_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bytes] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append(b"" if target.is_dir() else target.read_bytes())
        real(descriptor)

    class Slow:
        """A stream that takes five bytes at a time."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def write(self, data: memoryview) -> int:
            return int(self.stream.write(data[:5]))

        def fileno(self) -> int:
            return int(self.stream.fileno())

    monkeypatch.setattr(os, "fsync", fsync)
    JournalWriter.create(tmp_path / "j", RUN).close()
    assert len(flushed) == 2, "the file, and its name"
    journal = read_journal(tmp_path / "j")
    assert journal is not None
    with (tmp_path / "j").open("r+b", buffering=0) as stream:
        stream.seek(journal.start.end)
        JournalWriter(Slow(stream), journal.start.chain).append(steps()[0])  # type: ignore[arg-type]
    assert flushed[-1] == (tmp_path / "j").read_bytes()
    again = read_journal(tmp_path / "j")
    assert again is not None
    assert again.steps == steps()[:1]
    assert again.mark(0) == Mark(journal.start.chain, journal.start.end)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"a": 1, "b": {"c": 2}}, {"b": {"c": 2}, "a": 1}, None),
        ({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}, "b.c was 2 and is 3"),
        ({"a": 1}, {"a": 1, "b": {"c": 3}}, "b was None and is {'c': 3}"),
        ({"b": {"c": 3}}, {"b": None}, "b was {'c': 3} and is None"),
        ({"z": 1, "a": 1}, {"z": 2, "a": 2}, "z was 1 and is 2"),
        ({"h": "a" * 64}, {"h": "b" * 64}, f"h was {'a' * 40}... and is {'b' * 40}..."),
    ],
)
def test_the_first_difference_is_named_by_its_key(old: Any, new: Any, found: str | None) -> None:
    assert first_difference(old, new) == found


def test_a_generator_goes_on_where_its_state_was_taken() -> None:
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(99)
    torch.rand(1001, generator=first)
    set_generator(second, generator_state(first))
    assert torch.equal(torch.randperm(50, generator=first), torch.randperm(50, generator=second))


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_a_journal_with_a_value_that_has_no_hash_does_not_count(path: Path, value: str) -> None:
    whole = read_journal(path)
    assert whole is not None
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + f'{{"chain":"","step":{{"a":{value}}}}}\n'.encode() + b"".join(lines[1:]))
    found = read_journal(path)
    assert found is not None
    assert (found.run, found.contents) == (whole.run, [])
    path.write_text(f'{{"chain":"","run":{{"a":{value}}}}}\n')
    assert read_journal(path) is None
