"""Memory and speed of conversion and evaluation, on synthetic Llama-shaped checkpoints made here.

    python benchmarks/rtn_streaming.py              4 GB conversion and 1 GB evaluation; writes the JSON
    python benchmarks/rtn_streaming.py --small      the same at 1/16 of the size, to try the script; writes nothing

Conversion: `quantkit convert` with rtn-g128 against `cp -r` and `sha256sum` of the same checkpoint, in alternating
order. Evaluation: `quantkit eval` of the packed artifact against its bfloat16 base on one suite. Every measured command
is a fresh process whose peak resident size the kernel reports. Exit code 1 where a target is missed.

This process imports nothing heavy: Linux counts the peak of the process that starts a program as that program's own.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path("benchmarks/results/rtn_streaming.json")
RECIPE = "rtn-g128"
GB = 1e9

# Targets: convert against copy and hash; peak above an idle import, in bytes; packed against bfloat16 evaluation.
SLOWEST, LARGEST_PEAK, LARGEST_SHARE = 3.0, 1.2e9, 0.60

SUITE = """\
name: streaming
bos: none
perplexity: [{text: handbook-zh, windows: 4, length: 256}]
"""


@dataclass(frozen=True)
class Shape:
    """A synthetic model. Equal blocks of 62 million weights at full size; the vocabulary is that of single bytes."""

    blocks: int
    hidden: int
    intermediate: int
    blocks_a_shard: int = 4
    vocabulary: int = 512


@dataclass(frozen=True)
class Run:
    """One finished process: seconds on the wall, peak resident bytes."""

    seconds: float
    peak_bytes: int


def main() -> int:
    arguments = parse_arguments()
    if arguments.build is not None:
        from synthetic_model import build

        build(arguments.build, Shape(**json.loads(arguments.shape)))
        return 0
    hidden, intermediate = (512, 1856) if arguments.small else (2048, 7424)
    large, little = Shape(32, hidden, intermediate), Shape(8, hidden, intermediate)
    with working_directory(arguments.work, 3 * large_bytes(large)) as work:
        conversion = measure_conversion(work, large, arguments.repeats)
        evaluation = measure_evaluation(work, little, arguments.repeats)
    result = {
        "what": "memory and speed of rtn-g128 conversion and of packed evaluation, synthetic bfloat16 Llama shapes",
        "command": "python benchmarks/rtn_streaming.py",
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "conversion": conversion,
        "evaluation": evaluation,
        "targets": judge(conversion, evaluation),
    }
    if not arguments.small:
        path = ROOT / RESULT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        say(f"wrote {RESULT}")
    print(tables(result))
    return 0 if all(target["met"] for target in result["targets"]) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="directory for the checkpoints (default: the system's temporary one)")
    parser.add_argument("--repeats", type=int, default=2, help="how often everything is measured (default 2)")
    parser.add_argument("--small", action="store_true", help="1/16 of the size, to try the script")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    return parser.parse_args()


class working_directory:  # noqa: N801 - read as a function
    """A temporary directory inside `parent` that is removed at the end, on a disk with room for `needed` bytes."""

    def __init__(self, parent: Path | None, needed: int) -> None:
        self._parent, self._needed = parent or Path(tempfile.gettempdir()), needed

    def __enter__(self) -> Path:
        self._parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._parent).free
        if free < self._needed:
            sys.exit(f"{self._parent} has {free / GB:.1f} GB free and {self._needed / GB:.1f} are needed: give --work")
        self._folder = tempfile.TemporaryDirectory(dir=self._parent, prefix="rtn-streaming-")
        return Path(self._folder.name)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def large_bytes(shape: Shape) -> int:
    return 2 * shape.blocks * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)


def measure_conversion(work: Path, shape: Shape, repeats: int) -> dict[str, Any]:
    source = build_apart(work / "checkpoint", shape)
    steps: list[Callable[[], dict[str, Run]]] = [lambda: copy_and_hash(source, work), lambda: conversion(source, work)]
    found: dict[str, list[Run]] = {"idle": []}
    for repeat in range(repeats):
        found["idle"].append(run([sys.executable, "-c", "import quantkit, torch, quantkit.pipeline"]))
        for step in steps if repeat % 2 == 0 else reversed(steps):
            for name, one in step().items():
                found.setdefault(name, []).append(one)
    size = sum(path.stat().st_size for path in source.iterdir())
    shutil.rmtree(source)
    together = [cp.seconds + digest.seconds for cp, digest in zip(found["cp"], found["sha256sum"], strict=True)]
    ratios = [one.seconds / base for one, base in zip(found["convert"], together, strict=True)]
    idle = min(one.peak_bytes for one in found["idle"])
    return {
        "source_bytes": size,
        "blocks": shape.blocks,
        "seconds": {name: spread([one.seconds for one in runs]) for name, runs in found.items()},
        "peak_bytes": {name: spread([one.peak_bytes for one in runs]) for name, runs in found.items()},
        "time_ratio": spread(ratios),
        "peak_above_idle_bytes": spread([one.peak_bytes - idle for one in found["convert"]]),
    }


def copy_and_hash(source: Path, work: Path) -> dict[str, Run]:
    copy = work / "copy"
    copied = run(["cp", "-r", str(source), str(copy)])
    hashed = run(["sha256sum", *sorted(str(path) for path in copy.iterdir())])
    shutil.rmtree(copy)
    return {"cp": copied, "sha256sum": hashed}


def conversion(source: Path, work: Path) -> dict[str, Run]:
    output = work / "artifact"
    converted = run(quantkit("convert", str(source), "--recipe", RECIPE, "--output", str(output)))
    shutil.rmtree(output)
    return {"convert": converted}


def measure_evaluation(work: Path, shape: Shape, repeats: int) -> dict[str, Any]:
    built, artifact, suite = build_apart(work / "built", shape), work / "packed", work / "streaming.yaml"
    run(quantkit("convert", str(built), "--recipe", RECIPE, "--output", str(artifact)))
    # The run record names the source; moved away, it is not loaded beside the artifact as its reference.
    base = built.rename(work / "base")
    suite.write_text(SUITE, encoding="utf-8")
    found: dict[str, list[Run]] = {"base": [], "packed": []}
    for repeat in range(repeats):
        for model in (base, artifact) if repeat % 2 == 0 else (artifact, base):
            report = work / "report.json"
            found[model.name].append(run(quantkit("eval", str(model), "--suite", str(suite), "--output", str(report))))
            check_alone(report)
    return {
        "source_bytes": sum(path.stat().st_size for path in base.iterdir()),
        "artifact_bytes": sum(path.stat().st_size for path in artifact.iterdir()),
        "suite": SUITE,
        "seconds": {name: spread([one.seconds for one in runs]) for name, runs in found.items()},
        "peak_bytes": {name: spread([one.peak_bytes for one in runs]) for name, runs in found.items()},
        "memory_ratio": spread(
            [one.peak_bytes / beside.peak_bytes for one, beside in zip(found["packed"], found["base"], strict=True)]
        ),
    }


def check_alone(report: Path) -> None:
    if json.loads(report.read_bytes())["reference"] is not None:
        sys.exit("a reference was loaded beside the model: the memory is not that of one model")


def build_apart(path: Path, shape: Shape) -> Path:
    """Build a checkpoint in a process of its own, so that this one stays small."""
    say(f"building {path.name}: {large_bytes(shape) / GB:.2f} GB in {shape.blocks} blocks")
    run([sys.executable, __file__, "--build", str(path), "--shape", json.dumps(asdict(shape))])
    return path


def quantkit(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "quantkit.cli", *arguments]


def run(command: list[str]) -> Run:
    """Run a command to its end, its output aside. Exits where it fails."""
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')}")
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    say(f"{seconds:7.1f} s  {peak / 1e6:7.0f} MB  {label(command)}")
    return Run(seconds, peak)


def label(command: list[str]) -> str:
    return " ".join(Path(word).name if "/" in word else word for word in command)[:80]


def spread(values: list[float]) -> dict[str, float]:
    return {"min": round(min(values), 4), "median": round(statistics.median(values), 4)}


def judge(conversion: dict[str, Any], evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target with the median that is held against it."""
    rows = [
        ("convert / (cp -r + sha256sum), seconds", conversion["time_ratio"], SLOWEST),
        ("convert, peak above an idle import, bytes", conversion["peak_above_idle_bytes"], LARGEST_PEAK),
        ("eval, peak of packed / peak of bfloat16 base", evaluation["memory_ratio"], LARGEST_SHARE),
    ]
    return [{"what": what, "target": target, "met": value["median"] < target, **value} for what, value, target in rows]


def tables(result: dict[str, Any]) -> str:
    """The tables of docs/rtn.md."""
    conversion, evaluation = result["conversion"], result["evaluation"]
    lines = ["| target | at most | min | median | met |", "|---|---:|---:|---:|---|"]
    for one in result["targets"]:
        limit, low, middle = (amount(one[key], one["what"]) for key in ("target", "min", "median"))
        lines.append(f"| {one['what']} | {limit} | {low} | {middle} | {'yes' if one['met'] else 'NO'} |")
    lines += ["", "| process | seconds, min | median | peak resident, min | median |", "|---|---:|---:|---:|---:|"]
    for part, names in ((conversion, ("idle", "cp", "sha256sum", "convert")), (evaluation, ("base", "packed"))):
        where = f"{part['source_bytes'] / GB:.2f} GB"
        for name in names:
            seconds, peak = part["seconds"][name], part["peak_bytes"][name]
            size = f"{peak['min'] / 1e6:.0f} MB | {peak['median'] / 1e6:.0f} MB"
            lines.append(f"| {described(name, where)} | {seconds['min']:.1f} | {seconds['median']:.1f} | {size} |")
    return "\n".join(lines)


def amount(value: float, what: str) -> str:
    return f"{value / GB:.2f} GB" if what.endswith("bytes") else f"{value:.2f}"


def described(name: str, size: str) -> str:
    return {
        "idle": "`import quantkit, torch, quantkit.pipeline`",
        "cp": f"`cp -r`, {size}",
        "sha256sum": f"`sha256sum`, {size}",
        "convert": f"`quantkit convert --recipe {RECIPE}`, {size}",
        "base": f"`quantkit eval`, bfloat16 base of {size}",
        "packed": f"`quantkit eval`, its {RECIPE} artifact",
    }[name]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
