"""What each calibrated recipe gives at equal bits, and what each ingredient adds, measured on packed files.

    python benchmarks/quality.py                    every case; about an hour on two cores
    python benchmarks/quality.py --only gptq        the cases whose label holds a word

On two models. The demo's base: calibration is plain encyclopaedia text, judgement is news text that calibration never
saw, 40 windows of 512 tokens. A small GPT-2 written down as an OPT (second_model.py): sequences of 128 tokens that it
draws itself, other ones for calibration than for judgement. All in float32, against the float32 base, which runs once a
window. Cases that are measured alone are merged into the committed result, each with the identity of its artifact.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from doc_tables import publish
from rtn_table import ROOT, base_logits, rounded, say
from second_model import drawn, second_checkpoint

from quantkit.calibration import Calibration, calibrate_from, load_set
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.protocol import load_windows
from quantkit.evaluate.scoring import Logits, Scores, fidelity_metrics, perplexity_metrics, score_windows
from quantkit.manifest import Manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

RESULT = Path("benchmarks/results/quality.json")


@dataclass(frozen=True)
class Case:
    """One row: a recipe, the keys of it that are changed, and the number of calibration samples of 512 tokens."""

    label: str
    recipe: str
    samples: int = 32
    settings: tuple[str, ...] = ()


_MINMAX = "passes=[{gptq: {scales: minmax, sweeps: 0}}]"
_BY_LAYER = "passes=[{awq: {n_grid: 10}}, gptq]"
_LEARNED_BY_LOSS = "passes=[{awq: {n_grid: 10}}, {gptq: {objective: model}}, signround]"
_SYMMETRIC, _THREE_BITS = "weights.symmetric=true", "weights.bits=3"
_SEARCHED = "passes=[{gptq: {sweeps: 0}}]"
_PUBLISHED = "passes=[{awq: {scales: minmax, n_grid: 20}}, {rtn: {scales: clipped}}]"
CASES = [
    Case("rtn g64 zp, min-max", "rtn-g64-zp", 0),
    Case("rtn g64 zp, searched", "awq-g64", 32, ("passes=[{rtn: {scales: searched}}]",)),
    Case("gptq g64 zp, min-max", "gptq-g64-zp", 32, (_MINMAX,)),
    Case("gptq g64 zp, searched", "gptq-g64-zp", 32, (_SEARCHED,)),
    Case("gptq-g64-zp", "gptq-g64-zp"),
    Case("gptq-g64", "gptq-g64"),
    Case("awq-g64", "awq-g64"),
    Case("awq g64 zp, as published", "awq-g64", 32, (_PUBLISHED,)),
    Case("awq-gptq g64 zp by layer, 32", "awq-gptq-g64", 32, (_BY_LAYER,)),
    Case("awq-gptq-g64, 32", "awq-gptq-g64"),
    Case("awq-gptq g64 zp by layer", "awq-gptq-g64", 128, (_BY_LAYER,)),
    Case("awq-gptq-g64", "awq-gptq-g64", 128),
    Case("awq-gptq-g64, 256", "awq-gptq-g64", 256),
    Case("awq-gptq-signround-g64", "awq-gptq-signround-g64", 128),
    Case("awq-gptq-signround g64 zp by loss", "awq-gptq-signround-g64", 128, (_LEARNED_BY_LOSS,)),
    Case("awq-gptq-signround g64 symmetric", "awq-gptq-signround-g64", 128, (_SYMMETRIC,)),
    Case("awq-gptq g64 symmetric by layer", "awq-gptq-g64", 128, (_BY_LAYER, _SYMMETRIC)),
    Case("awq-gptq g64 symmetric", "awq-gptq-g64", 128, (_SYMMETRIC,)),
    Case("gptq g64 zp 3 bits", "gptq-g64-zp", 128, (_THREE_BITS,)),
    Case("awq-gptq g64 3 bits by layer", "awq-gptq-g64", 128, (_BY_LAYER, _THREE_BITS)),
    Case("awq-gptq g64 3 bits", "awq-gptq-g64", 128, (_THREE_BITS,)),
    Case("awq-gptq-signround g64 3 bits", "awq-gptq-signround-g64", 128, (_THREE_BITS,)),
    Case("w8a8 plain", "smoothquant-w8a8", 0, ("passes=[rtn]", "calibration=null")),
    Case("w8a8 alpha 0.5", "smoothquant-w8a8", 32, ("passes=[{smoothquant: {alpha: 0.5}}, rtn]",)),
    Case("w8a8 alpha 0.8", "smoothquant-w8a8", 32, ("passes=[{smoothquant: {alpha: 0.8}}, rtn]",)),
    Case("smoothquant-w8a8", "smoothquant-w8a8"),
    Case("gptq-w8a8", "gptq-w8a8"),
]


# Unpacked weights stay in memory, all of them.
_ALL = 1 << 40


@dataclass(frozen=True)
class Subject:
    """A base, its logits, what calibrates it (so many samples of it), and the ids `[windows, length]` that judge it."""

    checkpoint: Checkpoint
    logits: Logits
    calibrate: Callable[[int], Calibration]
    ids: torch.Tensor
    about: dict[str, Any]


def language_model(windows: int) -> Subject:
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    tokenizer = checkpoint.tokenizer()
    judged = load_windows("news-en", tokenizer, windows, 512)
    about = {"calibration": "encyclopaedia, samples of 512 tokens", "protocol": judged.rules}
    return Subject(
        checkpoint,
        base_logits(checkpoint),
        lambda samples: calibrate_from(load_set("encyclopaedia"), tokenizer, samples, 512),
        judged.ids,
        about,
    )


def drawing_model(windows: int) -> Subject:
    checkpoint = open_checkpoint(str(second_checkpoint()))
    model = load_checkpoint(checkpoint, dtype=torch.float32)

    def calibrate(samples: int) -> Calibration:
        ids = drawn(model, samples, 128, seed=1)
        return Calibration(ids, {"set": "drawn by the model, seed 1", "samples": samples, "length": 128})

    about = {"calibration": "drawn by the model, samples of 128 tokens", "protocol": {"drawn": windows, "seed": 2}}
    return Subject(checkpoint, base_logits(checkpoint), calibrate, drawn(model, windows, 128, seed=2), about)


SUBJECTS = {"smollm2": language_model, "microformer": drawing_model}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="only the cases whose label holds this; may be given again")
    parser.add_argument("--model", choices=SUBJECTS, action="append", help="only this model")
    parser.add_argument("--windows", type=int, default=40, help="windows that judge (default 40)")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    labels = {case.label for case in CASES}
    cases = [case for case in CASES if not arguments.only or any(fits(word, case, labels) for word in arguments.only)]
    for name in arguments.model or SUBJECTS:
        path = RESULT.with_stem(f"{RESULT.stem}_{name}")
        subject = SUBJECTS[name](arguments.windows)
        for case in cases:
            result = measure(case, subject)
            print(markdown(result), flush=True)
            if not arguments.no_write:  # after each case: the next one may take an hour
                result = merged_rows(result, ROOT / path, [case.label for case in CASES])
                publish(result, path, "docs/quality.md", f"quality {name}", markdown(result))
    return 0


def fits(word: str, case: Case, labels: set[str]) -> bool:
    """A whole label names its case; any other word names all cases whose label holds it."""
    return word == case.label if word in labels else word in case.label


@torch.no_grad()
def measure(case: Case, subject: Subject) -> dict[str, Any]:
    """Convert a case, and score it beside the base: a result of one row."""
    checkpoint = subject.checkpoint
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        output = Path(folder) / "artifact"
        made = run(case, subject, output)
        scores = score_windows(load_artifact(output, dtype=torch.float32, keep=_ALL), subject.ids, subject.logits)
    return {
        "what": "fidelity of packed artifacts to their float32 base on text that calibration never saw",
        "command": "python benchmarks/quality.py",
        "base": {"name": checkpoint.name, "dtype": "float32"},
        **subject.about,
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers", "numpy")},
        "rows": [row(case, *made, scores)],
    }


def run(case: Case, subject: Subject, output: Path) -> tuple[Manifest, dict[str, float]]:
    """Convert one case; its manifest, and the seconds that it took."""
    recipe = load_recipe(case.recipe, list(case.settings))
    plan = make_plan(subject.checkpoint, recipe)
    calibration = subject.calibrate(case.samples) if recipe.calibrated else None
    wall, cpu = time.time(), time.process_time()
    manifest = convert(plan, output, calibration=calibration).manifest
    seconds = {"wall": round(time.time() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}
    say(f"{case.label}: converted in {seconds['wall']} s wall, {seconds['cpu']} s CPU")
    return manifest, seconds


def row(case: Case, manifest: Manifest, seconds: dict[str, float], scores: Scores) -> dict[str, Any]:
    return {
        "label": case.label,
        "recipe": " ".join([case.recipe, *(f"--set '{setting}'" for setting in case.settings)]),
        "samples": case.samples,
        "identity": manifest.identity,
        "bits_per_weight": manifest.totals.bits_per_weight,
        "fallbacks": len(manifest.fallbacks),
        "seconds": seconds,
        **figures(scores),
    }


def figures(scores: Scores) -> dict[str, Any]:
    """What every table here says of a model, with intervals."""
    perplexity, fidelity = perplexity_metrics(scores), fidelity_metrics(scores)
    return {
        "kl_mean": rounded(fidelity["kl_mean"]),
        "top1": rounded(fidelity["top1"]),
        "perplexity": rounded(perplexity["value"]),
        "perplexity_base": rounded(perplexity["reference"]),
    }


def merged_rows(result: dict[str, Any], path: Path, labels: list[str]) -> dict[str, Any]:
    """The committed result with these rows put in, in the order of `labels`, where it had the same protocol."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": [], "protocol": None}
    if old["protocol"] != result["protocol"]:
        return result
    rows = {one["label"]: one for one in old["rows"]} | {one["label"]: one for one in result["rows"]}
    return result | {"rows": [rows[label] for label in labels if label in rows]}


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/quality.md."""
    lines = [
        "| case | samples | bits per weight | KL | 95 % interval | top-1 | perplexity | CPU s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in result["rows"]:
        kl = one["kl_mean"]
        lines.append(
            f"| {one['label']} | {one['samples'] or '-'} | {one['bits_per_weight']:.3f} | {kl['value']:.4f} | "
            f"{kl['low']:.4f} to {kl['high']:.4f} | {100 * one['top1']['value']:.1f} % | "
            f"{one['perplexity']['value']:.2f} | {one['seconds']['cpu']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
