"""Pages for a reviewer: one self-contained HTML file of a report, or of a comparison.

A page loads nothing and runs nothing: style and pictures stand in it, and its own policy forbids the rest. Every text
of a model, a manifest or a report is escaped by the template.
"""

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quantkit import answers, grids
from quantkit.compare import Comparison, Entry, artifact_bits, own_report, report_path, source_bits
from quantkit.data import shipped_names
from quantkit.errors import QuantkitError, ReportError
from quantkit.figures import Point, heat_map_picture, histogram_picture, quality_picture
from quantkit.files import replace_file
from quantkit.gates import Verdict, gate, load_policy
from quantkit.manifest import Manifest, read_manifest
from quantkit.report import Report, as_metric, read_report, refuse_harm
from quantkit.seals import seal_page

DEFAULT_POLICY = "smoke"
# Layers and answers shown at once; the others are one click away.
_WORST_LAYERS = 12
_SHOWN_ANSWERS = 4

# A verdict, or the reason why there is none.
Judgement = Verdict | str


def judge(artifact: Path, report: Path, policy: str | None) -> Judgement:
    """The verdict of `policy`; without one that of the shipped policy for the report's suite, or why that cannot judge.

    Raises what the gate raises where a policy is named and cannot judge.
    """
    name = policy or _default_policy(report)
    try:
        return gate(artifact, load_policy(name), report)
    except QuantkitError as error:
        if policy is not None:
            raise
        problem = error.problem.replace(str(report), report.name)
        return f"The default policy {name} cannot judge: {problem}. Name another: quantkit report --policy"


def _default_policy(report: Path) -> str:
    """The shipped policy that is made for the suite of a report; where there is none, one that will say why."""
    made_for = {load_policy(name).suite: name for name in shipped_names("evals/policies")}
    with suppress(QuantkitError):
        return made_for.get(read_report(report).suite.name, DEFAULT_POLICY)
    return DEFAULT_POLICY


def artifact_page(artifact: Path, suite: str, policy: str | None = None) -> tuple[str, Judgement]:
    """The page of the report of `suite` that stands in an artifact, and its verdict.

    Raises ArtifactError (no manifest), ReportError (no report, or one of other bytes) and what `judge` raises.
    """
    manifest = read_manifest(artifact)
    path = report_path(artifact, suite)
    report = own_report(artifact, manifest, path)
    judgement = judge(artifact, path, policy)
    return report_page(report, manifest, judgement), judgement


def report_page(report: Report, manifest: Manifest | None, judgement: Judgement) -> str:
    """The page of a report. manifest: of the artifact, or None for a checkpoint."""
    worst = sorted(manifest.layers, key=grids.layer_error, reverse=True)[:_WORST_LAYERS] if manifest else []
    return _render(
        "report.html",
        report=report,
        manifest=manifest,
        verdict=judgement if isinstance(judgement, Verdict) else None,
        reason=judgement if isinstance(judgement, str) else None,
        key_figures=_key_figures(report, manifest),
        pictures=_quality_pictures(report, manifest),
        transcripts=answers.transcripts(report),
        shown_answers=_SHOWN_ANSWERS,
        histogram=_histogram_picture(report),
        above=_shares_above(report),
        heat_map=_heat_map_picture(manifest),
        worst_layers=grids.layer_grid(worst),
        layers=grids.layer_grid(manifest.layers if manifest else []),
        kept=Counter(record.reason for record in manifest.kept) if manifest else {},
        record=_json(report.protocol_record),
        recipe=_json(manifest.recipe) if manifest else "",
        calibration=_json(manifest.calibration) if manifest and manifest.calibration else "",
    )


def write_report_page(report: Report, model: str, path: Path) -> Path:
    """Write the page of a report that stands at `path` beside it, and give its place. model: what was evaluated.

    Raises ReportError where it cannot be written.
    """
    artifact = Path(model)
    if report.subject.kind == "artifact":
        manifest, judgement = read_manifest(artifact), judge(artifact, path, None)
        page = report_page(report, manifest, judgement)
    else:
        page = report_page(report, None, "An unquantised checkpoint: a policy judges artifacts.")
    write_page(page, path.with_suffix(".html"))
    return path.with_suffix(".html")


def judgement_values(judgement: Judgement) -> dict[str, str | None]:
    """verdict (pass, fail or null), policy and the reason of a null, as plain values for --json."""
    if isinstance(judgement, str):
        return {"verdict": None, "policy": None, "reason": judgement}
    return {"verdict": "pass" if judgement.passed else "fail", "policy": judgement.policy.name, "reason": None}


def comparison_page(comparison: Comparison) -> str:
    """The page of several artifacts of one base."""
    return _render(
        "comparison.html",
        comparison=comparison,
        first=comparison.entries[0],
        pictures=_comparison_pictures(comparison),
        record=_json(comparison.entries[0].report.protocol_record),
    )


def write_page(page: str, path: Path) -> None:
    """Write a page as a whole, with its hash as the last line. Raises ReportError where it cannot be written."""
    if path.suffix == ".json":
        raise ReportError(f"{path} is the name of a report, not of a page", "choose another --output")
    refuse_harm(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A report can hold half of a character pair, which no encoding can; it becomes a question mark.
        replace_file(path, seal_page(page.encode(errors="replace")))
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}", "choose another --output") from None


def _render(name: str, **values: Any) -> str:
    environment = Environment(
        loader=PackageLoader("quantkit", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name).render(grids=grids, answers=answers, **values)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)


def _key_figures(report: Report, manifest: Manifest | None) -> list[tuple[str, str, str]]:
    """What a reviewer asks first, as (what, figure, what belongs to it)."""
    found = []
    if manifest is not None:
        totals = manifest.totals
        share = 100 * totals.weight_bytes / max(totals.source_weight_bytes, 1)
        found += [
            ("bits a weight", f"{artifact_bits(manifest):.3f}", f"base {source_bits(manifest):.3g}"),
            ("weight files", grids.size(totals.weight_bytes), f"{share:.0f} % of the base"),
        ]
    for text, metrics in grids.members(report.metrics.get("perplexity")).items():
        value, ratio = (as_metric(grids.members(metrics).get(key)) for key in ("value", "ratio"))
        if ratio is not None:
            found.append((f"perplexity {text}", f"× {grids.fixed(ratio, 3)}", grids.span(ratio, 3)))
        else:
            found.append((f"perplexity {text}", grids.fixed(value, 2), grids.span(value, 2)))
    for name, words in (("kl_mean", "mean KL, nats"), ("top1", "same top token")):
        metric = report.metric(f"fidelity.{name}")
        if metric is not None:
            found.append((words, grids.fixed(metric, 3), grids.span(metric, 3)))
    if manifest is not None:
        found.append(("fallbacks", str(len(manifest.fallbacks)), f"{len(manifest.layers)} layers quantised"))
    return found


def _quality_pictures(report: Report, manifest: Manifest | None) -> list[tuple[str, Markup]]:
    """This artifact and its base in one picture a text."""
    if manifest is None:
        return []
    return _comparison_pictures(Comparison([Entry(Path(), manifest, report)], ["this artifact"]), width=3.9)


def _comparison_pictures(comparison: Comparison, width: float = 5.4) -> list[tuple[str, Markup]]:
    """Perplexity over that of the base against bits a weight: (text, picture) for each text that has it.

    width: of a picture in inches; its text has one size.
    """
    base = Point("base", source_bits(comparison.entries[0].manifest), 1.0)
    pictures = []
    for text in comparison.texts:
        points = []
        for entry, label in zip(comparison.entries, comparison.labels, strict=True):
            ratio = entry.ratio(text)
            if ratio is not None:
                ends = (ratio["value"], ratio.get("low"), ratio.get("high"))
                points.append(Point(label, artifact_bits(entry.manifest), *ends))
        if points:
            title = f"perplexity on {text} against bits a weight"
            pictures.append((text, quality_picture(title, points, base, width=width)))
    return pictures


def _histogram_picture(report: Report) -> Markup | None:
    found = grids.histogram(report)
    if found is None:
        return None
    mean = report.metric("breakdown.all.kl_mean")
    return histogram_picture("histogram of the KL of single predictions", *found, mean["value"] if mean else None)


def _shares_above(report: Report) -> list[tuple[str, str]]:
    """(KL in nats, share of predictions at or above it) at each whole decade that is an edge and has any."""
    edges, counts = grids.histogram(report) or ([], [])
    found = []
    for n, edge in enumerate(edges):
        share = sum(counts[n + 1 :]) / sum(counts)
        if edge in {0.01, 0.1, 1.0, 10.0} and share > 0:
            found.append((f"{edge:g}", f"{100 * share:.0f} %" if share > 0.1 else f"{100 * share:.2g} %"))
    return found


def _heat_map_picture(manifest: Manifest | None) -> Markup | None:
    rows, columns, values = grids.heat_map(manifest.layers if manifest else [])
    return heat_map_picture("error of every layer by block and kind", rows, columns, values) if rows else None
