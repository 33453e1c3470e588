"""The JSON Schemas in manifests/ are the ones that the code generates, and real documents validate against them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.data import data_dir, shipped_names
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.suite import Suite
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import write_report
from quantkit.schema import read_yaml
from quantkit.schemas import DOCUMENTS, schema_text

FOLDERS = {
    "recipe": "recipes",
    "suite": "evals/suites",
    "policy": "evals/policies",
    "prompts": "evals/prompts",
    "text": "evals/texts",
}


@pytest.fixture(scope="module")
def made(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with kept experts, and its report."""
    root = tmp_path_factory.mktemp("schemas")
    (root / "notes.txt").write_text("The valve opens at 3.5 MPa. " * 8)
    convert(make_plan(open_checkpoint(str(zoo("mixtral"))), load_recipe("rtn-g64-zp")), root / "artifact")
    corpus = {"text": str(root / "notes.txt"), "windows": 2, "length": 40}
    report = evaluate(str(root / "artifact"), Suite(name="tiny", perplexity=[corpus], fidelity=corpus))
    write_report(report, root / "artifact" / "evals" / "tiny.json")
    return root / "artifact"


def check(kind: str, value: Any) -> None:
    """Validate against the model and the *shipped* schema."""
    DOCUMENTS[kind].model_validate_json(json.dumps(value))
    schema = json.loads((data_dir("manifests") / f"{kind}.schema.json").read_bytes())
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_shipped_schema_is_what_the_code_generates(kind: str) -> None:
    shipped = (data_dir("manifests") / f"{kind}.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(DOCUMENTS[kind]), "run make schemas"


def test_no_schema_is_shipped_that_the_code_does_not_know() -> None:
    shipped = {path.name.removesuffix(".schema.json") for path in data_dir("manifests").glob("*.schema.json")}
    assert shipped == set(DOCUMENTS)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_schemas_forbid_unknown_keys_at_every_level(kind: str) -> None:
    schema = json.loads(schema_text(DOCUMENTS[kind]))
    objects = [schema, *schema.get("$defs", {}).values()]
    assert all(part.get("additionalProperties") is False for part in objects if "properties" in part)


def test_a_real_manifest_and_report_validate(made: Path) -> None:
    check("manifest", json.loads((made / "manifest.json").read_bytes()))
    check("report", json.loads((made / "evals" / "tiny.json").read_bytes()))


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_shipped_document_validates(kind: str) -> None:
    names = shipped_names(FOLDERS[kind])
    assert names
    for name in names:
        check(kind, read_yaml(data_dir(FOLDERS[kind]) / f"{name}.yaml"))
