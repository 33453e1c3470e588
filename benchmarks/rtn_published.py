"""A published run of naive quantisation on SmolLM2-135M, simulated: `python benchmarks/rtn_table.py --published`.

SIMULATION: weights and activations are rounded in float32 in memory. No file is packed or read, so nothing here is a
measurement of an artifact, and nothing of it is used elsewhere. The arithmetic is that of the published run, not ours:

    symmetric    scale = max |w| / (2**(b-1) - 1), q = round(w / scale)
    zero-point   scale = (hi - lo) / (2**b - 1), zero = round(-lo / scale), lo and hi the plain minimum and maximum
    activations  int8, symmetric, one scale for the whole tensor that enters a linear, found as it arrives
    SmoothQuant  s = max |x| ** alpha / max |w| ** (1 - alpha) at norms that feed linears, |x| from the same windows

Scales stay float32. Windows: the first 8 of 512 tokens of the WikiText-2 raw test split, rows joined by blank lines.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from quantkit.algorithms.smoothquant import smooth_scales
from quantkit.blocks import block_linears
from quantkit.checkpoint import open_checkpoint
from quantkit.evaluate.loader import load_checkpoint
from quantkit.evaluate.protocol import cut_windows
from quantkit.evaluate.scoring import score_windows
from quantkit.texts import Text

MODEL = "HuggingFaceTB/SmolLM2-135M"
REVISION = "93efa2f097d58c2a74874c7e644dbc9b0cee75a2"
WINDOWS, LENGTH, LINEARS = 8, 512, 210

# Quoted, not measured here.
PUBLISHED = {
    "float32": 20.8462,
    "int8 tensor": 21.6252,
    "int8 channel": 20.9937,
    "int4 tensor": 5834512.49,
    "int4 channel": 46.2519,
    "int4 group 64": 29.1763,
    "int4 group 64 zero-point": 27.1402,
    "W8A8 dynamic per tensor": 40.8337,
    "SmoothQuant 0.5": 26.2966,
    "SmoothQuant 0.8": 23.6349,
}
# Relative. Float kernels differ between machines; a model that int4 per tensor has destroyed amplifies that.
TOLERANCE = {"int4 tensor": 0.05}
DEFAULT_TOLERANCE = 0.002

Rounder = Callable[[torch.Tensor], torch.Tensor]


def symmetric(values: torch.Tensor, bits: int, group: int | None) -> torch.Tensor:
    """`[out, in]` rounded and back. group: inputs that share a scale, 0 for a whole row, None for the whole tensor."""
    top = 2 ** (bits - 1) - 1
    grouped = grouped_view(values, group)
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    return (grouped / scale).round_().clamp_(-top, top).mul_(scale).reshape(values.shape)


def zero_point(values: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """`[out, in]` rounded to min-max codes and back; the range is not widened to contain zero."""
    top = 2**bits - 1
    grouped = grouped_view(values, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-12) / top
    zero = (-low / scale).round_()
    return (grouped / scale).round_().add_(zero).clamp_(0, top).sub_(zero).mul_(scale).reshape(values.shape)


def grouped_view(values: torch.Tensor, group: int | None) -> torch.Tensor:
    if group is None:
        return values.reshape(1, -1)
    return values if group == 0 else values.reshape(values.shape[0], -1, group)


WEIGHT_ONLY: dict[str, Rounder] = {
    "int8 tensor": lambda w: symmetric(w, 8, None),
    "int8 channel": lambda w: symmetric(w, 8, 0),
    "int4 tensor": lambda w: symmetric(w, 4, None),
    "int4 channel": lambda w: symmetric(w, 4, 0),
    "int4 group 64": lambda w: symmetric(w, 4, 64),
    "int4 group 64 zero-point": lambda w: zero_point(w, 4, 64),
}
# The source says how activations are rounded in its W8A8 rows, and not how weights are: both are run.
W8A8_WEIGHTS = {"tensor": WEIGHT_ONLY["int8 tensor"], "channel": WEIGHT_ONLY["int8 channel"]}


def run_published(model: str, revision: str, text: Path | None, *, compare: bool) -> int:
    """Simulate every row and print the table. Exit code 1 where a comparable row is off by more than its tolerance."""
    local = Path(model).exists()
    checkpoint = open_checkpoint(model if local else f"{model}@{revision}")
    windows = cut_windows(read_text(text), checkpoint.tokenizer(), WINDOWS, LENGTH, "none")
    simulation = Simulation(load_checkpoint(checkpoint, dtype=torch.float32), windows.ids)
    comparable = compare or (not local and text is None and (model, revision) == (MODEL, REVISION))
    print(f"SIMULATION in float32 of {checkpoint.name}, {len(simulation.linears)} linears; no packed file is involved")
    print(f"text {windows.rules['text']}, tokens {windows.rules['tokens_sha256'][:12]}, {WINDOWS} windows of {LENGTH}")
    if not comparable:
        print("another model or text than the published run: its figures do not apply and are left out")
    return report(simulation.rows(), len(simulation.linears), comparable)


def report(rows: Iterator[tuple[str, str, float]], linears: int, comparable: bool) -> int:
    print("\n| row | weights of W8A8 | simulated | published (quoted) | difference |\n|---|---|---:|---:|---:|")
    nearest: dict[str, float] = {}
    for label, weights, value in rows:
        off = value / PUBLISHED[label] - 1
        nearest[label] = min(abs(off), nearest.get(label, np.inf))
        quoted = f"{PUBLISHED[label]:.4f} | {100 * off:+.2f} %" if comparable else "- | -"
        print(f"| {label} | {weights} | {value:.4f} | {quoted} |", flush=True)
    if not comparable:
        return 0
    missed = [label for label, off in nearest.items() if off > TOLERANCE.get(label, DEFAULT_TOLERANCE)]
    for label in missed:
        print(f"not reproduced: {label}", file=sys.stderr)
    if linears != LINEARS:
        print(f"the model has {linears} linears, the published run {LINEARS}", file=sys.stderr)
    return 1 if missed or linears != LINEARS else 0


def read_text(path: Path | None) -> Text:
    """Rows joined by blank lines, not stripped, empty ones included: as the published run did it."""
    if path is not None:
        return Text(path.name, "und", [path.read_text(encoding="utf-8")], "\n\n")
    from datasets import load_dataset

    rows = load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="test")["text"]
    return Text("wikitext-2-raw-v1 test", "en", list(rows), "\n\n")


class Simulation:
    """A float32 model whose linears are rounded in place, scored, and put back."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.linears = block_linears(model)

    def rows(self) -> Iterator[tuple[str, str, float]]:
        """(label, how the weights of a W8A8 row are rounded, perplexity)."""
        with torch.no_grad():
            yield "float32", "", self.perplexity()
            for label, rounder in WEIGHT_ONLY.items():
                with self.restored():
                    self.round_weights(rounder)
                    yield label, "", self.perplexity()
            sites, maxima = self.norm_sites(), self.activation_maxima()
            for label, alpha in (("W8A8 dynamic per tensor", None), ("SmoothQuant 0.5", 0.5), ("SmoothQuant 0.8", 0.8)):
                for weights, rounder in W8A8_WEIGHTS.items():
                    with self.restored(), self.rounded_activations():
                        if alpha is not None:
                            self.smooth(sites, maxima, alpha)
                        self.round_weights(rounder)
                        yield label, weights, self.perplexity()

    def perplexity(self) -> float:
        return float(np.exp(score_windows(self.model, self.ids).nll.mean()))

    def round_weights(self, rounder: Rounder) -> None:
        for linear in self.linears.values():
            linear.weight.copy_(rounder(linear.weight))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Every parameter is put back at the end (the embedding never changes and is not copied)."""
        changed = [p for p in self.model.parameters() if p.dim() == 1] + [m.weight for m in self.linears.values()]
        saved = [parameter.clone() for parameter in changed]
        try:
            yield
        finally:
            for parameter, value in zip(changed, saved, strict=True):
                parameter.copy_(value)

    @contextmanager
    def rounded_activations(self) -> Iterator[None]:
        hooks = [m.register_forward_pre_hook(lambda _, args: round_input(args)) for m in self.linears.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def activation_maxima(self) -> dict[str, torch.Tensor]:
        """Largest |x| of each input channel of each linear over the windows that are scored."""
        maxima: dict[str, torch.Tensor] = {}

        def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG001
                found = arguments[0].abs().flatten(0, -2).amax(0)
                maxima[name] = torch.maximum(maxima[name], found) if name in maxima else found

            return hook

        hooks = [module.register_forward_pre_hook(watch(name)) for name, module in self.linears.items()]
        for window in self.ids:
            self.model(input_ids=window.unsqueeze(0), use_cache=False)
        for hook in hooks:
            hook.remove()
        return maxima

    def norm_sites(self) -> list[tuple[nn.Module, list[str]]]:
        """Norms and the linears that read the very tensor a norm puts out. A norm holds one vector and nothing else."""
        made: dict[int, nn.Module] = {}
        readers: dict[nn.Module, list[str]] = {}
        alive: list[torch.Tensor] = []  # keeps the ids from being used again

        def wrote(module: nn.Module, arguments: object, output: torch.Tensor) -> None:  # noqa: ARG001
            alive.append(output)
            made[id(output)] = module

        def read(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
            def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG001
                if id(arguments[0]) in made:
                    readers.setdefault(made[id(arguments[0])], []).append(name)

            return hook

        norms = [m for m in self.model.modules() if [p.dim() for p in m.parameters()] == [1] and not any(m.children())]
        hooks = [norm.register_forward_hook(wrote) for norm in norms]
        hooks += [module.register_forward_pre_hook(read(name)) for name, module in self.linears.items()]
        self.model(input_ids=self.ids[:1, :8], use_cache=False)
        for hook in hooks:
            hook.remove()
        return list(readers.items())

    def smooth(self, sites: list[tuple[nn.Module, list[str]]], maxima: dict[str, torch.Tensor], alpha: float) -> None:
        """Divide each norm's weight by the scales, and multiply the columns of the linears that read it."""
        for norm, names in sites:
            weights = [self.linears[name].weight for name in names]
            widest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
            scales = smooth_scales(maxima[names[0]], widest, alpha)
            next(norm.parameters()).div_(scales)
            for weight in weights:
                weight.mul_(scales)


def round_input(arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    first, *rest = arguments
    return symmetric(first, 8, None), *rest
