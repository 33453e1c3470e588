"""Figures in the model card: every report of these bytes, with its intervals, and nobody's text lost."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.artifact import verify
from quantkit.card import NOT_MEASURED, QUALITY_END, QUALITY_START
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError
from quantkit.grids import Grid
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import write_report
from quantkit.scorecard import markdown_table, update_card
from tests.samples import HOSTILE, sample_metrics, sample_report


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return convert(plan, tmp_path_factory.mktemp("scorecard") / "artifact").path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    """An artifact with a report of suite quick."""
    path = Path(shutil.copytree(pristine, tmp_path / "artifact"))
    write_report(sample_report(read_manifest(path)), path / "evals" / "quick.json")
    return path


def card(artifact: Path) -> str:
    return (artifact / "README.md").read_text(encoding="utf-8")


def test_every_figure_stands_in_the_card_with_its_interval(artifact: Path) -> None:
    assert update_card(artifact) is None
    text = card(artifact)
    for row in (
        "| wiki-en | 20.80 | 19.80 – 21.80 | 20.00 | 1.0400 | 1.0200 – 1.0600 | 12,264 |",
        "| agreement of the most likely token | 0.900 | 0.880 – 0.920 |",
        "| quantkit\\_copy | exact | 300 | 0.6100 | 0.5900 – 0.6300 | 0.7000 | 0.0900 | 0.0700 – 0.1100 | 31 | 4 |",
    ):
        assert row in text
    assert "evals/quick.json" in text
    assert NOT_MEASURED not in text
    assert verify(artifact) == []


def test_a_second_suite_gets_a_section_of_its_own_and_a_new_run_replaces_the_old(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    update_card(artifact)
    suite = sample_report(manifest).suite.model_copy(update={"name": "standard"})
    write_report(sample_report(manifest, suite=suite), artifact / "evals" / "standard.json")
    write_report(sample_report(manifest, metrics=sample_metrics(1.5)), artifact / "evals" / "quick.json")
    update_card(artifact)
    text = card(artifact)
    assert text.count("Suite quick.") == text.count("Suite standard.") == 1
    assert "| wiki-en | 30.00 |" in text
    assert text.count(QUALITY_START) == text.count(QUALITY_END) == 1


def test_what_a_person_wrote_stays(artifact: Path) -> None:
    edited = card(artifact).replace("base_model: llama", "base_model: org/llama") + "\n## Mine\n\ntext é\n"
    (artifact / "README.md").write_bytes(edited.encode() + b"\xff")
    update_card(artifact)
    data = (artifact / "README.md").read_bytes()
    assert b"base_model: org/llama" in data
    assert data.endswith("\n## Mine\n\ntext é\n".encode() + b"\xff")
    assert b"| wiki-en |" in data


def test_a_card_without_markers_is_left_alone_and_said_so(artifact: Path) -> None:
    (artifact / "README.md").write_text("# all mine\n")
    assert "has no place for figures" in str(update_card(artifact))
    assert card(artifact) == "# all mine\n"


def test_a_missing_card_is_made(artifact: Path) -> None:
    whole = card(artifact)
    (artifact / "README.md").unlink()
    assert update_card(artifact) is None
    made = card(artifact)
    assert made.partition(QUALITY_START)[0] == whole.partition(QUALITY_START)[0]
    assert "| wiki-en |" in made


def test_a_link_in_the_place_of_the_card_is_not_followed(artifact: Path, tmp_path: Path) -> None:
    (artifact / "README.md").unlink()
    target = tmp_path / "elsewhere"
    target.write_text(f"{QUALITY_START}{QUALITY_END}")
    (artifact / "README.md").symlink_to(target)
    assert "no card of quantkit" in str(update_card(artifact))
    assert target.read_text() == f"{QUALITY_START}{QUALITY_END}"


def test_a_readme_that_the_identity_covers_is_never_touched(artifact: Path) -> None:
    """Artifacts of earlier versions hold the source's README there."""
    values = json.loads((artifact / "manifest.json").read_bytes())
    values["components"]["other"].append({"name": "README.md", "sha256": "0" * 64, "size": 1})
    (artifact / "manifest.json").write_text(
        json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n"
    )
    before = card(artifact)
    assert "part of the identity" in str(update_card(artifact))
    assert card(artifact) == before


def test_reports_of_other_bytes_and_short_runs_give_no_figures(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    write_report(sample_report(manifest, identity="0" * 64), artifact / "evals" / "quick.json")
    suite = sample_report(manifest).suite.model_copy(update={"limit": 1})
    write_report(sample_report(manifest, suite=suite), artifact / "evals" / "quick-limit1.json")
    update_card(artifact)
    assert NOT_MEASURED in card(artifact)


def test_hostile_names_in_a_report_stay_text(artifact: Path) -> None:
    metrics = {"perplexity": {f"{HOSTILE} {QUALITY_END} |": sample_metrics()["perplexity"]["wiki-en"]}}
    write_report(sample_report(read_manifest(artifact), metrics=metrics), artifact / "evals" / "quick.json")
    update_card(artifact)
    update_card(artifact)
    text = card(artifact)
    assert re.search(r"(?<!\\)<script", text) is None
    assert "\\<script" in text
    assert text.count(QUALITY_END) == 1
    assert text.count("## Load") == 1


def test_a_card_that_cannot_be_written_is_one_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quantkit.scorecard.replace_file", full)
    with pytest.raises(ArtifactError, match="the disk is full"):
        update_card(artifact)


def test_numbers_align_right_and_words_left() -> None:
    table = markdown_table(Grid(["a|b", "n"], [["x", "1"]]))
    assert table == "| a\\|b | n |\n| :-- | --: |\n| x | 1 |"
