"""`quantkit compare`: several artifacts of one base, by their reports of one protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import REPORTS
from quantkit.errors import ReportError, UsageError
from quantkit.evaluate.suite import load_suite
from quantkit.manifest import Manifest, read_manifest
from quantkit.report import Report, as_metric, read_report, refuse_other_bytes, refuse_other_reference


@dataclass(frozen=True)
class Entry:
    """One artifact: its directory, its manifest and its report."""

    path: Path
    manifest: Manifest
    report: Report

    def texts(self) -> dict[str, dict[str, Any]]:
        """The perplexity metrics of each text; empty where the report holds none."""
        found = self.report.metrics.get("perplexity")
        texts = found if isinstance(found, dict) else {}
        return {text: metrics for text, metrics in texts.items() if isinstance(metrics, dict)}

    def ratio(self, text: str) -> dict[str, float] | None:
        """Perplexity over the base's on a text, or None where the report has no reference."""
        return as_metric(self.texts().get(text, {}).get("ratio"))


@dataclass(frozen=True)
class Comparison:
    """Artifacts of one base under one protocol, in the order in which they were named. labels: a short name of each."""

    entries: list[Entry]
    labels: list[str]

    @property
    def texts(self) -> list[str]:
        return list(self.entries[0].texts())

    def base_perplexity(self, text: str) -> dict[str, float] | None:
        """The base's perplexity on a text, from the first report that was made beside it."""
        found = (as_metric(entry.texts().get(text, {}).get("reference")) for entry in self.entries)
        return next((metric for metric in found if metric is not None), None)

    def values(self) -> dict[str, Any]:
        """The comparison as plain values for --json."""
        first = self.entries[0]
        return {
            "base": {
                "name": first.manifest.source.name,
                "identity": first.manifest.source_identity,
                "bits_per_weight": source_bits(first.manifest),
                "perplexity": {text: self.base_perplexity(text) for text in self.texts},
            },
            "suite": first.report.suite.model_dump(),
            "protocol": first.report.protocol,
            "artifacts": [
                {
                    "path": str(entry.path),
                    "label": label,
                    "identity": entry.manifest.identity,
                    "recipe": entry.manifest.recipe.get("name"),
                    "fallbacks": len(entry.manifest.fallbacks),
                    "totals": entry.manifest.totals.model_dump(),
                    "metrics": entry.report.metrics,
                }
                for entry, label in zip(self.entries, self.labels, strict=True)
            ],
        }


def compare(artifacts: Sequence[Path], suite: str) -> Comparison:
    """Read the reports that `artifacts` hold of a suite, given by name or path.

    Raises UsageError (fewer than two), ArtifactError (no manifest) and ReportError: no report, one of other bytes, of
    another protocol, against another reference than the source, or an artifact of another base.
    """
    if len(artifacts) < 2:
        raise UsageError("one artifact cannot be compared", "name two or more")
    entries = [_read(path, suite) for path in artifacts]
    for entry in entries[1:]:
        _refuse_other(entries[0], entry)
    return Comparison(entries, _labels(entries))


def report_path(artifact: Path, suite: str) -> Path:
    """Where an artifact's report of a suite stands; the suite by name or path, or by the name of the report.

    Raises ReportError where there is none, naming those there are, and SchemaError for a path to no suite.
    """
    name = load_suite(suite).name if "/" in suite or suite.endswith((".yaml", ".yml")) else suite
    path = artifact / REPORTS / f"{name}.json"
    if path.is_file():
        return path
    others = ", ".join(sorted(other.stem for other in (artifact / REPORTS).glob("*.json")))
    raise ReportError(
        f"{artifact} has no report of suite {name} (it has: {others or 'none'})",
        f"run quantkit eval {artifact} --suite {suite}",
    )


def own_report(artifact: Path, manifest: Manifest, path: Path) -> Report:
    """The report at `path`. Raises ReportError where it measured other bytes than `artifact` holds."""
    report = read_report(path)
    refuse_other_bytes(report, path, manifest.identity, artifact)
    return report


def source_bits(manifest: Manifest) -> float:
    """Bits a weight of the source: all its weight files over all its parameters."""
    return 8 * manifest.totals.source_weight_bytes / max(manifest.totals.parameters, 1)


def artifact_bits(manifest: Manifest) -> float:
    """Bits a weight of the quantised layers as stored; of the whole model where nothing is quantised."""
    bits = manifest.totals.bits_per_weight
    return manifest.totals.bits_per_parameter if bits is None else bits


def _read(artifact: Path, suite: str) -> Entry:
    manifest = read_manifest(artifact)
    path = report_path(artifact, suite)
    report = own_report(artifact, manifest, path)
    refuse_other_reference(report, path, manifest.source_identity, artifact)
    return Entry(artifact, manifest, report)


def _refuse_other(first: Entry, other: Entry) -> None:
    if other.manifest.source_identity != first.manifest.source_identity:
        raise ReportError(
            f"{other.path} was made from {other.manifest.source.name} ({other.manifest.source_identity[:12]}), "
            f"{first.path} from {first.manifest.source.name} ({first.manifest.source_identity[:12]})",
            "compare artifacts of one base",
        )
    if other.report.protocol != first.report.protocol:
        records = first.report.protocol_record, other.report.protocol_record
        differ = sorted(key for key in {*records[0], *records[1]} if records[0].get(key) != records[1].get(key))
        raise ReportError(
            f"{other.path} was measured by protocol {other.report.protocol[:12]}, "
            f"{first.path} by {first.report.protocol[:12]} (they differ in {', '.join(differ) or 'their hash'})",
            # One has packed kernels and the other has none: no run of eval makes that the same.
            "compare them on a suite without tasks and answers"
            if differ == ["decoding"]
            else "run quantkit eval on both with the same suite, limit and versions of the texts",
        )


def _labels(entries: list[Entry]) -> list[str]:
    """The recipes' names where they tell the artifacts apart; else the directories' names; else those with a number."""
    recipes = [str(entry.manifest.recipe.get("name")) for entry in entries]
    folders = [entry.path.resolve().name for entry in entries]
    unique = next((names for names in (recipes, folders) if len(set(names)) == len(names)), None)
    return unique or [f"{name} ({n})" for n, name in enumerate(folders, 1)]
