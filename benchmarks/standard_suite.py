"""What the suite `standard` says of three artifacts of the demo's base, and what the shipped policies make of them.

    python benchmarks/standard_suite.py                 over an hour on two cores; writes JSON and docs
    python benchmarks/standard_suite.py --work DIR      artifacts and reports that stand there are not made again

Artifacts are converted, evaluated and judged by the command line, each time in a process of its own: seconds and peak
memory are those that a user meets. The first evaluation also runs the base; the others find its answers kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from doc_tables import publish
from rtn_table import say

from quantkit.artifact import REPORTS
from quantkit.demo import base_checkpoint, load_demo
from quantkit.report import Report, as_metric, read_report

RESULT = Path("benchmarks/results/standard_suite.json")
CASES = {
    "awq-g128": ["--recipe", "awq-g128", "--set", "calibration.samples=32"],
    "rtn-int8": ["--recipe", "rtn-int8"],
    "rtn 2 bits": ["--recipe", "rtn-g64-zp", "--set", "weights.bits=2"],
}
POLICIES = {"smoke": "quick", "release": "standard"}
# Metrics beside those of the tasks, and how many decimals of each are shown.
_METRICS = {
    "fidelity.kl_mean": 4,
    "fidelity.kl_p99": 3,
    "fidelity.top1": 3,
    "fidelity.acceptance": 3,
    "generation.identical": 2,
    "generation.prefix_share": 2,
    "batching.equal": 2,
    "batching.logit_difference": 6,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder of the artifacts; default a temporary one")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    base = base_checkpoint(load_demo(), say)
    with tempfile.TemporaryDirectory(prefix="standard-suite-") as folder:
        work = arguments.work or Path(folder)
        artifacts = {label: made(label, base, work) for label in CASES}
        columns = {label: column(path) for label, path in artifacts.items()}
    result = {
        "what": "every metric of the suite standard, value and 95 % interval, and the verdicts of the shipped policies",
        "command": "python benchmarks/standard_suite.py",
        "base": base.name,
        "columns": columns,
    }
    if not arguments.no_write:
        publish(result, RESULT, "docs/evaluation.md", "standard suite", markdown(columns))
    print(markdown(columns))
    return 0


def made(label: str, base: Path, work: Path) -> Path:
    """The artifact of a case with the reports of both suites, where they are not there yet."""
    path = work / label.replace(" ", "-")
    if not path.exists():
        quantkit("convert", base, *CASES[label], "--output", path)
    for suite in POLICIES.values():
        if not (path / REPORTS / f"{suite}.json").exists():
            say(f"{label}: suite {suite}")
            quantkit("eval", path, "--suite", suite)
    return path


def column(path: Path) -> dict[str, Any]:
    """What is shown of one artifact."""
    report = read_report(path / REPORTS / "standard.json")
    return {
        "identity": report.identity,
        "protocol": report.protocol,
        "rows": rows(report),
        "seconds": report.run["seconds"],
        "peak_resident_bytes": report.run["peak_resident_bytes"],
        "reference_answers_kept": report.run["reference_answers_kept"],
        "verdicts": {policy: verdict(path, policy) for policy in POLICIES},
    }


def rows(report: Report) -> dict[str, dict[str, Any]]:
    """Metrics by name: value, interval, the base's, flips, and decimals."""
    found: dict[str, dict[str, Any]] = {}
    for text, metrics in report.metrics["perplexity"].items():
        found[f"perplexity {text}"] = one(metrics, 2)
        found[f"perplexity {text}, ratio"] = metrics["ratio"] | {"digits": 3}
    for name, digits in _METRICS.items():
        found[name.replace(".", " ")] = (report.metric(name) or {}) | {"digits": digits}
    for task, metrics in report.metrics["tasks"].items():
        found |= task_rows(task.removeprefix("quantkit_"), metrics)
    return found


def task_rows(name: str, metrics: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each metric of a task, and of each language."""
    found = {}
    for metric, value in metrics.items():
        if isinstance(value, dict) and "value" in value:
            found[f"{name} {metric}"] = one(value, 3)
            if metric == "margin":
                found[f"{name} margin kept"] = value["kept"] | {"digits": 3}
    for language, part in metrics.get("by_language", {}).items():
        found |= task_rows(f"{name}, {language}:", part)
    return found


def one(metric: dict[str, Any], digits: int) -> dict[str, Any]:
    """A metric that the base has too."""
    flips = {key: metric[key] for key in ("lost", "gained") if key in metric}
    return metric["value"] | {"base": (as_metric(metric.get("reference")) or {}).get("value"), "digits": digits} | flips


def verdict(path: Path, policy: str) -> dict[str, Any]:
    values = json.loads(quantkit("gate", path, "--policy", policy, "--json", codes=(0, 1)))
    failed = [check["check"] for check in values["checks"] if check["outcome"] == "fail"]
    return {"verdict": values["verdict"], "checks": len(values["checks"]), "failed": failed}


def quantkit(*arguments: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    """Run the command line; its stdout. Stops the whole run where it leaves with another code."""
    done = subprocess.run(
        [sys.executable, "-m", "quantkit.cli", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in codes:
        raise SystemExit(f"quantkit {arguments[0]} left with {done.returncode}")
    return done.stdout


def markdown(columns: dict[str, Any]) -> str:
    lines = ["| metric | base | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
    first = next(iter(columns.values()))["rows"]
    for name, shown in first.items():
        base = "" if shown.get("base") is None else f"{shown['base']:.{shown['digits']}f}"
        cells = [cell(column["rows"].get(name, {})) for column in columns.values()]
        lines.append(f"| {name} | {base} | " + " | ".join(cells) + " |")
    for name, show in _COSTS.items():
        lines.append(f"| {name} |  | " + " | ".join(show(column) for column in columns.values()) + " |")
    return "\n".join(lines)


def cell(shown: dict[str, Any]) -> str:
    if "value" not in shown:
        return ""
    digits = shown["digits"]
    text = number(shown["value"], digits)
    if "low" in shown:
        text += f" ({number(shown['low'], digits)} to {number(shown['high'], digits)})"
    if "lost" in shown:
        text += f", -{shown['lost']} +{shown['gained']}"
    return text


def number(value: float, digits: int) -> str:
    return f"{value:.2g}" if abs(value) >= 10_000 else f"{value:.{digits}f}"


def judged(column: dict[str, Any], policy: str) -> str:
    found = column["verdicts"][policy]
    return f"{found['verdict']}, {len(found['failed'])} of {found['checks']} checks fail"


_COSTS = {
    "wall time, s": lambda column: f"{column['seconds']:.0f}",
    "peak resident memory, GB": lambda column: f"{column['peak_resident_bytes'] / 1e9:.2f}",
    **{f"policy {policy}": (lambda column, policy=policy: judged(column, policy)) for policy in POLICIES},
}


if __name__ == "__main__":
    sys.exit(main())
