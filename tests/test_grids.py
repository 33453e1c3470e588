"""Tables of a page as rows of text: rounded to what is worth reading, and empty where a report holds no number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit import grids
from quantkit.checkpoint import open_checkpoint
from quantkit.grids import Grid, count, fixed, size, span
from quantkit.manifest import FallbackRecord, Manifest, read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Report
from tests.samples import estimate, sample_report, with_output_errors

GRIDS: dict[str, Callable[[Report], Grid]] = {
    name: getattr(grids, f"{name}_grid") for name in ("perplexity", "fidelity", "breakdown", "worst", "task", "text")
}


@pytest.fixture(scope="module")
def manifest(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return read_manifest(convert(plan, tmp_path_factory.mktemp("grids") / "artifact").path)


# Numbers


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (1.33333, 3, "1.333"),
        (0.0, 3, "0.000"),
        (0.00004, 3, "4.0e-05"),
        (-0.25, 2, "-0.25"),
        (12345678.9, 2, "1.2e+07"),
    ],
)
def test_a_number_has_its_digits_or_an_exponent(value: float, digits: int, expected: str) -> None:
    assert fixed({"value": value}, digits) == expected


def test_what_is_not_there_is_an_empty_cell() -> None:
    assert fixed(None, 3) == span(None, 3) == span({"value": 1.0}, 3) == count(None) == count(1.5) == count(True) == ""
    assert span(estimate(1.0, 0.25), 2) == "0.75 – 1.25"


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (170_723_560, "170.7 MB"), (10**16, "10000.0 TB")],
)
def test_sizes_have_a_unit(number: int, expected: str) -> None:
    assert size(number) == expected


# Reports


@pytest.mark.parametrize("name", GRIDS)
def test_every_row_has_a_cell_for_each_head(name: str, manifest: Manifest) -> None:
    grid = GRIDS[name](sample_report(manifest))
    assert grid.rows
    assert {len(row) for row in grid.rows} == {len(grid.heads)}
    assert max(grid.left | grid.prose | grid.quiet) < len(grid.heads)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, [1], {"a": 1}, {"a": {"b": None}}, {"a": {"value": "x"}}])
def test_metrics_that_are_none_make_no_error(name: str, value: Any, manifest: Manifest) -> None:
    metrics = dict.fromkeys(("perplexity", "fidelity", "tasks", "breakdown"), value)
    nested = {
        "breakdown": dict.fromkeys(("all", "corpus", "class", "position", "worst_windows", "kl_histogram"), value)
    }
    for found in (metrics, nested, {}):
        report = sample_report(manifest, metrics=found, protocol_record={"texts": value})
        assert all(isinstance(cell, str) for row in GRIDS[name](report).rows for cell in row)
        assert grids.histogram(report) is None


def test_perplexity_stands_beside_the_bases(manifest: Manifest) -> None:
    row = grids.perplexity_grid(sample_report(manifest)).rows[0]
    assert row == ["wiki-en", "20.80", "19.80 – 21.80", "20.00", "1.0400", "1.0200 – 1.0600", "12,264"]


def test_groups_stand_in_order_with_the_worst_of_each_kind_marked(manifest: Manifest) -> None:
    metric = {"ratio": estimate(1.1), "top1": estimate(0.9), "tokens": 100}
    group = {name: metric | {"kl_mean": estimate(kl)} for name, kl in (("1-7", 0.1), ("128-511", 0.2), ("8-31", 0.3))}
    report = sample_report(
        manifest, metrics={"breakdown": {"position": group, "all": metric | {"kl_mean": estimate(2.0)}}}
    )
    grid = grids.breakdown_grid(report)
    assert [row[0] for row in grid.rows] == ["all", "by tokens before", "1-7", "8-31", "128-511"]
    assert grid.parts == {1}
    assert grid.strong == {(3, 0), (3, 3)}
    assert [row[2] for row in grid.rows] == ["100.0 %", "", "5.0 %", "15.0 %", "10.0 %"]


def test_tasks_of_any_metric_are_listed_with_their_languages_lengths_and_flips(manifest: Manifest) -> None:
    rows = grids.task_grid(sample_report(manifest)).rows
    assert [row[:3] for row in rows] == [
        ["quantkit_copy", "exact", "300"],
        ["quantkit_copy", "margin", "300"],
        ["quantkit_copy, en", "exact", "150"],
        ["quantkit_copy, zh", "exact", "150"],
        ["quantkit_copy, length 256", "exact", "150"],
        ["quantkit_copy, length 1024", "exact", "150"],
    ]
    assert rows[0][3:] == ["0.6100", "0.5900 – 0.6300", "0.7000", "0.0900", "0.0700 – 0.1100", "31", "4"]
    assert rows[1][-2:] == ["", ""]


def test_a_metric_whose_name_begins_like_a_part_is_a_metric(manifest: Manifest) -> None:
    entry = {"n": 3, "by_hand": {"value": 0.5}, "by_year": {"2024": {"n": 1, "by_hand": {"value": 1.0}}}, "by_x": 7}
    rows = grids.task_grid(sample_report(manifest, metrics={"tasks": {"t": entry}})).rows
    assert [row[:4] for row in rows] == [["t", "by_hand", "3", "0.5000"], ["t, year 2024", "by_hand", "1", "1.0000"]]


def test_a_histogram_is_taken_only_where_it_can_be_drawn(manifest: Manifest) -> None:
    def found(edges: Any, counts: Any) -> Any:
        return grids.histogram(
            sample_report(manifest, metrics={"breakdown": {"kl_histogram": {"edges": edges, "counts": counts}}})
        )

    assert found([0.1, 1.0], [1, 2, 3]) == ([0.1, 1.0], [1, 2, 3])
    for edges, counts in (
        ([0.1, 1.0], [1, 2]), ([1.0, 0.1], [1, 2, 3]), ([0.0, 1.0], [1, 2, 3]), ([0.1, 1.0], [0, 0, 0]),
        ([0.1, "x"], [1, 2, 3]), ([0.1, 1.0], [1, None, 3]), ([0.1, 1.0], [1, -2, 3]), ([0.1], [1, 2]), (3, 4),
        ([0.1, 1.0], [1, {"value": 2}, 3]),
    ):  # fmt: skip
        assert found(edges, counts) is None


# Manifests


def test_layers_show_what_was_measured_and_no_empty_column(manifest: Manifest) -> None:
    plain = grids.layer_grid(manifest.layers)
    assert plain.heads == ["layer", "scheme", "bits", "weight error", "largest"]
    assert plain.rows[0][:2] == ["model.layers.0.mlp.down_proj", "int4 g64 sym"]
    calibrated = grids.layer_grid(with_output_errors(manifest).layers)
    assert calibrated.heads[5:] == ["output before", "output after", "tokens"]
    assert calibrated.rows[0][5:] == ["0.004000", "0.001000", "999"]


def test_the_heat_map_has_a_row_for_each_kind_and_a_column_for_each_block(manifest: Manifest) -> None:
    rows, columns, values = grids.heat_map(manifest.layers)
    assert columns == ["0", "1"]
    assert set(rows) == {f"mlp.{n}_proj" for n in ("down", "gate", "up")} | {f"self_attn.{n}_proj" for n in "kovq"}
    errors = {layer.module: layer.error.relative for layer in manifest.layers}
    assert values[rows.index("mlp.up_proj")][1] == errors["model.layers.1.mlp.up_proj"]
    _, _, outputs = grids.heat_map(with_output_errors(manifest).layers)
    assert outputs[0][0] == pytest.approx(0.001**0.5)


def test_experts_share_a_cell_which_shows_the_worst_and_a_head_has_none(manifest: Manifest) -> None:
    names = ["model.layers.10.mlp.experts.3.up", "model.layers.10.mlp.experts.12.up", "model.layers.9.o", "lm_head"]
    layers = [
        manifest.layers[0].model_copy(
            update={"module": name, "error": manifest.layers[0].error.model_copy(update={"relative": 0.1 * (n + 1)})}
        )
        for n, name in enumerate(names)
    ]
    rows, columns, values = grids.heat_map(layers)
    assert (rows, columns) == (["mlp.experts.*.up", "o"], ["9", "10"])
    assert values == [[None, 0.2], [pytest.approx(0.3), None]]


def test_a_block_number_that_no_model_has_is_no_column(manifest: Manifest) -> None:
    layers = [manifest.layers[0].model_copy(update={"module": f"model.layers.{'1' * 5000}.o"})]
    assert grids.heat_map(layers)[1] == []


def test_equal_fallbacks_stand_in_one_row(manifest: Manifest) -> None:
    records = [FallbackRecord(layer=f"layer{n}", kind="group_size", detail="group 32 instead of 64") for n in range(3)]
    grid = grids.fallback_grid(manifest.model_copy(update={"fallbacks": records}))
    assert grid.rows == [["group_size", "3", "layer0", "group 32 instead of 64"]]
