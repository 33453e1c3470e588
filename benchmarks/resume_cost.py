"""What it costs to go on with an interrupted calibrated conversion: how long until it is again where it was.

    python benchmarks/resume_cost.py                 some minutes on two cores; writes the JSON and the table

The demo's base is converted and interrupted behind five of its blocks, then resumed. Measured is the time from the
start of either run to the first tensor of the next block: the first run quantises all blocks on the way, the second
runs the finished ones once. Times are those of the processor, all cores together, so that other work on the machine
counts less.
"""

import argparse
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from doc_tables import publish
from rtn_table import say

from quantkit.calibration import recipe_calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

RESULT = Path("benchmarks/results/resume_cost.json")
DOCUMENT = "docs/reliability.md"
RECIPES = ["gptq-g64", "awq-gptq-g64"]
SETTINGS = ["calibration.samples=16"]
# Both times grow with the number of blocks, so that a part of them tells the share as well as all.
DONE = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    rows = [row(recipe) for recipe in RECIPES]
    result = {
        "what": "processor seconds until five blocks are done, when quantising them and when resuming behind them",
        "command": "python benchmarks/resume_cost.py",
        "settings": SETTINGS,
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "rows": rows,
    }
    if not arguments.no_write:
        publish(result, RESULT, DOCUMENT, "resume cost", markdown(rows))
    print(markdown(rows))
    return 0


def row(recipe: str) -> dict[str, Any]:
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    plan = make_plan(checkpoint, load_recipe(recipe, SETTINGS))
    calibration = recipe_calibration(plan.recipe, checkpoint)
    with tempfile.TemporaryDirectory(prefix="resume-cost-") as folder:
        first, again = (
            seconds_to_next(plan, Path(folder) / "out", calibration=calibration, resume=resume)
            for resume in (False, True)
        )
    say(f"{recipe}: {first:.0f} s, again {again:.0f} s")
    return {"recipe": recipe, "first": round(first, 1), "again": round(again, 1), "share": round(again / first, 3)}


def seconds_to_next(plan: Any, output: Path, **options: Any) -> float:
    """Processor seconds to the first tensor behind the finished blocks, where the conversion is interrupted."""
    started = time.process_time()

    def progress(name: str, _: int) -> None:
        if name.startswith(f"model.layers.{DONE}."):
            raise KeyboardInterrupt

    try:
        convert(plan, output, progress=progress, **options)
    except KeyboardInterrupt:
        return time.process_time() - started
    raise SystemExit(f"the model has no block {DONE}")


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["| recipe, 16 samples of 512 tokens | five blocks done | resumed, at the same place again | share |"]
    lines.append("|---|---:|---:|---:|")
    for one in rows:
        lines.append(f"| {one['recipe']} | {one['first']:.0f} s | {one['again']:.0f} s | {100 * one['share']:.0f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
