"""Saving: nothing counts before it is on the disk, nothing is believed that is not there as it was written."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit import saving
from quantkit.artifact import WeightsWriter, weight_layouts
from quantkit.journal import Step, read_journal
from quantkit.saving import Saver, intact_steps, remove_others
from quantkit.tensorfile import TensorSpec

SPECS = [TensorSpec(name, torch.float32, (8,)) for name in "abcd"]
SHARD = 64


def step(tensors: dict[str, str]) -> Step:
    return Step(blocks=0, done=list(tensors), tensors=tensors, layers=[], fold_sites=[], fallbacks=[], generators={})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "artifact"
    path.mkdir()
    return path


@pytest.fixture
def writer(folder: Path) -> WeightsWriter:
    return WeightsWriter(folder, SPECS, SHARD)


def test_weights_are_flushed_before_the_line_that_speaks_of_them(
    writer: WeightsWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path / "journal", writer, lambda: {"run": 1})
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))
    assert saver.ready()
    for name in "ad":
        saver.save(step({name: writer.write(name, torch.randn(8))}))
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert flushed[-5:] == [*shards, "journal", shards[1], "journal"]


def test_nothing_is_saved_before_the_run_is_known(writer: WeightsWriter, tmp_path: Path) -> None:
    known: list[dict[str, Any]] = []
    saver = Saver(tmp_path / "journal", writer, lambda: known[0] if known else None)
    assert not saver.ready()
    assert not (tmp_path / "journal").exists()
    known.append({"recipe": "one"})
    assert saver.ready()
    known.clear()
    assert saver.ready()
    saver.save(step({"a": "0"}))
    saver.close()
    journal = read_journal(tmp_path / "journal")
    assert journal is not None
    assert (journal.run, journal.steps) == ({"recipe": "one"}, [step({"a": "0"})])


def test_saving_is_worth_it_where_work_took_many_times_as_long(
    writer: WeightsWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    saver = Saver(tmp_path / "journal", writer, lambda: {})
    assert saver.worth_it
    real = saving.JournalWriter.append

    def slow(self: Any, one: Step) -> None:
        now[0] += 2
        real(self, one)

    monkeypatch.setattr(saving.JournalWriter, "append", slow)
    assert saver.ready()
    saver.save(step({}))
    assert not saver.worth_it
    now[0] += 39
    assert not saver.worth_it
    now[0] += 1
    assert saver.worth_it


def test_steps_count_up_to_the_first_whose_tensors_are_not_as_they_were_written(
    folder: Path, writer: WeightsWriter
) -> None:
    hashes = {name: writer.write(name, torch.randn(8)) for name in "abcd"}
    writer.close()
    steps = [step({"a": hashes["a"], "b": hashes["b"]}), step({"c": hashes["c"]}), step({"d": hashes["d"]})]
    layouts = weight_layouts(folder, SPECS, SHARD)
    assert intact_steps(steps, layouts) == steps
    for name, expected in (("d", 2), ("c", 1), ("b", 0)):
        entry = next(plan.entries[name] for plan in layouts.values() if name in plan.entries)
        with entry.path.open("r+b") as stream:
            stream.seek(entry.stop - 1)
            byte = stream.read(1)
            stream.seek(entry.stop - 1)
            stream.write(bytes([byte[0] ^ 1]))
        assert intact_steps(steps, layouts) == steps[:expected]
    sorted(folder.glob("*.safetensors"))[0].unlink()
    assert intact_steps(steps, layouts) == []


def test_a_tensor_of_another_layout_does_not_count(folder: Path, writer: WeightsWriter) -> None:
    steps = [step({"a": writer.write("a", torch.randn(8)), "z": "0" * 64})]
    assert intact_steps(steps, weight_layouts(folder, SPECS, SHARD)) == []


def test_all_but_the_weight_files_is_removed(folder: Path, writer: WeightsWriter) -> None:
    writer.abort()
    files = sorted(folder.iterdir())
    (folder / "manifest.json").write_text("of a run that was killed before the rename")
    (folder / "additional_chat_templates" / "deep").mkdir(parents=True)
    (folder / "additional_chat_templates" / "deep" / files[0].name).write_text("not a weight file here")
    (folder / "link").symlink_to(folder.parent)
    remove_others(folder, weight_layouts(folder, SPECS, SHARD))
    assert sorted(folder.iterdir()) == files
    assert folder.parent.is_dir()
