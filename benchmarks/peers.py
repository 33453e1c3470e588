"""quantkit beside llm-compressor: CPU seconds and damage on one model, the same calibration tokens, in one run.

    python benchmarks/peers.py                     about an hour; installs the peer into build/peer-env
    python benchmarks/peers.py --only gptq         the pairs whose label holds a word
    python benchmarks/peers.py --peer-python PATH  an environment that has llmcompressor already

Each tool runs in its own environment, in a process of its own, one after the other, timed from start to saved files:
quantkit before the peer and once more behind it, because a short run falls wholly into a slow minute of a shared
machine where a long one does not. Its seconds are the mean of both.
The peer is handed tokens and quantkit the text; how much of the peer's time its `oneshot` call took, without starting,
loading and saving, stands beside it. Both are scored beside the float32 base on the windows of quality.py, decoded from
the files that the tools wrote.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from doc_tables import publish
from quality import figures, merged_rows
from rtn_table import ROOT, base_logits, say
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quantkit.affine import dequantize
from quantkit.calibration import calibrate_from, load_set
from quantkit.checkpoint import open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.evaluate.loader import load_artifact
from quantkit.evaluate.protocol import load_windows
from quantkit.evaluate.scoring import score_windows
from quantkit.formats import FORMATS
from quantkit.recipe import load_recipe
from quantkit.types import QuantScheme

RESULT = Path("benchmarks/results/peers.json")
WORKER = Path(__file__).with_name("peer_llmcompressor.py")
PEER = "llmcompressor==0.14.0.1"
SAMPLES, LENGTH = 32, 512


@dataclass(frozen=True)
class Pair:
    """One comparison. peer: a case of the worker; ours: a shipped recipe. share: of the peer's CPU seconds, at most."""

    label: str
    peer: str
    ours: str
    share: float


PAIRS = [
    Pair("rtn zero-point", "rtn-zp", "rtn-g64-zp", math.inf),
    Pair("gptq symmetric", "gptq-sym", "gptq-g64", 0.5),
    Pair("awq zero-point", "awq-zp", "awq-g64", 0.1),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only the pairs whose label holds this")
    parser.add_argument("--windows", type=int, default=40, help="windows of news-en that judge (default 40)")
    parser.add_argument("--peer-python", type=Path, help="interpreter that can import llmcompressor")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    pairs = [pair for pair in PAIRS if not arguments.only or arguments.only in pair.label]
    result = measure(pairs, arguments.peer_python or make_environment(ROOT / "build/peer-env"), arguments.windows)
    if not arguments.no_write:
        result = merged_rows(result, ROOT / RESULT, [f"{pair.label}, {tool}" for pair in PAIRS for tool in TOOLS])
        publish(result, RESULT, "docs/quality.md", "peers", markdown(result))
    print(markdown(result))
    judged = [pair for pair in pairs if pair.share < math.inf]
    for pair in judged:
        say(f"{pair.label}: quantkit took {share(result, pair):.3f} of the peer's CPU s, the target is {pair.share}")
    return int(any(share(result, pair) > pair.share for pair in judged))


TOOLS = ("llm-compressor", "quantkit")


def make_environment(path: Path) -> Path:
    """An environment with the peer; made where there is none. torch first, or its GPU build would come."""
    python = path / "bin/python"
    if not (path / "made").is_file():
        say(f"installing {PEER} into {path}")
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        torch_version = "torch==" + version("torch").partition("+")[0]
        for wanted in ([torch_version], [PEER, torch_version]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (path / "made").touch()
    return python


@torch.no_grad()
def measure(pairs: list[Pair], peer_python: Path, count: int) -> dict[str, Any]:
    """Run both tools for every pair, then score all of them beside the base."""
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    ids = calibrate_from(load_set("encyclopaedia"), checkpoint.tokenizer(), SAMPLES, LENGTH).ids
    windows = load_windows("news-en", checkpoint.tokenizer(), count, 512)
    models, costs = {}, {}
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        folder = Path(name)
        (folder / "tokens.json").write_text(json.dumps(ids.tolist()))
        for pair in pairs:
            theirs, ours, again = (folder / part for part in (pair.peer, pair.ours, f"{pair.ours}-again"))
            command = [peer_python, WORKER, checkpoint.directory, folder / "tokens.json", pair.peer, theirs]
            before = run([*converting(pair, checkpoint.directory), "--output", ours])[1]
            printed, cost = run(command)
            after = run([*converting(pair, checkpoint.directory), "--output", again])[1]
            costs[f"{pair.label}, llm-compressor"] = cost | json.loads(printed.splitlines()[-1])
            costs[f"{pair.label}, quantkit"] = before | {"seconds": mean([before["seconds"], after["seconds"]])}
            say(f"{pair.label}: CPU s of quantkit, llm-compressor, and quantkit again:")
            say(", ".join(str(one["seconds"]["cpu"]) for one in (before, cost, after)))
            models[f"{pair.label}, llm-compressor"] = decoded(theirs)
            models[f"{pair.label}, quantkit"] = load_artifact(ours, dtype=torch.float32)
        base = base_logits(checkpoint)
        scores = {label: score_windows(model, windows.ids, base) for label, model in models.items()}
    return {
        "what": "two tools, one base, the same calibration tokens, 4 bits in groups of 64",
        "command": "python benchmarks/peers.py",
        "base": {"name": checkpoint.name, "dtype": "float32"},
        "protocol": windows.rules,
        "calibration": f"encyclopaedia, {SAMPLES} x {LENGTH} tokens",
        "cpus": os.cpu_count(),
        "rows": [{"label": label, **cost, **figures(scores[label])} for label, cost in costs.items()],
    }


def converting(pair: Pair, source: Path) -> list[Any]:
    """The command of ours, without its output."""
    command = [Path(sys.executable).with_name("quantkit"), "convert", source, "--recipe", pair.ours]
    if load_recipe(pair.ours).calibrated:
        command += ["--calib", "encyclopaedia", "--set", f"calibration.samples={SAMPLES}"]
        command += ["--set", f"calibration.sequence_length={LENGTH}"]
    return command


def mean(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of seconds by kind."""
    return {kind: round(sum(one[kind] for one in runs) / len(runs), 1) for kind in runs[0]}


def run(command: list[Any]) -> tuple[str, dict[str, Any]]:
    """Run a command; its standard output, and its wall and CPU seconds with the versions here."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin would count as work
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(
        [str(part) for part in command], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, {
        "seconds": {"wall": round(time.time() - started, 1), "cpu": round(cpu, 1)},
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
    }


def decoded(folder: Path) -> PreTrainedModel:
    """The peer's file as a dense float32 model, decoded by the book: readers disagree about its zero-points."""
    format = FORMATS["compressed-tensors"]
    stored = load_file(folder / "model.safetensors")
    state = {name: tensor for name, tensor in stored.items() if not name.rpartition(".")[2].startswith("weight_")}
    for name in [name.removesuffix(".weight_packed") for name in stored if name.endswith(".weight_packed")]:
        parts = {key.removeprefix(name + "."): value for key, value in stored.items() if key.startswith(name + ".")}
        dtype = str(parts["weight_scale"].dtype).removeprefix("torch.")
        scheme = QuantScheme(4, "group", 64, "weight_zero_point" not in parts, dtype)
        state[f"{name}.weight"] = dequantize(format.unpack(parts, scheme))
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"{folder} holds other tensors than the model: {missing} {unexpected}")
    model.tie_weights()
    return model


def share(result: dict[str, Any], pair: Pair) -> float:
    """quantkit's CPU seconds over the peer's."""
    theirs, ours = (row_of(result, f"{pair.label}, {tool}")["seconds"]["cpu"] for tool in TOOLS)
    return float(ours / theirs)


def row_of(result: dict[str, Any], label: str) -> dict[str, Any]:
    return next(row for row in result["rows"] if row["label"] == label)


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/quality.md."""
    lines = ["| recipe, tool | CPU s | `oneshot` alone | wall s | KL | top-1 | perplexity |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['label']} | {row['seconds']['cpu']:.0f} | "
        f"{format(row['oneshot_seconds']['cpu'], '.0f') if 'oneshot_seconds' in row else ''} | "
        f"{row['seconds']['wall']:.0f} | "
        f"{row['kl_mean']['value']:.4f} | {100 * row['top1']['value']:.1f} % | {row['perplexity']['value']:.2f} |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
