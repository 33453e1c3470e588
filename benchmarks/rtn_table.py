"""The classic table of round to nearest: perplexity against bits per stored weight, measured on packed files.

    python benchmarks/rtn_table.py                  measured on the demo's base; writes the JSON and the picture
    python benchmarks/rtn_table.py --published      simulation of a published run (see rtn_published.py)

Every recipe is converted into a temporary directory, loaded with `load_artifact` and scored on the same windows beside
the float32 base, which runs once a window. Exit code 1 where the table is not in the order that theory and practice
demand: int8 channel < int8 tensor; int4 group 64 zero-point < group 64 < channel << tensor.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rtn_published import MODEL, REVISION, run_published
from transformers import PreTrainedModel

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.evaluate.kept import Kept
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.protocol import load_windows
from quantkit.evaluate.scoring import Logits, Scores, fidelity_metrics, perplexity_metrics, score_windows, window_logits
from quantkit.manifest import Manifest, files_identity
from quantkit.pipeline import convert, source_files
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path("benchmarks/results/rtn_table.json")
PICTURE = Path("docs/img/rtn_table.png")

# What "<<" between a scale a channel and a scale a tensor means at 4 bits.
FAR_WORSE = 10
# The picture is cut here: no model of use lies above.
USABLE = 1000


@dataclass(frozen=True)
class Case:
    """One row: a shipped recipe, and the keys of it that are changed."""

    label: str
    recipe: str
    settings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join([self.recipe, *(f"--set {setting}" for setting in self.settings)])


CASES = [
    Case("int8 tensor", "rtn-int8-tensor"),
    Case("int8 channel", "rtn-int8"),
    Case("int4 tensor", "rtn-int4-tensor"),
    Case("int4 channel", "rtn-int4"),
    Case("int4 group 128", "rtn-g64", ("weights.group_size=128", "group_fallback=[64]")),
    Case("int4 group 64", "rtn-g64"),
    Case("int4 group 64 zp", "rtn-g64-zp"),
    Case("int4 group 32", "rtn-g64", ("weights.group_size=32",)),
]
# Perplexities of the left label must lie below those of the right one, by the factor.
ORDER = [
    ("float32", "int8 channel", 1.0),
    ("int8 channel", "int8 tensor", 1.0),
    ("int4 group 64 zp", "int4 group 64", 1.0),
    ("int4 group 64", "int4 channel", 1.0),
    ("int4 channel", "int4 tensor", FAR_WORSE),
]


def main() -> int:
    arguments = parse_arguments()
    if arguments.published:
        return run_published(arguments.model, arguments.revision, arguments.text, compare=arguments.compare)
    with torch.no_grad():
        result = measure(arguments.windows, arguments.length)
    problems = check_order(result)
    result["order"] = {"holds": not problems, "violations": problems}
    if not arguments.no_write:
        write_json(result, ROOT / RESULT)
        draw(result, ROOT / PICTURE)
        say(f"wrote {RESULT} and {PICTURE}")
    print(markdown(result))
    for problem in problems:
        say(f"the order is violated: {problem}")
    return 1 if problems else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=40, help="windows of wiki-en (default 40)")
    parser.add_argument("--length", type=int, default=512, help="tokens a window (default 512)")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    published = parser.add_argument_group("simulation of the published run (no file is written or read back)")
    published.add_argument("--published", action="store_true", help="simulate the published run and compare with it")
    published.add_argument("--model", default=MODEL, help=f"hub id or local directory (default {MODEL})")
    published.add_argument("--revision", default=REVISION, help="revision of a hub id")
    published.add_argument("--text", type=Path, help="local text file in place of the WikiText-2 raw test split")
    published.add_argument("--compare", action="store_true", help="a local copy of that model and text: check it too")
    return parser.parse_args()


def measure(count: int, length: int) -> dict[str, Any]:
    """Convert and score every case. The result as it is written, without the verdict on the order."""
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    windows = load_windows("wiki-en", checkpoint.tokenizer(), count, length)
    with packed_models(checkpoint) as models:
        started = time.time()
        base = base_logits(checkpoint)
        scores = {label: score_windows(model, windows.ids, base) for label, (model, _) in models.items()}
        say(f"scored in {time.time() - started:.0f} s")
        rows = [base_row(next(iter(scores.values())))]
        rows += [row(case, models[case.label][1], scores[case.label]) for case in CASES]
    return {
        "what": "perplexity of packed round-to-nearest artifacts against bits per stored weight, metadata counted",
        "command": "python benchmarks/rtn_table.py",
        "base": {"name": checkpoint.name, "dtype": "float32"},
        "protocol": windows.rules,
        "scored_tokens": windows.count,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers", "numpy")},
        "rows": rows,
    }


@contextmanager
def packed_models(checkpoint: Any) -> Iterator[dict[str, tuple[PreTrainedModel, Manifest]]]:
    """Every case converted and loaded from its packed file, by label; the files live as long as the context."""
    models = {}
    with tempfile.TemporaryDirectory(prefix="rtn-table-") as folder:
        for case in CASES:
            output = Path(folder) / case.label.replace(" ", "-")
            plan = make_plan(checkpoint, load_recipe(case.recipe, list(case.settings)))
            converted = convert(plan, output)
            models[case.label] = load_artifact(output, dtype=torch.float32), converted.manifest
            say(f"{case.key}: {converted.manifest.totals.bits_per_weight:.4f} bits, {converted.manifest.identity[:12]}")
            shutil.rmtree(output)  # the packed tensors are in memory now
        yield models


def base_logits(checkpoint: Checkpoint) -> Logits:
    """Logits of the float32 base, kept in the cache: it runs once a window, whatever is compared with it."""

    @cache
    def base() -> PreTrainedModel:
        return load_checkpoint(checkpoint, dtype=torch.float32)

    kept = Kept(files_identity(source_files(checkpoint)), torch.float32)
    return kept.logits(lambda window: window_logits(base(), window))


def base_row(scores: Scores) -> dict[str, Any]:
    assert scores.reference_nll is not None
    perplexity = perplexity_metrics(Scores(scores.reference_nll))["value"]
    return {"label": "float32", "recipe": None, "bits_per_weight": 32.0, "perplexity": rounded(perplexity)}


def row(case: Case, manifest: Manifest, scores: Scores) -> dict[str, Any]:
    perplexity, fidelity = perplexity_metrics(scores), fidelity_metrics(scores)
    return {
        "label": case.label,
        "recipe": case.key,
        "identity": manifest.identity,
        "weights_sha256": [record.sha256 for record in manifest.components["weights"]],
        "bits_per_weight": manifest.totals.bits_per_weight,
        "bits_per_weight_nominal": manifest.totals.bits_per_weight_nominal,
        "weight_bytes": manifest.totals.weight_bytes,
        "layers": len(manifest.layers),
        "fallbacks": len(manifest.fallbacks),
        "perplexity": rounded(perplexity["value"]),
        "perplexity_ratio": rounded(perplexity["ratio"]),
        "kl_mean": rounded(fidelity["kl_mean"]),
        "top1": rounded(fidelity["top1"]),
    }


def rounded(metric: dict[str, float]) -> dict[str, float]:
    """Six digits: the last ones depend on the processor."""
    return {name: float(f"{value:.6g}") for name, value in metric.items()}


def check_order(result: dict[str, Any]) -> list[str]:
    """The demanded inequalities that do not hold, one sentence each."""
    found = {row["label"]: row["perplexity"]["value"] for row in result["rows"]}
    problems = []
    for left, right, factor in ORDER:
        if not found[left] * factor < found[right]:
            by = f" by a factor of {factor:g}" if factor != 1 else ""
            problems.append(f"{left} {found[left]:.4f} should be below {right} {found[right]:.4f}{by}")
    return problems


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/rtn.md."""
    lines = [
        "| weights | recipe | bits per weight | perplexity | 95 % interval | mean KL | top-1 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for one in result["rows"]:
        value, low, high = (number(one["perplexity"].get(key)) for key in ("value", "low", "high"))
        recipe = f"`{one['recipe']}`" if one["recipe"] else "the base"
        kl = f"{one['kl_mean']['value']:.4f}" if "kl_mean" in one else "0"
        top1 = f"{100 * one['top1']['value']:.1f} %" if "top1" in one else "100 %"
        mark = "*" if one.get("fallbacks") else ""
        bits = f"{one['bits_per_weight']:.3f}{mark}"
        lines.append(f"| {one['label']} | {recipe} | {bits} | {value} | {low} to {high} | {kl} | {top1} |")
    notes = [f"\\* {one['label']}: {note(one)}" for one in result["rows"] if one.get("fallbacks")]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def note(one: dict[str, Any]) -> str:
    return f"{one['fallbacks']} of {one['layers']} linears fell back to a smaller group, which divides their width."


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Perplexity (log axis, cut between what works and what does not) against bits per stored weight."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base, *rows = result["rows"]
    figure, (broken, usable) = plt.subplots(
        2, 1, figsize=(8, 5.4), layout="constrained", sharex=True, height_ratios=[1, 4]
    )
    for axes, members in ((broken, [r for r in rows if not works(r)]), (usable, [r for r in rows if works(r)])):
        scatter(axes, members)
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    usable.axhline(base["perplexity"]["value"], color="grey", linestyle="--", linewidth=1, label="float32 base")
    usable.yaxis.set_major_formatter("{x:.0f}")
    usable.yaxis.set_minor_formatter("{x:.0f}")
    usable.legend(loc="upper right", fontsize=8)
    usable.set_xlim(3.8, 9.2)
    usable.set_xlabel("bits per stored weight, scales and zero-points counted")
    usable.set_ylabel("perplexity, wiki-en (log axis)")
    broken.set_ylim(USABLE, 1e8)
    broken.set_title(f"Round to nearest on {result['base']['name']}", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date or library version in the file: the same result is the same picture.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)


def works(row: dict[str, Any]) -> bool:
    return row["perplexity"]["value"] < USABLE


def scatter(axes: Any, rows: list[dict[str, Any]]) -> None:
    """One marker and colour a granularity, each point with its label."""
    for kind, shape, colour in (("tensor", "s", "tab:red"), ("channel", "^", "tab:orange"), ("group", "o", "tab:blue")):
        members = [row for row in rows if kind in row["label"]]
        points = [(row["bits_per_weight"], row["perplexity"]["value"]) for row in members]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=shape, color=colour, label=f"scale a {kind}", zorder=3)
        for row, point in zip(members, points, strict=True):
            # Below the marker where a finer group may stand at its right.
            place = (-4, -15) if row["label"].endswith("zp") else (8, -3)
            axes.annotate(row["label"], point, xytext=place, textcoords="offset points", fontsize=8)


def write_json(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
