"""Calibration statistics of one live block: gathered by hooks while samples run, one set for each shared input."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from quantkit.errors import NumericsError
from quantkit.types import CalibrationStats

# Inputs kept as they were, a layer: enough for a search over alphas, small beside the Gram matrix.
_KEPT_TOKENS = 512


@dataclass(frozen=True)
class SharedInput:
    """Linears of a block that read the very same tensor, and what calibration saw there."""

    names: tuple[str, ...]
    stats: CalibrationStats


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The `nn.Linear` of a block by name, in model order."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def collect(
    block: nn.Module, names: Iterable[str], run: Callable[[torch.Tensor], torch.Tensor], samples: Iterable[torch.Tensor]
) -> list[SharedInput]:
    """Run `samples` through the block and sum what its linears `names` read.

    Linears whose input is one tensor share one set of sums. Samples hold no padding, so every token counts. Raises
    NumericsError naming the linear whose input is not finite.
    """
    modules = {name: module for name, module in linears_of(block).items() if name in set(names)}
    leaders: dict[str, list[str]] = {}
    sums: dict[str, _Sums] = {}
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    alive: list[torch.Tensor] = []
    first = True

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG001
            value = arguments[0]
            if first:
                alive.append(value)  # so that no later tensor of this run takes its place in memory
                leader = seen.setdefault((value.data_ptr(), tuple(value.shape)), name)
                leaders.setdefault(leader, []).append(name)
                if leader == name:
                    sums[name] = _Sums(value.shape[-1])
            if name in sums:
                sums[name].add(value.reshape(-1, value.shape[-1]), name)

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    try:
        for sample in samples:
            run(sample)
            first = False
            alive.clear()
    finally:
        for handle in handles:
            handle.remove()
    return [SharedInput(tuple(leaders[leader]), sums[leader].result()) for leader in leaders]


def merge(first: CalibrationStats, second: CalibrationStats) -> CalibrationStats:
    """The statistics of both sets of tokens: sums add, maxima are compared."""
    return CalibrationStats(
        first.gram + second.gram,
        torch.maximum(first.absmax, second.absmax),
        first.abs_sum + second.abs_sum,
        first.tokens + second.tokens,
        torch.cat([first.samples, second.samples])[:_KEPT_TOKENS],
    )


class _Sums:
    """Running sums at one input: products of one sample in float32, sums over samples in float64, without drift."""

    def __init__(self, width: int) -> None:
        self._gram = torch.zeros(width, width, dtype=torch.float64)
        self._absmax = torch.zeros(width)
        self._abs_sum = torch.zeros(width, dtype=torch.float64)
        self._tokens = 0
        self._kept: list[torch.Tensor] = []

    def add(self, rows: torch.Tensor, name: str) -> None:
        rows = rows.float()
        product = rows.T @ rows
        # A NaN or infinity anywhere in the rows reaches the diagonal.
        if not torch.isfinite(product.diagonal()).all():
            raise NumericsError(
                f"calibration: the input of {name} holds NaN or infinite values, or squares that overflow float32",
                "check the checkpoint, or leave out the calibration sample that does it",
            )
        magnitude = rows.abs()
        self._gram += product
        self._absmax = torch.maximum(self._absmax, magnitude.amax(0))
        self._abs_sum += magnitude.sum(0, dtype=torch.float64)
        self._tokens += len(rows)
        missing = _KEPT_TOKENS - sum(len(part) for part in self._kept)
        if missing > 0:
            # A spread of positions, not the first ones: those are unlike all others.
            self._kept.append(rows[:: max(1, len(rows) // 32)][:missing].clone())

    def result(self) -> CalibrationStats:
        return CalibrationStats(self._gram, self._absmax, self._abs_sum, self._tokens, torch.cat(self._kept))
