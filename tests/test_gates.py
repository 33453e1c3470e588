"""The gate: exit codes that a pipeline can stop on, margins with the right sign, and nothing judged that cannot be."""

import json
import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit import cli
from quantkit.artifact import verify
from quantkit.canonical import sha256_bytes, sha256_file, sha256_json
from quantkit.checkpoint import open_checkpoint
from quantkit.data import shipped_names
from quantkit.errors import ArtifactError, ReportError, SchemaError, printable
from quantkit.evaluate.protocol import protocol_hash
from quantkit.evaluate.suite import load_suite
from quantkit.gates import Policy, gate, load_policy, write_junit
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import REPORT_VERSION, Report, write_report
from tests.samples import sample_protocol

METRICS = {
    "perplexity": {
        "wiki-en": {"ratio": {"value": 1.04, "low": 1.02, "high": 1.06}},
        "/data/notes.v1.txt": {"ratio": {"value": 1.5}},
    },
    "fidelity": {
        "kl_mean": {"value": 0.04, "low": 0.03, "high": 0.05},
        "top1": {"value": 0.9, "low": 0.8, "high": 0.95},
    },
}
PROTOCOL = sample_protocol(load_suite("quick"))


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return convert(plan, tmp_path_factory.mktemp("gates") / "artifact").path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    """An artifact with a report of suite `quick` inside."""
    path = shutil.copytree(pristine, tmp_path / "artifact")
    write(path / "evals" / "quick.json", report_values(path))
    return path


def report_values(artifact: Path, **changes: Any) -> dict[str, Any]:
    identity = read_manifest(artifact).identity
    values = {
        "schema_version": REPORT_VERSION,
        "identity": identity,
        "subject": {"kind": "artifact", "name": "artifact", "identity": identity},
        "reference": None,
        "suite": {"name": "quick", "sha256": load_suite("quick").sha256, "limit": None},
        "protocol": protocol_hash(PROTOCOL),
        "protocol_record": PROTOCOL,
        "metrics": METRICS,
        "notes": [],
        "run": {},
    }
    return values | changes


def write(path: Path, values: Any) -> Path:
    """Write a report as quantkit does, whatever it claims."""
    write_report(Report.model_validate_json(json.dumps(values)), path)
    return path


def policy(*limits: dict[str, Any], **changes: Any) -> Policy:
    return Policy(**{"name": "mine", "limits": list(limits)} | changes)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


def last_row(artifact: Path, **limit: Any) -> tuple[str, str, str, str, str]:
    row = gate(artifact, policy(limit)).rows[-1]
    return row.check, row.limit, row.value, row.margin, row.outcome


# Judging


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"metric": "fidelity.kl_mean", "max": 0.05}, ("fidelity.kl_mean", "<= 0.05", "0.04", "+0.01", "pass")),
        ({"metric": "fidelity.kl_mean", "max": 0.03}, ("fidelity.kl_mean", "<= 0.03", "0.04", "-0.01", "fail")),
        ({"metric": "fidelity.top1", "min": 0.5}, ("fidelity.top1", ">= 0.5", "0.9", "+0.4", "pass")),
        ({"metric": "fidelity.top1", "min": 0.95}, ("fidelity.top1", ">= 0.95", "0.9", "-0.05", "fail")),
        ({"metric": "fidelity.top1", "min": 0.9}, ("fidelity.top1", ">= 0.9", "0.9", "+0", "pass")),
    ],
)
def test_a_limit_is_judged_with_its_margin(limit: dict[str, Any], expected: tuple[str, ...], artifact: Path) -> None:
    assert last_row(artifact, **limit) == expected


def test_upper_compares_the_pessimistic_end(artifact: Path) -> None:
    ratio = "perplexity.wiki-en.ratio"
    assert last_row(artifact, metric=ratio, max=1.05)[4] == "pass"
    assert last_row(artifact, metric=ratio, max=1.05, upper=True) == (
        f"{ratio} (high end)", "<= 1.05", "1.06", "-0.01", "fail",
    )  # fmt: skip
    assert last_row(artifact, metric="fidelity.top1", min=0.85)[4] == "pass"
    assert last_row(artifact, metric="fidelity.top1", min=0.85, upper=True) == (
        "fidelity.top1 (low end)", ">= 0.85", "0.8", "-0.05", "fail",
    )  # fmt: skip


def test_one_end_can_be_bounded_by_its_own_path(artifact: Path) -> None:
    assert last_row(artifact, metric="perplexity.wiki-en.ratio.low", max=1.02)[2:] == ("1.02", "+0", "pass")


def test_a_metric_whose_text_name_holds_dots_and_slashes_is_found(artifact: Path) -> None:
    assert last_row(artifact, metric="perplexity./data/notes.v1.txt.ratio", max=2)[2] == "1.5"


def test_manifest_numbers_can_be_bounded(artifact: Path) -> None:
    totals = read_manifest(artifact).totals
    assert last_row(artifact, metric="manifest.fallbacks", max=0)[2:] == ("0", "+0", "pass")
    assert last_row(artifact, metric="manifest.bits_per_weight", max=4)[4] == "fail"
    assert last_row(artifact, metric="manifest.bits_per_weight", max=4.6)[2] == f"{totals.bits_per_weight:.6g}"
    assert last_row(artifact, metric="manifest.weight_bytes", max=10)[4] == "fail"


def test_the_number_of_corpora_is_a_requirement(artifact: Path) -> None:
    limit = {"metric": "fidelity.kl_mean", "max": 1}
    outcomes = {
        needed: gate(artifact, policy(limit, require={"corpora_at_least": needed})).passed for needed in (1, 2, 3)
    }
    assert outcomes == {1: True, 2: True, 3: False}


def test_one_failed_row_fails_the_verdict(artifact: Path) -> None:
    good, bad = {"metric": "fidelity.kl_mean", "max": 1}, {"metric": "fidelity.kl_mean", "max": 0}
    assert gate(artifact, policy(good, good)).passed
    assert not gate(artifact, policy(good, bad)).passed


def test_a_changed_byte_fails_the_gate(artifact: Path) -> None:
    (artifact / "LICENSE").write_text("another")
    verdict = gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))
    assert not verdict.passed
    assert verdict.rows[0].value == "changed: LICENSE (other)"


# What cannot be judged


def test_a_report_of_another_artifact_is_refused(artifact: Path, tmp_path: Path) -> None:
    foreign = write(tmp_path / "foreign.json", report_values(artifact, identity="0" * 64))
    with pytest.raises(ReportError, match="is the report of 000000000000"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}), foreign)


def test_a_limited_report_is_refused(artifact: Path, tmp_path: Path) -> None:
    suite = {"name": "quick", "sha256": load_suite("quick").sha256, "limit": 3}
    limited = write(tmp_path / "limited.json", report_values(artifact, suite=suite))
    with pytest.raises(ReportError, match="cut short by --limit 3"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}), limited)


def test_a_missing_report_names_the_command(pristine: Path) -> None:
    with pytest.raises(ReportError, match=r"quick\.json does not exist; run quantkit eval"):
        gate(pristine, policy({"metric": "fidelity.kl_mean", "max": 1}))


def test_the_report_of_the_policys_suite_is_taken(artifact: Path) -> None:
    suite = artifact.parent / "long.yaml"
    suite.write_text("name: long\nperplexity: [{text: wiki-en, windows: 9, length: 64}]\n")
    record = {"name": "long", "sha256": load_suite(str(suite)).sha256, "limit": None}
    protocol = sample_protocol(load_suite(str(suite)))
    changes = {"suite": record, "protocol": protocol_hash(protocol), "protocol_record": protocol}
    write(artifact / "evals" / "long.json", report_values(artifact, **changes))
    (artifact / "evals" / "quick.json").unlink()
    assert gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}, suite=str(suite))).passed


def test_a_report_of_another_suite_of_that_name_is_refused(artifact: Path, tmp_path: Path) -> None:
    other = {"name": "quick", "sha256": "b" * 64, "limit": None}
    path = write(tmp_path / "other.json", report_values(artifact, suite=other))
    with pytest.raises(ReportError, match="another suite than quick"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}), path)


def test_a_report_against_another_reference_than_the_source_is_refused(artifact: Path, tmp_path: Path) -> None:
    itself = {"kind": "artifact", "name": "itself", "identity": read_manifest(artifact).identity}
    path = write(tmp_path / "self.json", report_values(artifact, reference=itself))
    with pytest.raises(ReportError, match="compares with itself, which is not the source"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}), path)
    source = {"kind": "checkpoint", "name": "base", "identity": read_manifest(artifact).source_identity}
    path = write(tmp_path / "source.json", report_values(artifact, reference=source))
    assert gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}), path).passed


@pytest.mark.parametrize("perplexity", [5, None, {"wiki-en": {"ratio": {"value": True, "high": "x"}}}])
def test_malformed_metrics_are_no_metrics(perplexity: Any, artifact: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "bad.json", report_values(artifact, metrics={"perplexity": perplexity}))
    with pytest.raises(ReportError, match="has no metric"):
        gate(artifact, policy({"metric": "perplexity.wiki-en.ratio", "max": 2, "upper": True}), path)


@pytest.mark.parametrize(
    "limit",
    [
        {"metric": "fidelity.kl_median", "max": 1},
        {"metric": "perplexity.wiki-en", "max": 1},
        {"metric": "manifest.nothing", "max": 1},
        {"metric": "perplexity./data/notes.v1.txt.ratio", "max": 2, "upper": True},
    ],
)
def test_a_metric_or_interval_that_is_not_there_is_an_error_naming_it(limit: dict[str, Any], artifact: Path) -> None:
    with pytest.raises(ReportError) as caught:
        gate(artifact, policy(limit))
    assert limit["metric"] in caught.value.problem


@pytest.mark.parametrize("value", ["NaN", "Infinity"])
def test_a_metric_that_is_not_a_finite_number_never_passes(value: str, artifact: Path) -> None:
    path = artifact / "evals" / "quick.json"
    path.write_text(path.read_text().replace("0.04", value))
    with pytest.raises(ReportError, match=r"quick\.json"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))


def test_a_figure_that_was_edited_is_refused(artifact: Path) -> None:
    path = artifact / "evals" / "quick.json"
    path.write_text(path.read_text().replace("0.04", "0.01"))
    with pytest.raises(ReportError, match=r"quick\.json was changed after it was written; run quantkit eval again"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))


def test_a_report_of_an_older_quantkit_is_refused_with_the_next_action(artifact: Path) -> None:
    path = artifact / "evals" / "quick.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 1}))
    with pytest.raises(ReportError, match=r"is of schema_version 1, this quantkit reads 2; run quantkit eval"):
        gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))


def test_a_policy_may_pin_the_protocol(artifact: Path) -> None:
    limit = {"metric": "fidelity.kl_mean", "max": 1}
    assert gate(artifact, policy(limit, require={"protocol": protocol_hash(PROTOCOL)})).passed
    with pytest.raises(ReportError, match=r"measured by protocol .*, the policy requires bbbbbbbbbbbb"):
        gate(artifact, policy(limit, require={"protocol": "b" * 64}))


def test_a_policy_without_a_protocol_has_the_hash_that_it_had_before_there_was_one() -> None:
    known = {"name": "mine", "description": "", "suite": "quick", "limits": [
        {"metric": "a", "max": 1.0, "min": None, "upper": False}
    ], "require": {"verified": True, "identity_matches_report": True, "corpora_at_least": 1}}  # fmt: skip
    mine = policy({"metric": "a", "max": 1.0})
    assert mine.sha256 == sha256_json(known)
    assert mine.sha256 == sha256_bytes(mine.data)
    assert mine.sha256 != policy({"metric": "a", "max": 1.0}, require={"protocol": "b" * 64}).sha256


def test_the_verdict_names_the_file_that_it_judged(artifact: Path) -> None:
    verdict = gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))
    assert verdict.values()["report_sha256"] == sha256_file(artifact / "evals" / "quick.json")


def test_a_checkpoint_without_manifest_is_refused(zoo: Callable[[str], Path]) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        gate(zoo("llama"), policy({"metric": "fidelity.kl_mean", "max": 1}))


# Policies


@pytest.mark.parametrize("name", shipped_names("evals/policies"))
def test_every_shipped_policy_loads_and_bounds_what_its_suite_measures(name: str) -> None:
    loaded = load_policy(name)
    texts = {corpus.text for corpus in load_suite(loaded.suite).perplexity}
    assert loaded.name == name
    assert loaded.require.corpora_at_least >= 2
    bounded = [limit.metric.split(".") for limit in loaded.limits]
    assert {part[1] for part in bounded if part[0] == "perplexity"} <= texts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"limits": [{"metric": "a", "maxx": 1}]}, r"unknown key 'limits\.0\.maxx'.*did you mean 'max'"),
        ({"limits": [{"metric": "a", "max": 1}], "requires": {}}, r"unknown key 'requires'.*did you mean 'require'"),
        ({"limits": [{"metric": "a"}]}, "exactly one of max and min"),
        ({"limits": [{"metric": "a", "max": 1, "min": 0}]}, "exactly one of max and min"),
        ({"limits": [{"metric": "a", "max": "1"}]}, "number"),
        ({"limits": [{"metric": "a", "max": float("inf")}]}, "finite"),
        ({"limits": []}, "at least 1"),
        ({"limits": [{"metric": "a", "max": 1}], "require": {"verified": False}}, "verified"),
    ],
)
def test_a_policy_that_makes_no_sense_is_one_line_naming_the_key(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine"} | values))
    with pytest.raises(SchemaError, match=message) as caught:
        load_policy(str(path))
    assert "mine.yaml" in caught.value.problem


# The command


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    folder = tmp_path / "policies"
    folder.mkdir()
    for name, bound in (("loose", 1.0), ("tight", 0.01)):
        limits = [{"metric": "fidelity.kl_mean", "max": bound}, {"metric": "fidelity.top1", "min": 0.5}]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, "limits": limits}))
    (folder / "unknown.yaml").write_text(
        yaml.safe_dump({"name": "unknown", "limits": [{"metric": "fidelity.nothing", "max": 1}]})
    )
    return folder


@pytest.mark.parametrize(("name", "code"), [("loose", 0), ("tight", 1)])
def test_the_command_shows_every_limit_and_its_exit_code_is_the_verdict(
    name: str, code: int, artifact: Path, policies: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(monkeypatch, "gate", artifact, "--policy", policies / f"{name}.yaml") == code
    captured = capsys.readouterr()
    for shown in ("fidelity.kl_mean", "fidelity.top1", "artifact verified", "0.04", "margin"):
        assert shown in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(("name", "code"), [("loose", 0), ("tight", 1)])
def test_the_command_prints_one_json_object(
    name: str, code: int, artifact: Path, policies: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert run(monkeypatch, "gate", artifact, "--policy", policies / f"{name}.yaml", "--json") == code
    values = json.loads(capsys.readouterr().out)
    assert values["identity"] == read_manifest(artifact).identity
    assert values["verdict"] == ("fail" if code else "pass")
    outcomes = {row["check"]: row["outcome"] for row in values["checks"]}
    assert outcomes["fidelity.kl_mean"] == values["verdict"]
    assert outcomes["fidelity.top1"] == "pass"


def test_what_cannot_be_judged_is_exit_code_2_and_one_line(
    artifact: Path, policies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts = [
        ("gate", artifact, "--policy", policies / "unknown.yaml"),
        ("gate", artifact, "--policy", policies / "loose.yaml", "--report", artifact / "nothing.json"),
        ("gate", artifact / "nothing", "--policy", policies / "loose.yaml"),
        ("gate", artifact, "--policy", "no-such-policy"),
        ("gate", artifact),
    ]
    for attempt in attempts:
        assert run(monkeypatch, *attempt) == 2, attempt
        captured = capsys.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert captured.err.startswith("quantkit: ")


def test_junit_counts_cases_and_failures_and_names_the_identity(
    artifact: Path, policies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "gate.xml"
    assert run(monkeypatch, "gate", artifact, "--policy", policies / "tight.yaml", "--junit", path) == 1
    suite = ElementTree.parse(path).getroot()  # noqa: S314 - written a line above
    assert suite.tag == "testsuite"
    cases = suite.findall("testcase")
    assert suite.attrib["tests"] == str(len(cases)) == "4"
    assert suite.attrib["failures"] == str(len(suite.findall("testcase/failure"))) == "1"
    assert suite.attrib["errors"] == "0"
    failed = [case.attrib["name"] for case in cases if case.find("failure") is not None]
    assert failed == ["fidelity.kl_mean"]
    assert suite.find("properties/property[@name='identity']").attrib["value"] == read_manifest(artifact).identity


@pytest.mark.parametrize("name", ["a\x01<b>.txt", os.fsdecode(b"b\xff.txt")])
def test_junit_is_well_formed_whatever_a_file_is_called(name: str, artifact: Path, tmp_path: Path) -> None:
    (artifact / name).touch()
    write_junit(gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1})), tmp_path / "gate.xml")
    failure = ElementTree.parse(tmp_path / "gate.xml").find("testcase/failure")  # noqa: S314 - written a line above
    assert failure is not None
    assert f"extra: {printable(name)}" in failure.attrib["message"]


def test_a_junit_file_inside_an_artifact_is_refused_and_the_artifact_still_verifies(artifact: Path) -> None:
    verdict = gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))
    with pytest.raises(ReportError, match="would not verify with it; choose another --junit"):
        write_junit(verdict, artifact / "gate.xml")
    assert verify(artifact) == []


def test_a_junit_file_that_cannot_be_written_is_one_error(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    verdict = gate(artifact, policy({"metric": "fidelity.kl_mean", "max": 1}))
    with pytest.raises(ReportError, match="cannot be written"):
        write_junit(verdict, tmp_path / "file" / "gate.xml")
