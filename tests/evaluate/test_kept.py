"""Answers on disk are the answers that were computed, and nothing else is ever taken for them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.evaluate.kept import Kept
from quantkit.evaluate.scoring import Logits

WINDOWS = torch.arange(24).reshape(3, 8)


class _Model:
    """Counts how often it is run."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.runs, self.dtype = 0, dtype

    def __call__(self, window: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return torch.randn(7, 11, generator=torch.Generator().manual_seed(int(window.sum()))).to(self.dtype)


def _cached(model: _Model, folder: Path, identity: str = "a", limit: int = 1 << 20) -> Logits:
    return Kept(identity, model.dtype, folder=folder, limit=limit).logits(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_window_is_computed_once_and_comes_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = _Model(dtype)
    expected = [model(window) for window in WINDOWS]
    first = [_cached(model, tmp_path)(window) for window in WINDOWS]
    again = [_cached(model, tmp_path)(window) for window in WINDOWS]
    assert model.runs == 6
    for a, b, c in zip(expected, first, again, strict=True):
        assert a.dtype == c.dtype
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_another_model_or_dtype_or_window_is_computed(tmp_path: Path) -> None:
    model, narrow = _Model(), _Model(torch.bfloat16)
    _cached(model, tmp_path)(WINDOWS[0])
    _cached(model, tmp_path, identity="b")(WINDOWS[0])
    _cached(model, tmp_path)(WINDOWS[1])
    _cached(narrow, tmp_path)(WINDOWS[0])
    assert (model.runs, narrow.runs) == (3, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "digest", "shape", "dtype"])
def test_a_damaged_file_is_not_used_and_is_replaced(damage: str, tmp_path: Path) -> None:
    model = _Model()
    expected = _cached(model, tmp_path)(WINDOWS[0])
    (path,) = tmp_path.glob("*/*")
    data = path.read_bytes()
    path.write_bytes({
        "flip": data[:-1] + bytes([data[-1] ^ 1]),
        "cut": data[:-4],
        "empty": b"",
        "text": b"{}\n",
        "digest": b"0" + data[1:] if data[:1] != b"0" else b"1" + data[1:],
        "dtype": data.replace(b"float32", b"int32"),
        "shape": data.replace(b"[7, 11]", b"[7, 12]"),
    }[damage])  # fmt: skip
    assert torch.equal(_cached(model, tmp_path)(WINDOWS[0]), expected)
    assert model.runs == 2
    _cached(model, tmp_path)(WINDOWS[0])
    assert model.runs == 2


def test_the_folder_is_bounded_and_loses_what_was_not_read_for_longest(tmp_path: Path) -> None:
    model = _Model()
    size = 7 * 11 * 4
    logits = _cached(model, tmp_path, limit=2 * size + 400)
    for n, window in enumerate(WINDOWS[:2]):
        logits(window)
        newest = max(tmp_path.glob("*/*"), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, ns=(n + 1, n + 1))
    logits(WINDOWS[0])  # now the second is the one not read for longest
    logits(WINDOWS[2])
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 2 * size + 400
    logits(WINDOWS[0])
    assert model.runs == 3
    logits(WINDOWS[1])
    assert model.runs == 4


def test_a_folder_that_lies_among_the_answers_is_left_alone_and_they_are_still_bounded(tmp_path: Path) -> None:
    model = _Model()
    (tmp_path / "other" / "folder").mkdir(parents=True)
    os.utime(tmp_path / "other" / "folder", ns=(0, 0))
    _cached(model, tmp_path, limit=700)(WINDOWS[0])
    for path in tmp_path.glob("*/*"):
        os.utime(path, ns=(1, 1))
    logits = _cached(model, tmp_path, limit=700)
    logits(WINDOWS[1])
    logits(WINDOWS[1])
    assert model.runs == 2
    assert sum(path.is_file() for path in tmp_path.glob("*/*")) == 1


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    model = _Model()
    _cached(model, tmp_path, limit=10)(WINDOWS[0])
    assert list(tmp_path.glob("*/*")) == []


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    model = _Model()
    logits = Kept("a", torch.float32, folder=tmp_path / "file").logits(model)
    assert torch.equal(logits(WINDOWS[0]), logits(WINDOWS[0]))
    assert model.runs == 2


def test_a_folder_that_only_others_may_write_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Model()
    expected = _cached(model, tmp_path)(WINDOWS[0])

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "touch", refused)
    assert torch.equal(_cached(model, tmp_path)(WINDOWS[0]), expected)
    assert model.runs == 1


def test_answers_of_a_checkpoints_own_code_are_not_those_of_transformers(tmp_path: Path) -> None:
    model = _Model()
    for own_code in (False, True):
        Kept("a", model.dtype, own_code=own_code, folder=tmp_path).logits(model)(WINDOWS[0])
    assert model.runs == 2


def test_what_this_run_used_makes_no_room_for_more(tmp_path: Path) -> None:
    model = _Model()
    logits = _cached(model, tmp_path, limit=600)
    for _ in range(2):
        for window in WINDOWS:
            logits(window)
    assert model.runs == 5  # the first is read again, the others have no room


def test_a_document_is_computed_once_and_another_question_is_another_one(tmp_path: Path) -> None:
    asked = []
    kept = Kept("a", torch.float32, folder=tmp_path)

    def answer(value: Any) -> Callable[[], Any]:
        return lambda: asked.append(value) or value

    first = {"items": [0.1, None, 1e-300], "name": "证据"}
    assert [kept.document({"task": 1}, answer(first)) for _ in range(2)] == [first, first]
    assert kept.document({"task": 2}, answer([2])) == [2]
    assert Kept("b", torch.float32, folder=tmp_path).document({"task": 1}, answer([3])) == [3]
    assert asked == [first, [2], [3]]


@pytest.mark.parametrize("answer", [(1, 2), {1: 2}, object(), [float("nan")]])
def test_what_json_would_change_is_not_kept(answer: Any, tmp_path: Path) -> None:
    kept = Kept("a", torch.float32, folder=tmp_path)
    assert kept.document("q", lambda: answer) is answer
    assert kept.document("q", lambda: answer) is answer
