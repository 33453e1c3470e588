"""Conversions that are killed again and again: do they end in the same bytes, and is half an artifact ever visible?

    python benchmarks/kill_loop.py                      50 conversions, some minutes; writes the JSON and the table
    python benchmarks/kill_loop.py --conversions 5 --no-write

Each conversion is a process that SIGKILL ends after a random part of the time that it takes undisturbed, and that is
started again with `resume`: one to three kills, then it may end. While it runs, the output is looked at all the time:
where it exists, it must be whole. Recipes take turns, on random models. Exit code 1 where an identity differs from that
of the undisturbed conversion, or where an output was seen that does not verify.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from doc_tables import publish
from rtn_table import say
from synthetic_model import build

from quantkit.artifact import verify
from quantkit.calibration import Calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.workspace import Workspace

RESULT = Path("benchmarks/results/kill_loop.json")
DOCUMENT = "docs/reliability.md"
SEED = 20240
MOST_KILLS = 3
# How often the output is looked at, in seconds.
LOOK = 0.001
# Longer than any of these conversions takes: one that hangs is an error.
PATIENCE = 300


@dataclass(frozen=True)
class Shape:
    """A random model. Data-free conversion is fast, so its model has more blocks."""

    blocks: int
    hidden: int = 128
    intermediate: int = 384
    blocks_a_shard: int = 8
    vocabulary: int = 512


@dataclass(frozen=True)
class Case:
    """A recipe as it is run here: small enough to take about a second."""

    recipe: str
    shape: Shape
    settings: tuple[str, ...] = ()


CASES = [
    Case("rtn-g64-zp", Shape(48)),
    Case("gptq-g64", Shape(4)),
    Case("awq-gptq-g64", Shape(4)),
    Case("smoothquant-w8a8", Shape(4)),
    Case("awq-gptq-signround-g64", Shape(4), ("passes=[awq, gptq, {signround: {steps: 5}}]", "weights.bits=3")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("forkserver")
    # Processes start from one that has imported everything: the time in which they can be killed is that of their work.
    context.set_forkserver_preload(
        ["quantkit.pipeline", "quantkit.calibration", "transformers.models.llama.modeling_llama"]
    )
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as name:
        loop = Loop(Path(name), random.Random(arguments.seed), context)
        counts = {case.recipe: Counter({"conversions": 0}) for case in CASES}
        for number in range(arguments.conversions):
            case = CASES[number % len(CASES)]
            counts[case.recipe].update(loop.conversion(case, number))
            say(f"{number + 1} of {arguments.conversions}: {case.recipe} {dict(counts[case.recipe])}")
    result = {
        "what": "conversions ended by SIGKILL at random times and resumed until done",
        "command": "python benchmarks/kill_loop.py",
        "seed": arguments.seed,
        "conversions": arguments.conversions,
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "recipes": {recipe: {key: found[key] for key in COUNTED} for recipe, found in counts.items()},
    }
    if not arguments.no_write:
        publish(result, RESULT, DOCUMENT, "kill loop", markdown(result))
    print(markdown(result))
    return 0 if all(good(found) for found in result["recipes"].values()) else 1


# What is counted of each recipe, and how the table calls it.
COUNTED = {
    "conversions": "conversions",
    "kills": "kills",
    "before_a_step": "with nothing saved yet",
    "with_steps": "with saved work to go on from",
    "after_the_rename": "with the artifact complete",
    "looks": "looks at the output",
    "half_artifacts": "half artifacts seen",
    "same_identity": "same identity",
}


def good(found: dict[str, int]) -> bool:
    return found["same_identity"] == found["conversions"] and not found["half_artifacts"]


class Loop:
    """Runs conversions in processes of their own in `folder`, and kills them at times drawn from `dice`."""

    def __init__(self, folder: Path, dice: random.Random, context: Any) -> None:
        self.folder, self.dice, self.context = folder, dice, context
        # Of each recipe: the identity and the seconds of a conversion that nobody disturbs.
        self.undisturbed: dict[str, tuple[str, float]] = {}

    def conversion(self, case: Case, number: int) -> Counter[str]:
        """One conversion, killed one to `MOST_KILLS` times: what came of it, counted."""
        identity, seconds = self.reference(case)
        output = self.folder / f"{number}-{case.recipe}"
        counts = Counter({"conversions": 1})
        wanted = self.dice.randint(1, MOST_KILLS)
        while counts["kills"] < wanted and not (counts["kills"] and output.exists()):
            shutil.rmtree(output, ignore_errors=True)  # it was done before it could be killed: begin again
            if self.run(case, output, counts, self.dice.uniform(0, seconds)) is None:
                counts["kills"] += 1
                counts[left_behind(output)] += 1
        if not output.exists() and self.run(case, output, counts, None) is None:
            raise SystemExit(f"{case.recipe}: the conversion did not end in {PATIENCE} s")
        whole = verify(output) == [] and read_manifest(output).identity == identity
        counts["same_identity"] += whole
        shutil.rmtree(output)
        return counts

    def reference(self, case: Case) -> tuple[str, float]:
        if case.recipe not in self.undisturbed:
            if not self.source(case).exists():
                build(self.source(case), case.shape)
            output = self.folder / f"undisturbed-{case.recipe}"
            seconds = self.run(case, output, Counter(), None)
            if seconds is None:
                raise SystemExit(f"{case.recipe}: the conversion did not end in {PATIENCE} s")
            self.undisturbed[case.recipe] = read_manifest(output).identity, seconds
        return self.undisturbed[case.recipe]

    def source(self, case: Case) -> Path:
        return self.folder / "sources" / f"random-{case.shape.blocks}"

    def run(self, case: Case, output: Path, counts: Counter[str], kill_after: float | None) -> float | None:
        """A process that converts, killed after so many seconds if it still runs; the seconds to its end, or None."""
        look = Look(output, counts)
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=child, args=(case, self.source(case), output, theirs))
        process.start()
        theirs.close()
        ours.recv()  # it has opened the source and begins
        started = time.monotonic()
        while process.is_alive() and time.monotonic() - started < (PATIENCE if kill_after is None else kill_after):
            look()
            process.join(LOOK)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        seconds = time.monotonic() - started
        look()
        if process.exitcode not in {0, -signal.SIGKILL}:
            raise SystemExit(f"{case.recipe}: the conversion failed with exit code {process.exitcode}")
        return seconds if process.exitcode == 0 else None


class Look:
    """Looks at an output: where it stands, all of it must be there. It is verified when it is first seen."""

    def __init__(self, output: Path, counts: Counter[str]) -> None:
        self._output, self._counts, self._seen = output, counts, False

    def __call__(self) -> None:
        self._counts["looks"] += 1
        if not self._seen and self._output.exists():
            self._seen = True
            try:
                self._counts["half_artifacts"] += verify(self._output) != []
            except Exception:
                self._counts["half_artifacts"] += 1


def left_behind(output: Path) -> str:
    """What a kill has left, as it is counted."""
    if output.exists():
        return "after_the_rename"
    return "before_a_step" if Workspace(output).unfinished() is None else "with_steps"


def child(case: Case, source: Path, output: Path, ready: Connection) -> None:
    torch.set_num_threads(1)
    plan = make_plan(open_checkpoint(str(source)), load_recipe(case.recipe, list(case.settings)))
    ids = torch.randint(0, case.shape.vocabulary, (8, 96), generator=torch.Generator().manual_seed(1))
    calibration = Calibration(ids, {"set": "random"}) if plan.recipe.calibrated else None
    ready.send("ready")
    convert(plan, output, calibration=calibration, resume=True)


def markdown(result: dict[str, Any]) -> str:
    rows = [[recipe, *(found[key] for key in COUNTED)] for recipe, found in result["recipes"].items()]
    rows.append(["all", *(sum(found[key] for found in result["recipes"].values()) for key in COUNTED)])
    lines = [["recipe", *COUNTED.values()], ["---", *["---:"] * len(COUNTED)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
