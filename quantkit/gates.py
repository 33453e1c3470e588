"""The gate: a policy's limits against a report and a manifest, for a release pipeline to stop on."""

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quantkit.artifact import REPORTS, verify
from quantkit.canonical import canonical_json, sha256_bytes
from quantkit.errors import ReportError, printable
from quantkit.evaluate.asked import refuse_other_protocol
from quantkit.evaluate.suite import Suite, load_suite
from quantkit.files import replace_file
from quantkit.manifest import Manifest, read_manifest
from quantkit.report import Report, read_report, refuse_harm, refuse_other_bytes, refuse_other_reference
from quantkit.schema import Strict, find_document, read_yaml, validate

Outcome = Literal["pass", "fail"]


class Limit(Strict):
    """One bound. metric: `manifest.<number>` or a path into the report's metrics.

    upper: compare the pessimistic end of the confidence interval, the high end against `max`, the low against `min`.
    """

    metric: str
    max: Annotated[float, Field(allow_inf_nan=False)] | None = None
    min: Annotated[float, Field(allow_inf_nan=False)] | None = None
    upper: bool = False

    @model_validator(mode="after")
    def _one_bound(self) -> "Limit":
        if (self.max is None) == (self.min is None):
            raise ValueError("give exactly one of max and min")
        return self

    @property
    def bound(self) -> float:
        bound = self.max if self.max is not None else self.min
        assert bound is not None
        return bound


class Requirements(Strict):
    """What must hold beside the limits.

    corpora_at_least: how many texts the perplexity was measured on. protocol: the report's protocol hash, where a
    policy is for one base and pins even the tokens that were scored.
    """

    verified: Literal[True] = True
    identity_matches_report: Literal[True] = True
    corpora_at_least: Annotated[int, Field(ge=1)] = 1
    protocol: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None


class Policy(Strict):
    """A whole policy. suite: name or path of the suite whose report is judged."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    suite: str = "quick"
    require: Requirements = Requirements()
    limits: Annotated[list[Limit], Field(min_length=1)]

    @property
    def sha256(self) -> str:
        return sha256_bytes(self.data)

    @property
    def data(self) -> bytes:
        """Its canonical JSON, of which the hash is. Without `protocol` it is the one from before policies had it."""
        unset = {"require": {"protocol"}} if self.require.protocol is None else None
        return canonical_json(self.model_dump(mode="json", exclude=unset))


@dataclass(frozen=True)
class Row:
    """One judged line. margin: how far inside the bound the value is (negative: outside), in the metric's unit."""

    check: str
    limit: str
    value: str
    margin: str
    outcome: Outcome


@dataclass(frozen=True)
class Verdict:
    """The gate's answer for one artifact, one report (by the hash of its file) and one policy."""

    identity: str
    policy: Policy
    rows: list[Row]
    report_sha256: str = ""

    @property
    def passed(self) -> bool:
        return all(row.outcome == "pass" for row in self.rows)

    def values(self) -> dict[str, Any]:
        """The verdict as plain values for --json."""
        return {
            "identity": self.identity,
            "policy": self.policy.name,
            "policy_sha256": self.policy.sha256,
            "report_sha256": self.report_sha256,
            "verdict": "pass" if self.passed else "fail",
            "checks": [vars(row) for row in self.rows],
        }


def load_policy(name: str) -> Policy:
    """The policy of a shipped name or a path. Raises SchemaError."""
    path = find_document("evals/policies", name)
    return validate(Policy, read_yaml(path), f"policy {path.name}")


def gate(artifact: Path, policy: Policy, report_path: Path | None = None) -> Verdict:
    """Judge an artifact.

    Raises ArtifactError (no manifest), SchemaError (the policy's suite does not exist) and ReportError: no report, a
    report of other bytes, of another suite or protocol, against another reference than the source, of a truncated run,
    changed after it was written, or without a metric that the policy bounds. None of these can be judged, so none is a
    pass or a fail.
    """
    manifest = read_manifest(artifact)
    suite = load_suite(policy.suite)
    path = report_path or default_report(artifact, policy)
    report = read_report(path)
    _refuse_foreign(report, manifest, suite, path)
    refuse_other_protocol(report, suite, path, policy.require.protocol)
    problems = verify(artifact)
    rows = [
        Row("artifact verified", "every byte", problems[0] if problems else "every byte", "", _outcome(not problems))
    ]
    rows.append(_corpora_row(report, policy.require.corpora_at_least))
    rows += [_judge(limit, report, manifest, path) for limit in policy.limits]
    return Verdict(manifest.identity, policy, rows, sha256_bytes(report.data))


def default_report(artifact: Path, policy: Policy) -> Path:
    """Where the report stands that a policy judges. Raises SchemaError where its suite does not exist."""
    return artifact / REPORTS / f"{load_suite(policy.suite).name}.json"


def write_junit(verdict: Verdict, path: Path) -> None:
    """Write the verdict as JUnit XML, one test case a check. Raises ReportError where it cannot be written."""
    refuse_harm(path, "choose another --junit")
    failures = sum(row.outcome == "fail" for row in verdict.rows)
    suite = ElementTree.Element(
        "testsuite",
        name=f"quantkit gate {verdict.policy.name}",
        tests=str(len(verdict.rows)),
        failures=str(failures),
        errors="0",
    )
    properties = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(properties, "property", name="identity", value=verdict.identity)
    for row in verdict.rows:
        # XML has no spelling for most control characters, which names of files and metrics may hold.
        name = printable(row.check)
        case = ElementTree.SubElement(suite, "testcase", classname=f"gate.{verdict.policy.name}", name=name)
        text = printable(f"value {row.value}, limit {row.limit}, margin {row.margin or 'none'}")
        if row.outcome == "fail":
            ElementTree.SubElement(case, "failure", message=text)
        else:
            ElementTree.SubElement(case, "system-out").text = text
    ElementTree.indent(suite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}", "choose another --junit") from None


def _refuse_foreign(report: Report, manifest: Manifest, suite: Suite, path: Path) -> None:
    refuse_other_bytes(report, path, manifest.identity, "this artifact")
    if report.suite.sha256 != suite.sha256:
        raise ReportError(
            f"{path} was made with another suite than {suite.name} as it stands now",
            "run quantkit eval with the policy's suite",
        )
    refuse_other_reference(report, path, manifest.source_identity, "this artifact")
    if report.suite.limit is not None:
        raise ReportError(
            f"{path} is of a run cut short by --limit {report.suite.limit}", "run quantkit eval without --limit"
        )


def _corpora_row(report: Report, needed: int) -> Row:
    texts = report.metrics.get("perplexity")
    found = len(texts) if isinstance(texts, dict) else 0
    return Row("corpora", f">= {needed}", str(found), f"{found - needed:+d}", _outcome(found >= needed))


def _judge(limit: Limit, report: Report, manifest: Manifest, path: Path) -> Row:
    metric = _lookup(limit.metric, report, manifest, path)
    end = "high" if limit.max is not None else "low"
    if limit.upper and end not in metric:
        raise ReportError(
            f"{path} has no confidence interval for {limit.metric}, whose pessimistic end the policy bounds",
            "evaluate on more than one window, or drop upper from the policy",
        )
    value = metric[end if limit.upper else "value"]
    margin = limit.bound - value if limit.max is not None else value - limit.bound
    sign = "<=" if limit.max is not None else ">="
    name = f"{limit.metric} ({end} end)" if limit.upper else limit.metric
    return Row(name, f"{sign} {limit.bound:g}", f"{value:.6g}", f"{margin:+.4g}", _outcome(margin >= 0))


def _lookup(metric: str, report: Report, manifest: Manifest, path: Path) -> dict[str, float]:
    if metric.startswith("manifest."):
        number = manifest.metric(metric.removeprefix("manifest."))
        if number is not None:
            return {"value": number}
        raise ReportError(f"the manifest has no number {metric!r}", "correct the metric in the policy")
    found = report.metric(metric)
    if found is None:
        raise ReportError(
            f"{path} has no metric {metric!r}", "run the suite that measures it (with --reference where it needs one)"
        )
    return found


def _outcome(passed: bool) -> Outcome:
    return "pass" if passed else "fail"
