"""Tables for people: every command's result as rich renderables."""

from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from quantkit.compare import Comparison
from quantkit.diff import Difference
from quantkit.errors import printable
from quantkit.gates import Verdict
from quantkit.grids import comparison_grid
from quantkit.ledger import Ledger
from quantkit.report import Report
from quantkit.verification import Verification


def plain(text: str) -> str:
    """Text as it is: names out of models and reports style nothing, and send the terminal no commands."""
    return escape(printable(text))


def pairs(title: str, values: dict[str, str]) -> Table:
    """A two-column table."""
    table = Table(title=plain(title), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in values.items():
        table.add_row(plain(key), plain(value))
    return table


def inspection_tables(found: dict[str, Any]) -> list[Table]:
    """Tables of `inspect` and `--dry-run`: a summary, layers grouped by scheme, kept tensors by reason, fallbacks."""
    if found["kind"] == "checkpoint":
        return [pairs(f"checkpoint {found['name']}", _checkpoint_summary(found))]
    tables = [pairs(f"{found['kind']} {found['name']}", _summary(found)), _scheme_table(found)]
    if found["fallbacks"]:
        tables.append(_fallback_table(found["fallbacks"]))
    return tables


def report_table(report: Report) -> Table:
    """Every metric with its interval, but for the breakdown and the parts of tasks, which the page shows."""
    table = Table(title=plain(f"{report.subject.name}  {report.identity[:12]}"), title_justify="left")
    for column in ("metric", "value", "95% interval"):
        table.add_column(column, justify="left" if column == "metric" else "right", overflow="fold")
    for path, metric in flat_metrics({name: value for name, value in report.metrics.items() if name != "breakdown"}):
        if ".by_" in path:
            continue
        span = f"{metric['low']:.5g} .. {metric['high']:.5g}" if "low" in metric else ""
        table.add_row(plain(path), f"{metric['value']:.5g}", span)
    return table


def flat_metrics(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, dict[str, float]]]:
    """Metrics with their dotted paths, in order; plain counts are left out."""
    found = []
    for name, value in metrics.items():
        if isinstance(value, dict) and "value" in value and not isinstance(value["value"], dict):
            found.append((prefix + name, value))
        elif isinstance(value, dict):
            found += flat_metrics(value, f"{prefix}{name}.")
    return found


def verdict_table(verdict: Verdict) -> Table:
    """Each limit, the value and the margin."""
    title = f"gate {verdict.policy.name}  {verdict.identity[:12]}"
    table = Table(title=plain(title), title_justify="left")
    for column in ("check", "limit", "value", "margin", "verdict"):
        table.add_column(column, justify="left" if column == "check" else "right", overflow="fold")
    for row in verdict.rows:
        style = "green" if row.outcome == "pass" else "bold red"
        table.add_row(*map(plain, (row.check, row.limit, row.value, row.margin)), f"[{style}]{row.outcome}[/]")
    return table


def verification_table(found: Verification) -> Table:
    """Each component: its recorded hash, its files, and whether its content is still the recorded one."""
    table = Table(title=f"verify  {found.identity[:12]}", title_justify="left")
    for column in ("component", "sha256", "files", "size", "state"):
        table.add_column(column, justify="right" if column in {"files", "size"} else "left")
    for name, part in found.components.items():
        state = "[bold red]changed[/]" if part.changed else "as recorded" if part.sha256 else "none"
        size = _size(part.size) if part.files else ""
        table.add_row(name, (part.sha256 or "")[:12], str(part.files or ""), size, state)
    if found.reports:
        bad = sum(problem is not None for problem in found.reports.values())
        table.add_row(
            "reports", "", str(len(found.reports)), "", f"[bold red]{bad} changed[/]" if bad else "as written"
        )
    return table


def difference_table(found: Difference) -> Table:
    """Each component of A and of B, what differs in it, and what else the manifests record differently."""
    outcome = "the same" if found.same else "differ"
    title = f"A {found.identities[0][:12]}, B {found.identities[1][:12]}: components {outcome}"
    table = Table(title=title, title_justify="left")
    for column in ("component", "A", "B", "what differs"):
        table.add_column(column, overflow="fold")
    for name, part in found.components.items():
        hashes = [(sha256 or "none")[:12] for sha256 in (part.first, part.second)]
        words = "same" if part.same else f"[bold red]{escape('; '.join(part.details) or 'differs')}[/]"
        table.add_row(name, *hashes, words)
    for key, words in found.record.items():
        table.add_row(f"recorded: {key}", "", "", escape(words))
    return table


def channel_table(channels: dict[str, dict[str, Any]]) -> Table:
    """What each channel holds."""
    table = _plain_table("channels", ("channel", "holds", "before", "policy", "since", "artifact"))
    for name, held in channels.items():
        before = (held["before"] or "nothing")[:12]
        rest = (escape(held[key]) for key in ("policy", "at", "artifact"))
        table.add_row(name, held["identity"][:12], before, *rest)
    return table


def ledger_table(ledger: Ledger) -> Table:
    """Every entry, the newest last."""
    columns = ("entry", "when", "what", "channel", "identity", "policy", "by")
    table = _plain_table(f"entries, head {ledger.entries[-1].sha256}", columns)
    for entry in ledger.entries:
        what = entry.action if entry.restores is None else f"back to {entry.restores}"
        release = entry.release
        table.add_row(
            str(entry.sequence), entry.stamp.at, what, entry.channel, release.identity[:12], escape(release.policy),
            escape(entry.stamp.by),
        )  # fmt: skip
    return table


def _plain_table(title: str, columns: tuple[str, ...]) -> Table:
    """A table without lines between columns, for many narrow ones. Only the last column is cut into several lines."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != columns[-1])
    return table


def comparison_table(comparison: Comparison) -> Table:
    """The base and every artifact in a row. The page and --json have the intervals as well."""
    grid = comparison_grid(comparison)
    first = comparison.entries[0]
    title = f"{first.manifest.source.name}, suite {first.report.suite.name}; texts: perplexity over the base's"
    table = Table(title=plain(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for n, head in enumerate(grid.heads):
        table.add_column(plain(head), justify="left" if n in grid.left else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*map(plain, row))
    return table


def _summary(found: dict[str, Any]) -> dict[str, str]:
    totals = found["totals"]
    reasons = Counter(kept["reason"] for kept in found["kept"])
    rows: dict[str, str] = {key: str(found[key]) for key in ("identity", "source", "recipe") if key in found}
    rows["quantised"] = f"{len(found['layers'])} layers, {totals['quantised_parameters']:,} weights"
    for reason, count in reasons.items():
        rows[f"kept ({count})"] = reason if f"kept ({count})" not in rows else f"{rows[f'kept ({count})']}; {reason}"
    if found["dropped"]:
        rows["dropped"] = ", ".join(f"{dropped['name']} ({dropped['reason']})" for dropped in found["dropped"])
    if totals["bits_per_weight"] is not None:
        rows["bits per weight"] = (
            f"{totals['bits_per_weight']:.4f} stored, {totals['bits_per_weight_nominal']:.4f} nominal"
        )
    rows["bits per parameter"] = f"{totals['bits_per_parameter']:.4f} over the whole model"
    rows["weight files"] = f"{_size(totals['weight_bytes'])} (source {_size(totals['source_weight_bytes'])})"
    if "needs" in found:
        rows["needs"] = (
            f"{_size(found['needs']['disk_bytes'])} disk, about {_size(found['needs']['memory_bytes'])} memory"
        )
    rows |= {f"loads in {reader}": answer for reader, answer in found["readers"].items()}
    rows |= {f"not copied: {name}": reason for name, reason in found.get("not_copied", {}).items()}
    if found["notes"]:
        rows["notes"] = "; ".join(found["notes"])
    return rows


def _checkpoint_summary(found: dict[str, Any]) -> dict[str, str]:
    shapes = Counter(f"{rows} x {columns}" for rows, columns in found["linears"].values())
    return {
        "dtype": found["dtype"],
        "blocks": f"{found['blocks']['count']} in {found['blocks']['name']}",
        "linears": ", ".join(f"{count} of {shape}" for shape, count in shapes.items()) or "none",
        "tensors": str(found["tensors"]),
        "parameters": f"{found['parameters']:,}",
        "weight files": _size(found["weight_bytes"]),
        "side files": ", ".join(found["side_files"]),
    }


def _scheme_table(found: dict[str, Any]) -> Table:
    """Layers of one scheme and shape in one row."""
    table = Table()
    for column in ("layers", "shape", "scheme", "bits nominal", "bits stored", "relative error"):
        table.add_column(column, justify="left" if column == "scheme" else "right")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for layer in found["layers"]:
        groups.setdefault((f"{layer['shape'][0]} x {layer['shape'][1]}", layer["scheme"]), []).append(layer)
    for (shape, scheme), layers in groups.items():
        stored = f"{layers[0]['bits_per_weight']:.4f}" if "bits_per_weight" in layers[0] else ""
        errors = [layer["error"]["relative"] for layer in layers if "error" in layer]
        spread = f"{min(errors):.4f} .. {max(errors):.4f}" if errors else ""
        table.add_row(str(len(layers)), shape, scheme, f"{layers[0]['bits_nominal']:.4f}", stored, spread)
    return table


def _fallback_table(fallbacks: list[dict[str, str]]) -> Table:
    """What was done differently from the recipe, equal details in one row."""
    table = Table(title=f"{len(fallbacks)} fallbacks", title_justify="left")
    for column in ("layers", "first", "what"):
        table.add_column(column)
    details: dict[str, list[str]] = {}
    for fallback in fallbacks:
        details.setdefault(fallback["detail"], []).append(fallback["layer"])
    for detail, layers in details.items():
        table.add_row(str(len(layers)), plain(layers[0]), plain(detail))
    return table


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.4g} GB"
