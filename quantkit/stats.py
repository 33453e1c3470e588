"""Calibration statistics of one live block: gathered by hooks while samples run, one set for each shared input."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quantkit.errors import NumericsError
from quantkit.hooks import Place, hooked, on_read, place_of
from quantkit.types import CalibrationStats

# Inputs kept as they were, a layer: enough for a search over alphas, small beside the Gram matrix.
_KEPT_TOKENS = 512
# Rows multiplied at once: float32 sums over so few are exact enough, and matrix products are at full speed.
_PRODUCT_ROWS = 2048
# The Gram matrix is symmetric: of its square tiles of this width, those below the diagonal are not computed.
_TILE = 256


class _AllRead(Exception):  # noqa: N818 - what happened, not an error
    """Every linear has read its input: what the block still computes is of no use here."""


@dataclass(frozen=True)
class SharedInput:
    """Linears of a block that read the very same tensor, and what calibration saw there."""

    names: tuple[str, ...]
    stats: CalibrationStats


def linears_of(block: nn.Module) -> dict[str, nn.Linear]:
    """The `nn.Linear` of a block by name, in model order."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def collect(
    block: nn.Module,
    names: Iterable[str],
    run: Callable[[torch.Tensor], torch.Tensor],
    samples: Iterable[torch.Tensor],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> list[SharedInput]:
    """Run `samples` through the block and sum what its linears `names` read.

    Linears whose input is one tensor share one set of sums. Samples hold no padding, so every token counts. A run ends
    where all linears have read their input. weights: of linears that read every token of a sample once, how much each
    token of all samples counts in the Gram matrix, with mean one. Raises NumericsError naming the linear whose input is
    not finite.
    """
    modules = {name: module for name, module in linears_of(block).items() if name in set(names)}
    leader_of: dict[str, str] = {}
    sums: dict[str, _Sums] = {}
    # Of one run: which linear read a tensor first, and the tensors, so that none takes another's place in memory.
    seen: dict[Place, str] = {}
    alive: list[torch.Tensor] = []
    # The calls of one run; whether a run before called every linear, each once, so that none comes after the last.
    calls: list[str] = []
    simple = False
    counts, start = weights or {}, 0

    def watch(name: str, value: torch.Tensor) -> None:
        if len(leader_of) < len(modules):  # an expert may be reached by a later sample only
            alive.append(value)
            first = seen.setdefault(place_of(value), name)
            if leader_of.setdefault(name, leader_of.get(first, first)) == name and name not in sums:
                sums[name] = _Sums(name, value.shape[-1])
        if leader_of[name] == name:
            counted = counts[name][start : start + value.shape[:-1].numel()] if name in counts else None
            sums[name].add(value, counted)
        calls.append(name)
        if simple and len(calls) == len(modules):
            raise _AllRead

    with hooked(on_read(module, partial(watch, name)) for name, module in modules.items()):
        for sample in samples:
            with suppress(_AllRead):
                run(sample)
            start += sample.shape[:-1].numel()
            simple = sorted(calls) == sorted(modules)
            for record in (seen, alive, calls):
                record.clear()
    return [SharedInput(tuple(n for n in leader_of if leader_of[n] == name), sums[name].result()) for name in sums]


def summed(name: str, inputs: Iterable[torch.Tensor]) -> CalibrationStats:
    """The statistics of all `inputs` `[..., in]` of the linear `name`. Raises NumericsError where one is not finite."""
    sums: _Sums | None = None
    for value in inputs:
        if sums is None:
            sums = _Sums(name, value.shape[-1])
        sums.add(value)
    if sums is None:
        raise ValueError(f"no input of {name}")
    return sums.result()


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
    """Running sums at one input: products of some thousand rows in float32, sums of those in float64, without drift."""

    def __init__(self, name: str, width: int) -> None:
        self._name = name
        self._gram = torch.zeros(width, width, dtype=torch.float64)
        self._absmax = torch.zeros(width)
        self._abs_sum = torch.zeros(width, dtype=torch.float64)
        self._tokens = 0
        self._kept: list[torch.Tensor] = []
        self._waiting = torch.empty(_PRODUCT_ROWS, width)
        self._counts: torch.Tensor | None = None
        self._filled = 0

    def add(self, value: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Add the rows of `value` `[..., in]`, which count so much each in the Gram matrix; all alike by default."""
        rows = value.reshape(-1, value.shape[-1])
        missing = _KEPT_TOKENS - sum(len(part) for part in self._kept)
        if missing > 0:
            # A spread of positions, not the first ones: those are unlike all others.
            self._kept.append(rows[:: max(1, min(16, len(rows) // 32))][:missing].float())
        if counts is not None and self._counts is None:
            self._counts = torch.ones(_PRODUCT_ROWS)
        for first in range(0, len(rows), _PRODUCT_ROWS):
            part = rows[first : first + _PRODUCT_ROWS]
            if self._filled + len(part) > _PRODUCT_ROWS:
                self._flush()
            place = slice(self._filled, self._filled + len(part))
            self._waiting[place] = part
            if counts is not None and self._counts is not None:
                self._counts[place] = counts[first : first + _PRODUCT_ROWS]
            self._filled += len(part)

    def _flush(self) -> None:
        """Add the waiting rows to the sums; of their products only tiles on and above the diagonal."""
        rows = self._waiting[: self._filled]
        counted = rows if self._counts is None else rows * self._counts[: self._filled].sqrt().unsqueeze(1)
        # The block may run in bfloat16; its statistics do not.
        with torch.autocast("cpu", enabled=False):
            for start in range(0, rows.shape[1], _TILE):
                end = start + _TILE
                self._gram[start:end, start:] += counted[:, start:end].T @ counted[:, start:]
        magnitude = rows.abs_()  # they are not read again
        largest = magnitude.amax(0)
        # Sums of squares must fit: NaN, infinity and overflow all fail this.
        if not torch.isfinite(largest.square() * _PRODUCT_ROWS).all():
            raise NumericsError(
                f"calibration: the input of {self._name} holds NaN or infinite values, or squares that overflow",
                "check the checkpoint, or leave out the calibration sample that does it",
            )
        self._absmax = torch.maximum(self._absmax, largest)
        self._abs_sum += magnitude.sum(0)
        self._tokens += self._filled
        self._filled = 0

    def result(self) -> CalibrationStats:
        self._flush()
        for start in range(0, len(self._gram), _TILE):
            end = start + _TILE
            self._gram[end:, start:end] = self._gram[start:end, end:].T
        return CalibrationStats(self._gram, self._absmax, self._abs_sum, self._tokens, torch.cat(self._kept))
