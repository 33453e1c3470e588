"""verify by component: a changed file names what it may have moved, and changed reports are no secret."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.manifest import read_manifest
from quantkit.pages import write_page
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.verification import verify_components
from tests.samples import with_report


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verification")
    convert(make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64")), root / "bare")
    path = with_report(root / "bare", root / "artifact")
    write_page("<!doctype html>\n<p>0.04</p>\n", path / "evals" / "quick.html")
    return path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pristine, tmp_path / "artifact")


def changed(artifact: Path) -> set[str]:
    return {name for name, state in verify_components(artifact).components.items() if state.changed}


def edit(path: Path, change: Callable[[dict[str, Any]], Any], indent: int | None = 2) -> None:
    values = json.loads(path.read_bytes())
    change(values)
    path.write_text(json.dumps(values, indent=indent))


def test_an_untouched_artifact_has_every_component_as_recorded(artifact: Path) -> None:
    found = verify_components(artifact)
    assert found.problems == []
    assert changed(artifact) == set()
    assert found.identity == read_manifest(artifact).identity
    assert found.reports == {"evals/quick.html": None, "evals/quick.json": None}
    sizes = sum(state.size for state in found.components.values())
    assert sizes == sum(record.size for record in read_manifest(artifact).files.values())


@pytest.mark.parametrize(
    ("name", "change", "components"),
    [
        ("config.json", lambda v: v.update(rms_norm_eps=1.0), {"config"}),
        ("config.json", lambda v: v["quantization_config"].update(ignore=[]), {"scheme"}),
        ("config.json", lambda v: v.clear(), {"config", "scheme"}),
        ("config.json", lambda _: None, {"config"}),
        ("tokenizer_config.json", lambda v: v.update(model_max_length=7), {"tokenizer"}),
        ("tokenizer_config.json", lambda v: v.update(chat_template="a"), {"tokenizer"}),
        ("generation_config.json", lambda v: v.update(temperature=9.0), {"generation"}),
    ],
)
def test_an_edited_value_names_the_component_that_it_belongs_to(
    name: str, change: Callable[[dict[str, Any]], Any], components: set[str], artifact: Path
) -> None:
    edit(artifact / name, change, indent=5)
    assert changed(artifact) == components
    assert [line for line in verify_components(artifact).problems if line.startswith(f"changed: {name}")]


def test_an_edited_template_may_also_move_the_system_prompt(artifact: Path) -> None:
    path = artifact / "chat_template.jinja"
    path.write_text("A" + path.read_text())
    assert changed(artifact) == {"chat_template", "system_prompt"}
    path.unlink()
    assert changed(artifact) == {"chat_template", "system_prompt"}


def test_a_missing_weight_file_is_the_weights(artifact: Path) -> None:
    (artifact / "model.safetensors").unlink()
    assert changed(artifact) == {"weights"}
    assert verify_components(artifact).problems == ["missing: model.safetensors (weights)"]


def test_a_changed_figure_in_a_report_or_on_a_page_is_a_problem(artifact: Path) -> None:
    for name, action in (("quick.json", "run quantkit eval again"), ("quick.html", "write it again with quantkit")):
        path = artifact / "evals" / name
        path.write_text(path.read_text().replace("0.04", "0.01"))
        found = verify_components(artifact)
        (problem,) = [line for line in found.problems if name in line]
        assert problem.startswith(f"changed: evals/{name} (")
        assert action in problem
        assert found.reports[f"evals/{name}"] is not None
    assert changed(artifact) == set()


def test_what_is_no_report_is_named_and_what_may_not_stand_there_is_extra(artifact: Path) -> None:
    (artifact / "evals" / "notes.json").write_text("{}")
    (artifact / "evals" / "run.sh").write_text("")
    found = verify_components(artifact)
    assert [line.partition(" (")[0] for line in found.problems] == ["extra: evals/run.sh", "changed: evals/notes.json"]
    assert "evals/run.sh" not in found.reports


def test_values_hold_everything_for_json(artifact: Path) -> None:
    values = verify_components(artifact).values()
    json.dumps(values)
    assert values["verified"] is True
    assert values["components"]["weights"] == {
        "sha256": read_manifest(artifact).component_sha256["weights"], "files": 1, "changed": False,
        "size": (artifact / "model.safetensors").stat().st_size,
    }  # fmt: skip
