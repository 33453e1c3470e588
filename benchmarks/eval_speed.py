"""How long an artifact takes beside its base: scoring windows, and decoding greedily.

    python benchmarks/eval_speed.py            some minutes on two cores; writes the JSON and the table in the docs

Both models in one process, in turns, so that what else the machine does meets both; the figure is the median of the
turns' ratios. Scoring: forwards of 4 x 512 and of 1 x 512 tokens in float32, codes unpacked one layer at a time in each
forward, and with unpacked weights kept as `quantkit eval` does. Decoding: 32 greedy tokens after a prompt of 64, in
bfloat16, with packed kernels, and a base of the same dtype.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from doc_tables import publish
from rtn_table import say
from transformers import PreTrainedModel

from quantkit.calibration import calibrate_from, load_set
from quantkit.checkpoint import open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.protocol import load_windows
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

RESULT = Path("benchmarks/results/eval_speed.json")
SETTINGS = ["weights.scale_dtype=bfloat16", "calibration.samples=8"]
PROMPT, NEW = 64, 32


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    result = {
        "what": "wall time of the artifact over that of the base, median of turns; below one the artifact is faster",
        "command": "python benchmarks/eval_speed.py",
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "rows": measure(arguments.turns),
    }
    if not arguments.no_write:
        publish(result, RESULT, "docs/evaluation.md", "eval speed", markdown(result["rows"]))
    print(markdown(result["rows"]))
    return 0


def measure(turns: int) -> list[dict[str, Any]]:
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    ids = load_windows("news-en", checkpoint.tokenizer(), 4, 512).ids
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("awq-g128", "smoothquant-w8a8"):
            recipe = load_recipe(name, SETTINGS)
            tokens = calibrate_from(load_set("encyclopaedia"), checkpoint.tokenizer(), 8, 512)
            path = convert(make_plan(checkpoint, recipe), Path(folder) / name, calibration=tokens).path
            whole = load_checkpoint(checkpoint, dtype=torch.float32)
            for label, keep in (("packed", 0), ("kept unpacked", 2 << 30)):
                model = load_artifact(path, dtype=torch.float32, keep=keep)
                for count in (4, 1):
                    what = f"scoring {count} x 512, float32, {label}"
                    rows.append(compare(name, what, turns, scoring(whole, ids[:count]), scoring(model, ids[:count])))
            base = load_checkpoint(checkpoint, dtype=torch.bfloat16)
            model = load_artifact(path, dtype=torch.bfloat16, fast=True)
            sides = decoding(base, ids[:1, :PROMPT]), decoding(model, ids[:1, :PROMPT])
            rows.append(compare(name, f"{NEW} greedy tokens after {PROMPT}, bfloat16", turns, *sides))
    return rows


def scoring(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], Any]:
    return lambda: model(input_ids=ids, use_cache=False).logits


def decoding(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], Any]:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def compare(recipe: str, what: str, turns: int, base: Callable[[], Any], artifact: Callable[[], Any]) -> dict[str, Any]:
    """Seconds of both in turns, after one of each that is not counted."""
    seconds = [(timed(base), timed(artifact)) for _ in range(turns + 1)][1:]
    say(f"{recipe}: {what}")
    return {
        "recipe": recipe,
        "what": what,
        "base_seconds": round(median(first for first, _ in seconds), 4),
        "artifact_seconds": round(median(second for _, second in seconds), 4),
        "ratio": round(median(second / first for first, second in seconds), 3),
    }


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| recipe | work | base s | artifact s | artifact / base |", "|---|---|---:|---:|---:|"]
    for row in rows:
        lines.append(
            f"| {row['recipe']} | {row['what']} | {row['base_seconds']:.2f} | {row['artifact_seconds']:.2f} "
            f"| {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
