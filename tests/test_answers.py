"""Answers side by side: split where they part, cut with a note, and empty where a report holds none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit import answers
from quantkit.answers import cut, cut_start, transcripts
from quantkit.checkpoint import open_checkpoint
from quantkit.grids import Grid
from quantkit.manifest import Manifest, read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Report
from tests.samples import sample_answers, sample_report

GRIDS: dict[str, Callable[[Report], Grid]] = {
    name: getattr(answers, f"{name}_grid") for name in ("generation", "divergence", "batching", "unequal")
}


@pytest.fixture(scope="module")
def manifest(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return read_manifest(convert(plan, tmp_path_factory.mktemp("answers") / "artifact").path)


def with_samples(manifest: Manifest, *samples: Any) -> Report:
    return sample_report(manifest, metrics={"generation": {"samples": list(samples)}})


def sample(answer: str, reference: str, index: int | None = None) -> dict[str, Any]:
    divergence = None if index is None else {"index": index}
    return {"prompt": str(index), "answer": answer, "reference_answer": reference, "divergence": divergence}


@pytest.mark.parametrize("name", GRIDS)
def test_every_row_has_a_cell_for_each_head(name: str, manifest: Manifest) -> None:
    grid = GRIDS[name](sample_report(manifest))
    assert grid.rows
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    assert max(grid.left | grid.prose | grid.quiet) < len(grid.heads)


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [1], {"a": 1}, {"a": {"b": None}}, {"a": {"value": "x"}}])
def test_metrics_that_are_none_make_no_error(value: Any, manifest: Manifest) -> None:
    keys = ("samples", "by_language", "unequal", "equal", "identical", "n")
    entries = ("prompt", "answer", "divergence", "question", "token", "index", "alone_gap")
    listed = {"samples": [dict.fromkeys(entries, value)], "unequal": [dict.fromkeys(entries, value)]}
    parted = {"samples": [{"divergence": dict.fromkeys(("index", "token", "reference_token", "reference_gap"), value)}]}
    for found in (value, dict.fromkeys(keys, value), listed, parted, {"samples": [value], "unequal": [value]}):
        report = sample_report(manifest, metrics={"generation": found, "batching": found})
        for grid in GRIDS.values():
            assert all(isinstance(cell, str) for row in grid(report).rows for cell in row)
        assert all(isinstance(one.answer, str) for one in transcripts(report))


def test_answers_stand_over_all_prompts_and_by_language(manifest: Manifest) -> None:
    rows = answers.generation_grid(sample_report(manifest)).rows
    assert [row[:4] for row in rows] == [
        ["all", "2", "0.500", "0.480 – 0.520"],
        ["en", "2", "0.500", "0.480 – 0.520"],
    ]


def test_a_batch_shows_the_difference_beside_the_lead_that_it_could_cost(manifest: Manifest) -> None:
    rows = answers.batching_grid(sample_report(manifest)).rows
    assert [row[1] for row in rows] == ["0.500", "0.020000", "0.010000", "1", "128"]
    assert answers.unequal_grid(sample_report(manifest)).rows == [
        ["en-claim", "3", "' The valve' (6)", "' The valve' (5)", "0.010000", "0.020000"]
    ]


def test_where_answers_part_stands_the_token_of_each_with_its_white_space(manifest: Manifest) -> None:
    report = sample_report(manifest, metrics=sample_answers(words="a\n"))
    assert answers.divergence_grid(report).rows == [["en-claim1", "7", r"' a\n' (9)", r"' a\n' (8)", "0.250"]]


def test_those_that_part_first_come_first_in_both(manifest: Manifest) -> None:
    report = with_samples(manifest, sample("a", "b", 9), sample("c", "c"), sample("d", "e", 0), sample("f", "g", 10))
    assert [one.index for one in transcripts(report)] == [0, 9, 10, None]
    assert [row[1] for row in answers.divergence_grid(report).rows] == ["0", "9", "10"]


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("the valve", "the vent", ("the v", "alve", "ent")),
        ("阀门开", "阀门关", ("阀门", "开", "关")),
        ("same", "same", ("same", "", "")),
        ("same", "same and more", ("same", "", " and more")),
        ("", "x", ("", "", "x")),
    ],
)
def test_two_answers_are_split_at_the_first_character_that_differs(
    answer: str, reference: str, expected: tuple[str, str, str], manifest: Manifest
) -> None:
    (one,) = transcripts(with_samples(manifest, sample(answer, reference, 1)))
    assert (one.shared, one.answer, one.reference) == expected


def test_long_answers_and_questions_are_cut_with_a_note(manifest: Manifest) -> None:
    long = sample("s" * 3000 + "a" * 3000, "s" * 3000 + "b" * 900, 5) | {"question": "q" * 700}
    (one,) = transcripts(with_samples(manifest, long))
    assert one.shared == "(2,600 characters before) … " + "s" * 400
    assert one.answer == "a" * 800 + " … (2,200 more characters)"
    assert one.reference == "b" * 800 + " … (100 more characters)"
    assert one.question == "q" * 600 + " … (100 more characters)"


def test_a_text_that_fits_is_not_cut() -> None:
    assert cut("abc", 3) == cut_start("abc", 3) == "abc"


def test_fast_decoding_is_shown_where_it_was_measured(manifest: Manifest) -> None:
    report = sample_report(manifest)
    assert answers.decoding_grid(report).rows == []
    report.metrics["decoding"] = {"tokens": 32, "largest_difference": 0.25, "kl_mean": 0.0001, "top1": 0.96875}
    assert [row[1] for row in answers.decoding_grid(report).rows] == ["0.000100", "0.969", "0.250000", "32"]
