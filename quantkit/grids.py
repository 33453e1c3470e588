"""What a page shows in tables, as rows of text: one function a table, from a report, a manifest or a comparison.

A report is read as it comes: what is missing or no number is an empty cell, never an error.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from quantkit.compare import Comparison, artifact_bits, source_bits
from quantkit.manifest import LayerRecord, Manifest
from quantkit.report import Report, as_metric

Metric = dict[str, float] | None

_FIDELITY = {
    "kl_mean": ("mean KL, nats", 4),
    "kl_p99": ("99th percentile of KL, nats", 2),
    "top1": ("agreement of the most likely token", 3),
    "acceptance": ("acceptance, sum of min(p, q)", 3),
}
# Kinds of groups in a breakdown, and what they are called.
_KINDS = {"corpus": "by text", "language": "by language", "class": "by predicted token", "position": "by tokens before"}
# What the parts of a task's entry begin with: `by_language` and, where the task names others, `by_<field>`.
_PARTS = "by_"


@dataclass(frozen=True)
class Grid:
    """A table of numbers, which align right, and words.

    left: columns of short words; prose: of words that may wrap; quiet: of second rank. strong: cells (row, column) that
    stand out. parts: rows that name the part of the table below them.
    """

    heads: list[str]
    rows: list[list[str]]
    left: set[int] = field(default_factory=lambda: {0})
    prose: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    strong: set[tuple[int, int]] = field(default_factory=set)
    parts: set[int] = field(default_factory=set)


def fixed(metric: Metric, digits: int, end: str = "value") -> str:
    """One end of a metric to `digits` decimals; in scientific notation where these would show nothing of it."""
    value = None if metric is None else metric.get(end)
    if value is None:
        return ""
    tiny = value != 0 and abs(value) < 0.5 * 10**-digits
    return f"{value:.1e}" if tiny or abs(value) >= 1e7 else f"{value:.{digits}f}"


def span(metric: Metric, digits: int) -> str:
    """The 95% interval of a metric, or nothing."""
    if metric is None or "low" not in metric or "high" not in metric:
        return ""
    return f"{fixed(metric, digits, 'low')} – {fixed(metric, digits, 'high')}"


def count(value: Any) -> str:
    """A number of things, with its thousands apart."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else ""


def size(bytes_: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    power = min(int(math.log10(bytes_)) // 3, 4) if bytes_ > 0 else 0
    return f"{bytes_ / 1000**power:.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def members(value: Any) -> dict[str, Any]:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def perplexity_grid(report: Report) -> Grid:
    """Each text with the perplexity of the artifact and of the base, and their ratio."""
    rows = []
    for text, metrics in members(report.metrics.get("perplexity")).items():
        found = members(metrics)
        value, reference, ratio = (as_metric(found.get(key)) for key in ("value", "reference", "ratio"))
        numbers = [fixed(value, 2), span(value, 2), fixed(reference, 2), fixed(ratio, 4), span(ratio, 4)]
        rows.append([text, *numbers, count(found.get("tokens"))])
    heads = ["text", "perplexity", "95% interval", "base", "ratio", "95% interval", "predictions"]
    return Grid(heads, rows, quiet={2, 5, 6})


def fidelity_grid(report: Report) -> Grid:
    """The metrics of fidelity to the reference."""
    found = members(report.metrics.get("fidelity"))
    rows = [
        [words, fixed(metric, digits), span(metric, digits)]
        for name, (words, digits) in _FIDELITY.items()
        if (metric := as_metric(found.get(name))) is not None
    ]
    return Grid(["metric", "value", "95% interval"], rows, quiet={2})


def breakdown_grid(report: Report) -> Grid:
    """The groups of `metrics["breakdown"]`, with the share that each has in all KL."""
    found = members(report.metrics.get("breakdown"))
    everything = members(found.get("all"))
    total = _total_kl(everything)
    rows = [["all", *_group_cells(everything, total)]] if everything else []
    strong, parts = set(), set()
    for kind, words in _KINDS.items():
        groups = {name: members(group) for name, group in sorted(members(found.get(kind)).items(), key=_leading_number)}
        if not groups:
            continue
        parts.add(len(rows))
        rows.append([words, *[""] * 7])
        worst = max(groups, key=lambda name: _mean_kl(groups[name]))
        for name, group in groups.items():
            if name == worst and len(groups) > 1:
                strong |= {(len(rows), 0), (len(rows), 3)}
            rows.append([name, *_group_cells(group, total)])
    heads = [
        "predictions",
        "of all KL",
        "mean KL",
        "95% interval",
        "same top token",
        "perplexity ratio",
        "95% interval",
    ]
    return Grid(["", *heads], rows, quiet={1, 2, 4, 7}, strong=strong, parts=parts)


def worst_grid(report: Report) -> Grid:
    """The windows with the largest mean KL."""
    listed = members(report.metrics.get("breakdown")).get("worst_windows")
    rows = [
        [str(row.get("corpus", "")), count(row.get("window")), fixed(_kl_of(row), 4), str(row.get("opening", ""))]
        for row in map(members, listed if isinstance(listed, list) else [])
    ]
    return Grid(["text", "window", "mean KL", "begins with"], rows, prose={3})


def histogram(report: Report) -> tuple[list[float], list[int]] | None:
    """Edges and counts of the KL histogram, or None where the report holds none that can be drawn."""
    found = members(members(report.metrics.get("breakdown")).get("kl_histogram"))
    edges, counts = found.get("edges"), found.get("counts")
    if not isinstance(edges, list) or not isinstance(counts, list) or len(counts) != len(edges) + 1 or len(edges) < 2:
        return None
    numbers = [*edges, *counts]
    if any(isinstance(value, dict) or as_metric(value) is None or value < 0 for value in numbers) or not sum(counts):
        return None
    return (edges, counts) if edges[0] > 0 and all(a < b for a, b in pairwise(edges)) else None


def task_grid(report: Report) -> Grid:
    """Every task, metric and part, with the flips: items lost and gained against the reference."""
    rows = [row for task, found in members(report.metrics.get("tasks")).items() for row in _task_rows(task, found)]
    heads = ["task", "metric", "items", "artifact", "95% interval", "base", "drop", "95% interval", "lost", "gained"]
    return Grid(heads, rows, left={0, 1}, quiet={2, 4, 7})


def layer_grid(layers: Sequence[LayerRecord]) -> Grid:
    """Layers with what rounding did to the weight, and to the output where a pass measured it."""
    rows = []
    for layer in layers:
        output = layer.output_error
        before, after = ({"value": output.before}, {"value": output.after}) if output else (None, None)
        relative, largest = {"value": layer.error.relative}, {"value": layer.error.max_abs}
        what = [layer.name, layer.scheme.scheme.describe(), f"{8 * layer.bytes / math.prod(layer.shape):.3f}"]
        errors = [fixed(relative, 5), fixed(largest, 4), fixed(before, 6), fixed(after, 6), count(layer.tokens)]
        rows.append([*what, *errors, "; ".join(filter(None, [layer.fallback, *layer.notes]))])
    heads = ["layer", "scheme", "bits", "weight error", "largest", "output before", "output after", "tokens", "notes"]
    return _without_empty(Grid(heads, rows, left={0, 1}, prose={8}, quiet={2, 4, 7}))


def layer_error(layer: LayerRecord) -> float:
    """Relative error (norm over norm) after rounding: of the layer's output where it was measured, else its weight."""
    return math.sqrt(max(layer.output_error.after, 0.0)) if layer.output_error else layer.error.relative


def heat_map(layers: Sequence[LayerRecord]) -> tuple[list[str], list[str], list[list[float | None]]]:
    """Kinds of linears, blocks, and the `layer_error` of each; the worst one where a block holds several of a kind."""
    found: dict[tuple[str, str], float] = {}
    for layer in layers:
        place = re.match(r"(?:.*?\.)?(\d{1,9})\.(.+)$", layer.module)
        if place:
            key = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", place[2]), place[1]
            found[key] = max(found.get(key, 0.0), layer_error(layer))
    rows = list(dict.fromkeys(kind for kind, _ in found))
    columns = sorted({block for _, block in found}, key=int)
    return rows, columns, [[found.get((row, column)) for column in columns] for row in rows]


def fallback_grid(manifest: Manifest) -> Grid:
    """What was done differently from the recipe, equal details in one row."""
    details: dict[tuple[str, str], list[str]] = {}
    for record in manifest.fallbacks:
        details.setdefault((record.kind, record.detail), []).append(record.layer)
    rows = [[kind, count(len(layers)), layers[0], detail] for (kind, detail), layers in details.items()]
    return Grid(["kind", "layers", "the first", "what"], rows, left={0, 2}, prose={3})


def file_grid(manifest: Manifest) -> Grid:
    """The files of the source."""
    rows = [[record.name, size(record.size), record.sha256] for record in manifest.source.files]
    return Grid(["source file", "size", "SHA-256"], rows, prose={2}, quiet={2})


def text_grid(report: Report) -> Grid:
    """The texts of the protocol."""
    keys = ("language", "bos", "windows", "length", "text_sha256", "tokens_sha256")
    rows = [
        [name, *(str(members(rules).get(key, ""))[:12] for key in keys)]  # the record below has the hashes whole
        for name, rules in members(report.protocol_record.get("texts")).items()
    ]
    heads = ["text", "language", "BOS", "windows", "length", "text's hash", "tokens' hash"]
    return Grid(heads, rows, left={0, 1, 2, 5, 6}, quiet={5, 6})


def comparison_grid(comparison: Comparison) -> Grid:
    """The base and every artifact in a row; a column named after a text is perplexity as a multiple of the base's."""
    first = comparison.entries[0].manifest
    ones = ["1" if comparison.base_perplexity(text) else "" for text in comparison.texts]
    rows = [["base", f"{source_bits(first):.2f}", size(first.totals.source_weight_bytes), *ones, "", "", ""]]
    for entry, label in zip(comparison.entries, comparison.labels, strict=True):
        ratios = [fixed(entry.ratio(text), 3) for text in comparison.texts]
        kl, top1 = (entry.report.metric(f"fidelity.{name}") for name in ("kl_mean", "top1"))
        totals = entry.manifest.totals
        sizes = [f"{artifact_bits(entry.manifest):.2f}", size(totals.weight_bytes)]
        rows.append([label, *sizes, *ratios, fixed(kl, 4), fixed(top1, 3), count(len(entry.manifest.fallbacks))])
    return _without_empty(Grid(["artifact", "bits", "files", *comparison.texts, "mean KL", "top-1", "fallbacks"], rows))


def text_comparison_grid(comparison: Comparison, text: str) -> Grid:
    """Perplexity on one text, and its ratio to the base's, of the base and every artifact."""
    base = comparison.base_perplexity(text)
    rows = [["base", fixed(base, 2), span(base, 2), "", ""]] if base else []
    for entry, label in zip(comparison.entries, comparison.labels, strict=True):
        value, ratio = as_metric(entry.texts().get(text, {}).get("value")), entry.ratio(text)
        rows.append([label, fixed(value, 2), span(value, 2), fixed(ratio, 4), span(ratio, 4)])
    return Grid(["artifact", "perplexity", "95% interval", "over base", "95% interval"], rows, quiet={2, 4})


def fidelity_comparison_grid(comparison: Comparison) -> Grid:
    """Every metric of fidelity of every artifact that has it."""
    rows = []
    for entry, label in zip(comparison.entries, comparison.labels, strict=True):
        metrics = [(entry.report.metric(f"fidelity.{name}"), digits) for name, (_, digits) in _FIDELITY.items()]
        rows.append(
            [label, *(cell for metric, digits in metrics for cell in (fixed(metric, digits), span(metric, digits)))]
        )
    heads = [head for head in ("mean KL", "KL p99", "top-1", "acceptance") for head in (head, "95% interval")]
    return _without_empty(Grid(["artifact", *heads], rows, quiet={2, 4, 6, 8}))


def _task_rows(task: str, found: Any, part: str = "") -> Iterator[list[str]]:
    """The rows of one task, then those of each of its parts: languages by their name, others as `length 256`."""
    name, entries = f"{task}, {part}" if part else task, members(found)
    for metric, numbers in entries.items():
        if not isinstance(numbers, dict) or "value" not in numbers:
            continue
        value, reference, drop = (as_metric(numbers.get(key)) for key in ("value", "reference", "drop"))
        levels = [fixed(value, 4), span(value, 4), fixed(reference, 4)]
        changes = [fixed(drop, 4), span(drop, 4), count(numbers.get("lost")), count(numbers.get("gained"))]
        yield [name, metric, count(entries.get("n")), *levels, *changes]
    for key, parts in entries.items():
        if not key.startswith(_PARTS) or "value" in members(parts):
            continue
        field = "" if key == f"{_PARTS}language" else f"{key.removeprefix(_PARTS)} "
        for words, inner in sorted(members(parts).items(), key=_leading_number):
            yield from _task_rows(task, inner, f"{field}{words}")


def _group_cells(group: dict[str, Any], total: float) -> list[str]:
    """Cells of one group of predictions. total: the sum of KL over all predictions."""
    kl, top1, ratio = (as_metric(group.get(key)) for key in ("kl_mean", "top1", "ratio"))
    share = f"{100 * _total_kl(group) / total:.1f} %" if total > 0 else ""
    numbers = [fixed(kl, 4), span(kl, 4), fixed(top1, 3), fixed(ratio, 3), span(ratio, 3)]
    return [count(group.get("tokens")), share, *numbers]


def _kl_of(group: dict[str, Any]) -> Metric:
    return as_metric(group.get("kl_mean"))


def _mean_kl(group: dict[str, Any]) -> float:
    metric = _kl_of(group)
    return metric["value"] if metric else 0.0


def _total_kl(group: dict[str, Any]) -> float:
    tokens = as_metric(group.get("tokens"))
    return _mean_kl(group) * tokens["value"] if tokens else 0.0


def _leading_number(item: tuple[str, Any]) -> int:
    """The number that a name begins with: JSON keeps its keys in the order of their letters."""
    found = re.match(r"\d{1,9}", item[0])
    return int(found[0]) if found else 0


def _without_empty(grid: Grid) -> Grid:
    """The same table without columns in which no row holds anything."""
    kept = [n for n in range(len(grid.heads)) if n == 0 or any(row[n] for row in grid.rows)]

    def moved(columns: set[int]) -> set[int]:
        return {place for place, n in enumerate(kept) if n in columns}

    rows = [[row[n] for n in kept] for row in grid.rows]
    return Grid([grid.heads[n] for n in kept], rows, moved(grid.left), moved(grid.prose), moved(grid.quiet))
