"""Reports: what an evaluation found, bound to the identity of the bytes and the hash of the protocol."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

from quantkit.artifact import REPORTS, harmed_artifact
from quantkit.canonical import sha256_json
from quantkit.errors import ReportError
from quantkit.files import replace_file
from quantkit.manifest import Manifest
from quantkit.schema import Strict, read_json, validate

REPORT_VERSION: Literal[2] = 2


class Subject(Strict):
    """What was evaluated: an artifact by its identity, or a checkpoint by the hash of its file hashes."""

    kind: Literal["artifact", "checkpoint"]
    name: str
    identity: str


class SuiteRecord(Strict):
    """The suite by name and hash; limit: windows a text and documents a task that `--limit` left, or null for all."""

    name: str
    sha256: str
    limit: int | None


class Report(Strict):
    """A whole report. `metrics` is addressed by dotted paths; a metric with an interval is {value, low, high}.

    sha256: of the canonical JSON of everything else, so that a changed figure shows; null until the report is written.
    """

    schema_version: Literal[2]
    identity: str
    subject: Subject
    reference: Subject | None
    suite: SuiteRecord
    protocol: str
    protocol_record: dict[str, Any]
    metrics: dict[str, Any]
    notes: list[str]
    run: dict[str, Any]
    sha256: str | None = None

    def sealed(self) -> "Report":
        """The report with its own hash."""
        return self.model_copy(update={"sha256": sha256_json(self.model_dump(mode="json", exclude={"sha256"}))})

    @property
    def data(self) -> bytes:
        """The bytes of its file."""
        values = self.model_dump(mode="json")
        text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"

    def metric(self, path: str) -> dict[str, float] | None:
        """The metric at a dotted path as {value[, low, high]}, or None where the report has no such number.

        Names may hold dots themselves, so each level takes the longest key that fits.
        """
        return as_metric(_walk(self.metrics, path.split(".")))


def as_metric(found: Any) -> dict[str, float] | None:
    """A number, or a {value[, low, high]}, as the latter; None for anything else."""
    ends = found if isinstance(found, dict) else {"value": found}
    numbers = {end: ends[end] for end in ("value", "low", "high") if end in ends}
    return numbers if "value" in numbers and all(map(_is_number, numbers.values())) else None


def refuse_other_bytes(report: Report, path: Path, identity: str, artifact: object) -> None:
    """Raises ReportError where the report at `path` measured other bytes than those of `identity`."""
    if report.identity != identity:
        raise ReportError(
            f"{path} is the report of {report.identity[:12]}, {artifact} is {identity[:12]}",
            "run quantkit eval on this artifact",
        )


def refuse_other_reference(report: Report, path: Path, source_identity: str, artifact: object) -> None:
    """Raises ReportError where the report at `path` compares with anything but the source of `artifact`."""
    if report.reference is not None and report.reference.identity != source_identity:
        raise ReportError(
            f"{path} compares with {report.reference.name}, which is not the source of {artifact}",
            "run quantkit eval with the source as --reference",
        )


def refuse_unwritable(path: Path) -> None:
    """Raises ReportError where it can be told before hours of work that `write_report` would fail, or do harm."""
    refuse_harm(path)
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    problem = None
    if path.is_dir():
        problem = f"{path} is a directory"
    elif not parent.is_dir():
        problem = f"{parent} is not a directory"
    elif not os.access(parent, os.W_OK | os.X_OK):
        problem = f"{parent} is not writable"
    if problem:
        raise ReportError(problem, "choose another --output")


def refuse_harm(path: Path, action: str = "choose another --output") -> None:
    """Raises ReportError where a file at `path` would change an artifact."""
    artifact = harmed_artifact(path)
    if artifact is not None:
        raise ReportError(f"{path} lies in the artifact {artifact}, which would not verify with it", action)


def write_report(report: Report, path: Path) -> None:
    """Write a report with its hash, replacing an older one as a whole. Raises ReportError where it cannot."""
    data = report.sealed().data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}", "choose another --output") from None


def read_report(path: Path) -> Report:
    """Read a report. Raises ReportError: missing, unreadable, of another version, or changed after it was written."""
    action = "run quantkit eval to make one"
    value = read_json(path, ReportError, action)
    found = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(found, int) and found != REPORT_VERSION:
        raise ReportError(f"{path} is of schema_version {found}, this quantkit reads {REPORT_VERSION}", action)
    report = validate(Report, value, str(path), ReportError, action)
    try:
        intact = report.sealed().data == path.read_bytes()
    except (OSError, ValueError):  # a number that no report is written with
        intact = False
    if not intact:
        raise ReportError(f"{path} was changed after it was written", "run quantkit eval again")
    return report


def reports_of(artifact: Path, manifest: Manifest) -> dict[str, Report]:
    """The reports in an artifact, by file name, that are whole runs on these very bytes beside their own source.

    Others are passed over: of other bytes, cut short by `--limit`, against another reference, or not readable.
    """
    found = {}
    for path in sorted((artifact / REPORTS).glob("*.json")):
        try:
            report = read_report(path)
            refuse_other_bytes(report, path, manifest.identity, artifact)
            refuse_other_reference(report, path, manifest.source_identity, artifact)
        except ReportError:
            continue
        if report.suite.limit is None:
            found[f"{REPORTS}/{path.name}"] = report
    return found


def _is_number(value: Any) -> bool:
    # Compared, not converted: an integer may be larger than every float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _walk(value: Any, parts: list[str]) -> Any:
    if not parts:
        return value
    if not isinstance(value, dict):
        return None
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in value:
            return _walk(value[key], parts[length:])
    return None
