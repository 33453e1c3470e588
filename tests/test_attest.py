"""Statements: their shape by the schemas of their makers, and that they say what stands in the artifact."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.attest import FORMATS, attest, write_statement
from quantkit.canonical import sha256_file
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError, ReportError, UsageError
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import write_report
from tests.samples import HOSTILE, sample_metrics, sample_report

CARD = "---\nlicense: apache-2.0\n---\n# Tiny\n"


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(shutil.copytree(zoo("llama"), tmp_path_factory.mktemp("source") / "tiny"))
    (source / "README.md").write_text(CARD)
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64"))
    path = convert(plan, tmp_path_factory.mktemp("attest") / "artifact").path
    write_report(sample_report(read_manifest(path)), path / "evals" / "quick.json")
    return path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    """An artifact with a report, that a test may change."""
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def test_the_subjects_are_the_files_by_their_real_hashes(artifact: Path) -> None:
    statement = attest(artifact, "slsa")
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {name: sha256_file(artifact / name) for name in subjects}
    assert set(subjects) == {"manifest.json", *read_manifest(artifact).files}
    assert subjects["manifest.json"] == read_manifest(artifact).identity


def test_provenance_has_the_shape_of_its_specification(artifact: Path) -> None:
    """Parsed by the project's own protobuf definitions, which refuse unknown and mistyped fields."""
    provenance_pb2 = pytest.importorskip("in_toto_attestation.predicates.provenance.v1.provenance_pb2")
    statement_pb2 = pytest.importorskip("in_toto_attestation.v1.statement_pb2")
    from google.protobuf.json_format import ParseDict, ParseError

    statement = attest(artifact, "slsa", builder="https://ci.example/builder@v1")
    whole = ParseDict(statement, statement_pb2.Statement())
    assert (whole.type, whole.predicate_type) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    predicate = ParseDict(statement["predicate"], provenance_pb2.Provenance())
    assert predicate.run_details.builder.id == "https://ci.example/builder@v1"
    assert predicate.run_details.metadata.finished_on.seconds >= predicate.run_details.metadata.started_on.seconds > 0
    assert predicate.build_definition.build_type == "pkg:pypi/quantkit#convert/v1"
    assert predicate.build_definition.external_parameters["recipe"]["name"] == "rtn-g64"
    with pytest.raises(ParseError):  # a field that the specification does not know would have been seen
        ParseDict({**statement["predicate"], "other": 1}, provenance_pb2.Provenance())


def test_dependencies_are_source_files_and_packages(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    found = attest(artifact, "slsa")["predicate"]["buildDefinition"]["resolvedDependencies"]
    by_name = {entry["name"]: entry["digest"]["sha256"] for entry in found if "name" in entry}
    assert by_name == {f"tiny/{record.name}": record.sha256 for record in manifest.source.files}
    assert {entry["uri"] for entry in found if "uri" in entry} == {
        f"pkg:pypi/{name}@{version}" for name, version in manifest.versions.items()
    }


def test_a_hub_source_and_its_calibration_texts_are_named(artifact: Path) -> None:
    from quantkit.attest import _dependencies

    manifest = read_manifest(artifact)
    source = manifest.source.model_copy(update={"name": "org/tiny", "revision": "abc123"})
    calibration = {"parts": [{"text": "notes", "text_sha256": "d" * 64}, {"text": "no hash"}, 7]}
    found = _dependencies(manifest.model_copy(update={"source": source, "calibration": calibration}))
    assert found[0]["uri"] == "pkg:huggingface/org/tiny@abc123"
    assert {"name": "calibration/notes", "digest": {"sha256": "d" * 64}} in found


def test_only_reports_of_these_bytes_are_byproducts(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    write_report(sample_report(manifest, identity="0" * 64), artifact / "evals" / "other.json")
    suite = sample_report(manifest).suite.model_copy(update={"limit": 2})
    write_report(sample_report(manifest, suite=suite), artifact / "evals" / "quick-limit2.json")
    (artifact / "evals" / "broken.json").write_text("{")
    byproducts = attest(artifact, "slsa")["predicate"]["runDetails"]["byproducts"]
    assert [entry["name"] for entry in byproducts] == ["evals/quick.json"]
    assert byproducts[0]["digest"]["sha256"] == sha256_file(artifact / "evals" / "quick.json")


@pytest.mark.parametrize("format", FORMATS)
def test_a_statement_is_the_same_each_time_and_names_no_path_of_the_machine(
    format: str, artifact: Path, pristine: Path
) -> None:
    text = json.dumps(attest(artifact, format))
    assert text == json.dumps(attest(pristine, format))
    assert str(pristine) not in text
    assert str(artifact) not in text
    run = json.loads((artifact / "run.json").read_bytes())
    assert run["source_path"] not in text


def test_without_a_run_record_no_time_is_claimed(artifact: Path) -> None:
    (artifact / "run.json").unlink()
    metadata = attest(artifact, "slsa")["predicate"]["runDetails"]["metadata"]
    assert metadata == {"invocationId": read_manifest(artifact).identity}


def check_cyclonedx(value: Any) -> None:
    validators = pytest.importorskip("cyclonedx.validation.json", reason="needs cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion

    error = validators.JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(value))
    assert error is None, error


def test_the_bom_fits_the_schema_and_holds_every_figure_with_its_interval(artifact: Path) -> None:
    bom = attest(artifact, "cyclonedx")
    check_cyclonedx(bom)
    model = bom["metadata"]["component"]
    assert model["licenses"] == [{"license": {"name": "apache-2.0"}}]
    assert model["modelCard"]["modelParameters"]["modelArchitecture"] == "LlamaForCausalLM"
    figures = {f["type"]: f for f in model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]}
    ratio = figures["perplexity.wiki-en.ratio"]
    assert (ratio["value"], ratio["slice"]) == ("1.04", "quick")
    assert ratio["confidenceInterval"] == {"lowerBound": "1.02", "upperBound": "1.06"}
    assert {"fidelity.kl_mean", "tasks.quantkit_copy.exact.drop"} <= set(figures)
    files = {c["name"]: c["hashes"][0]["content"] for c in bom["components"] if c["type"] == "file"}
    assert files == {name: sha256_file(artifact / name) for name in files}
    references = {c["bom-ref"] for c in bom["components"]}
    assert len(references) == len(bom["components"])
    assert set(bom["dependencies"][0]["dependsOn"]) <= references


def test_a_wrong_bom_would_be_seen(artifact: Path) -> None:
    bom = attest(artifact, "cyclonedx")
    bom["metadata"]["component"]["modelCard"]["other"] = 1
    with pytest.raises(AssertionError):
        check_cyclonedx(bom)


def test_hostile_names_and_metrics_that_are_no_numbers_stay_text(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    metrics = sample_metrics() | {HOSTILE: {"value": "much"}, "wild": {"value": 1e300}}
    report = sample_report(manifest, metrics=metrics)
    write_report(report, artifact / "evals" / "quick.json")
    bom = attest(artifact, "cyclonedx")
    check_cyclonedx(bom)
    types = {f["type"] for f in bom["metadata"]["component"]["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]}
    assert "wild" in types
    assert HOSTILE not in types


def test_a_changed_artifact_is_not_attested(artifact: Path) -> None:
    (artifact / "config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"changed: config\.json"):
        attest(artifact, "slsa")


@pytest.mark.parametrize(
    ("format", "builder", "words"),
    [
        ("spdx", None, "use one of: slsa, cyclonedx"),
        ("slsa", "my machine", "is no URI"),
        ("slsa", "nocolon", "is no URI"),
        ("slsa", "https://a b", "is no URI"),
        ("cyclonedx", "https://ci.example", "not for cyclonedx"),
    ],
)
def test_a_wrong_format_or_builder_is_named(format: str, builder: str | None, words: str, artifact: Path) -> None:
    with pytest.raises(UsageError, match=words):
        attest(artifact, format, builder)


def test_a_statement_that_cannot_be_written_is_one_error(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        write_statement(attest(artifact, "slsa"), tmp_path / "file" / "s.json")


def test_a_statement_is_not_written_into_an_artifact(artifact: Path) -> None:
    with pytest.raises(ReportError, match="would not verify with it; choose another --output"):
        write_statement(attest(artifact, "slsa"), artifact / "provenance.json")
    assert not (artifact / "provenance.json").exists()
