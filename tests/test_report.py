"""Reports: metrics by dotted path, whole files or none, and one line for what cannot be read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import ReportError
from quantkit.report import REPORT_VERSION, Report, Subject, SuiteRecord, read_report, refuse_unwritable, write_report

INTERVAL = {"value": 1.02, "low": 1.01, "high": 1.03}


def report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "schema_version": REPORT_VERSION,
        "identity": "a" * 64,
        "subject": Subject(kind="artifact", name="llama-rtn-g64", identity="a" * 64),
        "reference": None,
        "suite": SuiteRecord(name="quick", sha256="b" * 64, limit=None),
        "protocol": "c" * 64,
        "protocol_record": {"version": 1},
        "metrics": {
            "perplexity": {"wiki-en": {"ratio": INTERVAL, "tokens": 99}, "notes.v1.txt": {"ratio": {"value": 2.0}}},
            "fidelity": {"kl_mean": INTERVAL},
            "tasks": {"a.b": {"exact_match": {"value": {"value": 0.5}, "drop": {"value": 0.1}}}, "a": {"b": 1}},
            "flag": True,
            "text": "x",
        },
        "notes": [],
        "run": {},
    }
    return Report(**values | changes)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("perplexity.wiki-en.ratio", INTERVAL),
        ("perplexity.wiki-en.ratio.low", {"value": 1.01}),
        ("perplexity.wiki-en.ratio.value", {"value": 1.02}),
        ("perplexity.wiki-en.tokens", {"value": 99.0}),
        ("fidelity.kl_mean", INTERVAL),
        ("perplexity.notes.v1.txt.ratio", {"value": 2.0}),
        ("tasks.a.b.exact_match.drop", {"value": 0.1}),
        ("tasks.a.b.exact_match.value", {"value": 0.5}),
    ],
)
def test_a_metric_is_found_by_its_path_also_where_names_hold_dots(path: str, expected: dict[str, float]) -> None:
    assert report().metric(path) == expected


def test_an_integer_larger_than_every_float_is_no_metric() -> None:
    assert report(metrics={"a": 10**400, "b": {"value": -(10**400)}}).metric("a") is None
    assert report(metrics={"a": 10**400, "b": {"value": -(10**400)}}).metric("b") is None


@pytest.mark.parametrize(
    "path", ["", "nothing", "perplexity", "perplexity.wiki-en", "perplexity.wiki", "flag", "text", "fidelity.kl_mean.x"]
)
def test_what_is_not_a_number_is_no_metric(path: str) -> None:
    assert report().metric(path) is None


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "quick.json"
    write_report(report(notes=["中文"]), path)
    assert read_report(path) == report(notes=["中文"]).sealed()
    assert "中文" in path.read_text(encoding="utf-8")
    assert [child.name for child in path.parent.iterdir()] == ["quick.json"]


def test_a_newer_report_replaces_the_old_one_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    write_report(report(notes=["a long note " * 100]), path)
    write_report(report(), path)
    assert read_report(path) == report().sealed()


def test_a_failing_disk_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quick.json"
    write_report(report(), path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ReportError, match=r"quick\.json cannot be written: No space left"):
        write_report(report(notes=["new"]), path)
    assert read_report(path) == report().sealed()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["folder", "file/report.json"])
def test_a_place_that_can_hold_no_report_is_refused_before_there_is_one(place: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match=r"is (not )?a directory; choose another --output"):
        refuse_unwritable(tmp_path / place)
    refuse_unwritable(tmp_path / "new" / "folders" / "report.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # noqa: ARG005 - root may write everywhere
    with pytest.raises(ReportError, match=f"{tmp_path} is not writable"):
        refuse_unwritable(tmp_path / "report.json")


def test_a_report_that_cannot_be_placed_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(report(), tmp_path / "file" / "quick.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"identity": 1, "identity": 2}'])
def test_what_is_not_a_report_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    path.write_text(content)
    with pytest.raises(ReportError, match=r"quick\.json.*run quantkit eval"):
        read_report(path)


def test_a_missing_report_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"does not exist; run quantkit eval"):
        read_report(tmp_path / "quick.json")


def test_a_report_of_another_version_or_with_unknown_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    for change in ({"schema_version": 1}, {"schema_version": 3}, {"schema_version": "2"}, {"extra": 1}):
        path.write_text(json.dumps(report().model_dump(mode="json") | change))
        with pytest.raises(ReportError, match=next(iter(change))):
            read_report(path)


def test_every_changed_byte_of_a_report_is_found(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    write_report(report(), path)
    original = path.read_bytes()
    for position in range(len(original)):
        changed = bytearray(original)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ReportError, match=r"quick\.json"):
            read_report(path)


def test_a_report_that_was_written_again_in_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    write_report(report(), path)
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(ReportError, match="was changed after it was written"):
        read_report(path)


def test_a_report_without_its_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "quick.json"
    path.write_bytes(report().data)
    with pytest.raises(ReportError, match="was changed after it was written"):
        read_report(path)
