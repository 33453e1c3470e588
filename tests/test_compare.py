"""Comparison: artifacts of one base under one protocol, and every other pair refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit import grids
from quantkit.checkpoint import open_checkpoint
from quantkit.compare import compare, report_path
from quantkit.errors import ArtifactError, ReportError, SchemaError, UsageError
from quantkit.evaluate.protocol import protocol_hash
from quantkit.evaluate.suite import load_suite
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Subject, write_report
from quantkit.tables import comparison_table
from tests.samples import sample_metrics, sample_protocol, sample_report, with_report


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two artifacts of one base and one of another, without reports. Tests must not change them."""
    root = tmp_path_factory.mktemp("compare")
    made = {}
    for name, source, recipe in (("a", "llama", "rtn-g64"), ("b", "llama", "rtn-int8"), ("other", "qwen2", "rtn-g64")):
        made[name] = convert(make_plan(open_checkpoint(str(zoo(source))), load_recipe(recipe)), root / name).path
    return made


@pytest.fixture
def artifacts(pristine: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    ratios = {"a": 1.3, "b": 1.01, "other": 1.2}
    return {
        name: with_report(path, tmp_path / name, metrics=sample_metrics(ratios[name]))
        for name, path in pristine.items()
    }


def rewrite(artifact: Path, **changes: Any) -> None:
    write_report(sample_report(read_manifest(artifact), **changes), artifact / "evals" / "quick.json")


def test_artifacts_stand_in_the_order_in_which_they_are_named(artifacts: dict[str, Path]) -> None:
    found = compare([artifacts["b"], artifacts["a"]], "quick")
    assert found.labels == ["rtn-int8", "rtn-g64"]
    values = found.values()
    assert [row["path"] for row in values["artifacts"]] == [str(artifacts["b"]), str(artifacts["a"])]
    assert values["artifacts"][1]["identity"] == read_manifest(artifacts["a"]).identity
    assert values["artifacts"][1]["metrics"]["fidelity"]["kl_mean"]["value"] == pytest.approx(0.3)
    assert values["protocol"] == protocol_hash(sample_protocol(load_suite("quick")))


def test_the_bases_figures_come_from_the_references_in_the_reports(artifacts: dict[str, Path]) -> None:
    base = compare([artifacts["a"], artifacts["b"]], "quick").values()["base"]
    assert base["name"] == "llama"
    assert base["bits_per_weight"] == pytest.approx(32, abs=0.5)
    assert base["perplexity"]["wiki-en"]["value"] == 20
    assert base["identity"] == read_manifest(artifacts["a"]).source_identity


def test_the_table_has_a_row_for_the_base_and_each_artifact(artifacts: dict[str, Path]) -> None:
    found = compare([artifacts["a"], artifacts["b"]], "quick")
    grid = grids.comparison_grid(found)
    assert grid.heads == ["artifact", "bits", "files", "handbook-zh", "wiki-en", "mean KL", "top-1", "fallbacks"]
    assert [row[0] for row in grid.rows] == ["base", "rtn-g64", "rtn-int8"]
    assert grid.rows[1][3:] == ["1.430", "1.300", "0.3000", "0.900", "0"]
    assert len(comparison_table(found).rows) == 3
    assert grids.text_comparison_grid(found, "wiki-en").rows[0] == ["base", "20.00", "19.00 – 21.00", "", ""]
    assert grids.fidelity_comparison_grid(found).rows[1][1] == "0.0100"


def test_artifacts_of_one_recipe_are_told_apart_by_their_folders(pristine: dict[str, Path], tmp_path: Path) -> None:
    paths = [with_report(pristine["a"], tmp_path / place) for place in ("x/one", "x/two", "y/two")]
    assert compare(paths[:2], "quick").labels == ["one", "two"]
    assert compare(paths[1:], "quick").labels == ["two (1)", "two (2)"]


def test_reports_without_a_reference_compare_by_perplexity_alone(artifacts: dict[str, Path]) -> None:
    text = {"value": {"value": 21.5}, "tokens": 99}
    for name in "ab":
        rewrite(artifacts[name], reference=None, metrics={"perplexity": {"wiki-en": text}})
    found = compare([artifacts["a"], artifacts["b"]], "quick")
    assert found.values()["base"]["perplexity"] == {"wiki-en": None}
    assert grids.comparison_grid(found).heads == ["artifact", "bits", "files", "fallbacks"]
    assert grids.text_comparison_grid(found, "wiki-en").rows[0] == ["rtn-g64", "21.50", "", "", ""]


# What is refused


def test_an_artifact_of_another_base_is_refused_by_name(artifacts: dict[str, Path]) -> None:
    with pytest.raises(ReportError, match=r"other was made from qwen2 \(.{12}\), .*a from llama \(.{12}\)") as caught:
        compare([artifacts["a"], artifacts["b"], artifacts["other"]], "quick")
    assert caught.value.action == "compare artifacts of one base"


def test_another_protocol_is_refused_by_its_hash(artifacts: dict[str, Path]) -> None:
    rewrite(artifacts["b"], protocol="d" * 64)
    with pytest.raises(ReportError, match=r"b was measured by protocol d{12}, .*a by [0-9a-f]{12} \(.*hash\); run"):
        compare([artifacts["a"], artifacts["b"]], "quick")


def test_what_differs_between_two_protocols_is_named_and_where_no_other_run_helps_the_way_out(
    artifacts: dict[str, Path],
) -> None:
    record = sample_protocol(load_suite("quick"))
    for more, message in (
        ({"decoding": "exact"}, r"\(they differ in decoding\); compare them on a suite without tasks and answers"),
        ({"decoding": "exact", "dtype": "bfloat16"}, r"\(they differ in decoding, dtype\); run quantkit eval"),
    ):
        rewrite(artifacts["b"], protocol_record=record | more, protocol=protocol_hash(record | more))
        with pytest.raises(ReportError, match=message):
            compare([artifacts["a"], artifacts["b"]], "quick")


def test_a_missing_report_names_those_there_are_and_the_command(artifacts: dict[str, Path]) -> None:
    (artifacts["b"] / "evals" / "quick.json").rename(artifacts["b"] / "evals" / "long.json")
    with pytest.raises(
        ReportError, match=r"b has no report of suite quick \(it has: long\); run quantkit eval .*--suite"
    ):
        compare([artifacts["a"], artifacts["b"]], "quick")
    shutil.rmtree(artifacts["b"] / "evals")
    with pytest.raises(ReportError, match="it has: none"):
        compare([artifacts["a"], artifacts["b"]], "quick")


def test_a_report_of_other_bytes_is_refused(artifacts: dict[str, Path]) -> None:
    shutil.copyfile(artifacts["a"] / "evals" / "quick.json", artifacts["b"] / "evals" / "quick.json")
    with pytest.raises(ReportError, match="is the report of"):
        compare([artifacts["a"], artifacts["b"]], "quick")


def test_a_report_beside_another_reference_than_the_source_is_refused(artifacts: dict[str, Path]) -> None:
    rewrite(artifacts["b"], reference=Subject(kind="checkpoint", name="elsewhere", identity="e" * 64))
    with pytest.raises(ReportError, match="compares with elsewhere, which is not the source"):
        compare([artifacts["a"], artifacts["b"]], "quick")


def test_what_is_no_artifact_and_a_single_one_are_refused(
    artifacts: dict[str, Path], zoo: Callable[[str], Path]
) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        compare([artifacts["a"], zoo("llama")], "quick")
    with pytest.raises(UsageError, match="one artifact"):
        compare([artifacts["a"]], "quick")


def test_a_suite_is_named_by_its_name_or_its_file(artifacts: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: quick\nperplexity: [{text: wiki-en, windows: 1, length: 8}]\n")
    assert report_path(artifacts["a"], str(path)) == report_path(artifacts["a"], "quick")
    with pytest.raises(SchemaError, match="does not exist"):
        report_path(artifacts["a"], "nowhere/quick")
