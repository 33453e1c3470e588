"""docs/pipeline.sh from a checkpoint to its results, and docs/pipeline.yml, which calls it."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from quantkit.artifact import verify
from quantkit.checkpoint import open_checkpoint
from quantkit.ledger import read_ledger
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.schema import parse_yaml

DOCS = Path(__file__).resolve().parent.parent / "docs"

# The command, which also writes down what it was asked.
_COMMAND = """#!/bin/sh
echo "$@" >> commands.txt
exec {python} -m quantkit.cli "$@"
"""


@dataclass
class Pipeline:
    """A folder in which the script runs with `variables`."""

    folder: Path
    variables: dict[str, str]

    def run(self, **changes: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name not in self.variables}
        path = f"{self.folder}{os.pathsep}{os.environ['PATH']}"
        root = os.pathsep.join([str(DOCS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = inherited | self.variables | {"PATH": path, "PYTHONPATH": root} | changes
        return subprocess.run(
            [DOCS / "pipeline.sh"], cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )

    @property
    def commands(self) -> list[str]:
        path = self.folder / "commands.txt"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def pipeline(zoo: Callable[[str], Path], tmp_path: Path) -> Pipeline:
    command = tmp_path / "quantkit"
    command.write_text(_COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    text = tmp_path / "notes.txt"
    text.write_text("The valve opens at 3.5 MPa. " * 12)
    corpus = f"{{text: {text}, windows: 3, length: 40}}"
    (tmp_path / "tiny.yaml").write_text(f"name: tiny\nperplexity: [{corpus}]\nfidelity: {corpus}\n")
    variables = {
        "MODEL": str(zoo("llama")), "RECIPE": "rtn-g64", "SETTINGS": "weights.group_size=32", "SUITE": "tiny.yaml",
        "POLICY": "policy.yaml", "OUTPUT": "out/artifact", "RESULTS": "results", "CHANNEL": "", "LEDGER": "ledger",
        "KEY": "", "CALIB": "", "BUILDER": "https://ci.example/run",
    }  # fmt: skip
    pipeline = Pipeline(tmp_path, variables)
    set_policy(pipeline, bits=8)
    return pipeline


def set_policy(pipeline: Pipeline, bits: float) -> None:
    limit = f"{{metric: manifest.bits_per_weight, max: {bits}}}"
    (pipeline.folder / "policy.yaml").write_text(f"name: tiny\nsuite: tiny.yaml\nlimits: [{limit}]\n")


def test_what_passes_is_promoted_and_its_results_are_all_there(pipeline: Pipeline) -> None:
    done = pipeline.run(CHANNEL="canary")
    assert done.returncode == 0, done.stderr
    artifact, results = pipeline.folder / "out" / "artifact", pipeline.folder / "results"
    manifest = read_manifest(artifact)
    assert verify(artifact) == []
    assert {layer.scheme.group_size for layer in manifest.layers} == {32}
    assert sorted(path.name for path in results.iterdir()) == [
        "README.md", "bom.cdx.json", "gate.xml", "manifest.json", "provenance.json", "report.html",
    ]  # fmt: skip
    suite = ElementTree.parse(results / "gate.xml").getroot()  # noqa: S314 - our own
    assert suite.get("failures") == "0"
    assert manifest.identity in (results / "gate.xml").read_text()
    assert manifest.identity in (results / "report.html").read_text()
    assert "Suite tiny." in (results / "README.md").read_text()
    provenance = json.loads((results / "provenance.json").read_bytes())["predicate"]
    assert provenance["runDetails"]["builder"]["id"] == "https://ci.example/run"
    assert [entry["name"] for entry in provenance["runDetails"]["byproducts"]] == ["evals/tiny.json"]
    assert pipeline.commands[-1] == "promote out/artifact --channel canary --policy policy.yaml --ledger ledger"
    (entry,) = read_ledger(pipeline.folder / "ledger").entries
    assert (entry.channel, entry.release.identity) == ("canary", manifest.identity)
    assert entry.release.policy == "tiny"
    assert not any(command.startswith("sign") for command in pipeline.commands)


def test_what_is_promoted_is_judged_by_the_policy_that_was_named_and_an_interrupted_conversion_goes_on(
    pipeline: Pipeline,
) -> None:
    # Each command succeeds and does nothing but to leave what the script itself copies: only its words count here.
    (pipeline.folder / "quantkit").write_text(
        '#!/bin/sh\necho "$@" >> commands.txt\nmkdir -p out/artifact; cd out/artifact; touch manifest.json README.md\n'
    )
    done = pipeline.run(CHANNEL="canary", POLICY="own.yaml")
    assert done.returncode == 0, done.stderr
    by_name = {command.split()[0]: command.split() for command in pipeline.commands}
    assert "--resume" in by_name["convert"]
    for name in ("gate", "report", "promote"):
        assert by_name[name][by_name[name].index("--policy") + 1] == "own.yaml"


def test_what_fails_leaves_its_results_and_is_neither_signed_nor_promoted(pipeline: Pipeline) -> None:
    set_policy(pipeline, bits=2)
    done = pipeline.run(CHANNEL="canary", KEY="key.pem")
    assert done.returncode == 1, done.stderr
    suite = ElementTree.parse(pipeline.folder / "results" / "gate.xml").getroot()  # noqa: S314 - our own
    assert suite.get("failures") == "1"
    assert "✗ Fail" in (pipeline.folder / "results" / "report.html").read_text()
    assert not any(command.split()[0] in {"sign", "promote"} for command in pipeline.commands)


def test_an_artifact_that_is_there_is_not_converted_again_and_a_changed_one_stops(pipeline: Pipeline) -> None:
    plan = make_plan(open_checkpoint(pipeline.variables["MODEL"]), load_recipe("rtn-g64"))
    artifact = convert(plan, pipeline.folder / "out" / "artifact").path
    (artifact / "config.json").write_text("{}")
    done = pipeline.run(CHANNEL="canary")
    assert (done.returncode, pipeline.commands) == (1, ["verify out/artifact"])
    assert "changed: config.json" in done.stdout


@pytest.mark.parametrize(
    ("changes", "words", "commands"),
    [
        ({"MODEL": ""}, "MODEL is not set", 0),
        ({"MODEL": "./nothing"}, "./nothing does not exist", 1),
        ({"RECIPE": "no-recipe"}, "no-recipe", 1),
    ],
)
def test_bad_input_is_exit_code_2_and_says_what(
    pipeline: Pipeline, changes: dict[str, str], words: str, commands: int
) -> None:
    done = pipeline.run(**changes)
    assert (done.returncode, len(pipeline.commands)) == (2, commands)
    assert words in done.stderr


def test_the_workflow_calls_the_script_and_hands_it_only_what_it_reads() -> None:
    workflow = parse_yaml((DOCS / "pipeline.yml").read_text(), "pipeline.yml")
    job = workflow["jobs"]["quantise"]
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert [run for run in steps if run.strip() == "docs/pipeline.sh"] == ["docs/pipeline.sh"]
    read = set(re.findall(r"\$\{?([A-Z]+)", (DOCS / "pipeline.sh").read_text()))
    assert set(job["env"]) - {"QUANTKIT_CACHE"} <= read
    for run in steps:
        assert "${{" not in run, "an input must not become text of a command"
        subprocess.run(["bash", "-n", "-c", run], check=True)


def test_the_head_of_the_script_names_every_variable_and_no_other() -> None:
    head, body = (DOCS / "pipeline.sh").read_text().split("set -euo pipefail")
    named = set(re.findall(r"^# ([A-Z]+)  ", head, re.MULTILINE))
    assert set(re.findall(r"\$\{?([A-Z]+)", body)) == named
