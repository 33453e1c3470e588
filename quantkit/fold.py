"""Fold sites: where a per-channel scale can move between two modules without changing the block's function.

Nothing is looked up by architecture. Candidates come from data flow and experiment, and each must close: with random
scales folded, the output of the block on real calibration data must not move. A router, a second reader of a norm, or
anything else that was not seen makes the site fail, which is the point.

    norm -> linears    a linear whose input is the very tensor that a norm put out reads that norm
    linear -> linear   rows of a producer are scaled by numbers that tell them apart; a consumer whose input channels
                       change by exactly those numbers is fed by them, channel by channel, through whatever lies between
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from quantkit.hooks import hooked, on_read
from quantkit.stats import linears_of
from quantkit.types import FoldSite

Run = Callable[[torch.Tensor], torch.Tensor]

TOLERANCE = 1e-4

# Rows are told apart by digits of this base, one digit a run: factors 2**(digit/16 - 1) lie 4% apart.
_BASE = 32
# The finest piece of a producer that is tried on its own, as a fraction of its rows.
_FINEST = 24


def discover_fold_sites(block: nn.Module, run: Run, sample: torch.Tensor) -> list[FoldSite]:
    """Every candidate site of a live block, unproved; `sample` `[1, length, hidden]` is a real hidden state."""
    trace = _Trace(block, run, sample)
    sites = _norm_sites(block, trace)
    fed = {consumer for site in sites for consumer in site.consumers}
    return sites + _linear_sites(block, run, sample, trace, fed)


def check_closure(
    block: nn.Module, sites: Iterable[FoldSite], run: Run, sample: torch.Tensor, generator: torch.Generator
) -> list[FoldSite]:
    """Each site with the largest relative change of the block's output when random scales in [0.5, 2] are folded."""
    before = run(sample).clone()  # a block may put all its outputs into one place
    # Relative to what the block adds, not to the residual stream, whose size would hide a broken site.
    size = (before - sample).abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    proved = []
    for site in sites:
        channels = int(site.channel.max()) + 1
        scales = torch.exp2(torch.rand(channels, generator=generator) * 2 - 1)[site.channel]
        with _restored(block, site):
            apply_fold(block, site, scales, torch.float32)
            after = run(sample)
        proved.append(replace(site, residual=((after - before).abs().max() / size).item()))
    return proved


@torch.no_grad()
def apply_fold(block: nn.Module, site: FoldSite, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide the producer by `scales` and multiply the consumers' columns by them, in place.

    scales `[in]`, equal for channels of one producer channel. dtype: what the file stores the producer in when it is a
    norm: its weight is rounded to it, and consumers take the factor that was really applied, so nothing is lost.
    Returns the factors `[in]` by which the consumers' input was divided.
    """
    producer = block.get_submodule(site.producer)
    weight = _weight(producer)
    width = len(weight)
    by_channel = torch.ones(width).index_copy(0, site.channel, scales)
    if site.kind == "linear":
        weight.div_(by_channel.unsqueeze(1))
    else:
        offset = 1.0 if site.kind == "offset_norm" else 0.0
        old = weight.float()
        new = ((old + offset) / by_channel - offset).to(dtype).float()
        applied = (old + offset) / (new + offset)
        usable = torch.isfinite(applied) & (applied > 0)
        by_channel = torch.where(usable, applied, 1.0)
        weight.copy_(torch.where(usable, new, old))
    if (bias := _bias(producer)) is not None:
        bias.copy_((bias / by_channel).to(dtype))
    factors = by_channel[site.channel]
    for name in site.consumers:
        _weight(block.get_submodule(name)).mul_(factors)
    return factors


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight


def _bias(module: nn.Module) -> torch.Tensor | None:
    bias = getattr(module, "bias", None)
    return bias if isinstance(bias, torch.Tensor) else None


class _Trace:
    """One run of a block: what each linear read and each norm put out, by memory, in the order of the run."""

    def __init__(self, block: nn.Module, run: Run, sample: torch.Tensor) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, torch.Tensor] = {}
        self.norm_inputs: dict[str, torch.Tensor] = {}
        norms = _norms_of(block)
        handles = [on_read(m, partial(self.inputs.__setitem__, n)) for n, m in linears_of(block).items()]
        handles += [on_read(m, partial(self.norm_inputs.__setitem__, n)) for n, m in norms.items()]
        handles += [m.register_forward_hook(self._wrote(n)) for n, m in norms.items()]
        with hooked(handles):
            run(sample)

    def _wrote(self, name: str) -> Callable[..., None]:
        return lambda _, __, output: self.outputs.__setitem__(name, output)


def _norms_of(block: nn.Module) -> dict[str, nn.Module]:
    """Leaf modules with a weight vector: what may be a norm."""
    return {
        name: module
        for name, module in block.named_modules()
        if not list(module.children())
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.dim() == 1
    }


def _norm_sites(block: nn.Module, trace: _Trace) -> list[FoldSite]:
    sites = []
    for name, output in trace.outputs.items():
        place = output.untyped_storage().data_ptr()
        readers = [linear for linear, read in trace.inputs.items() if read.untyped_storage().data_ptr() == place]
        width = output.shape[-1]
        module = block.get_submodule(name)
        if not readers or any(trace.inputs[reader].shape[-1] != width for reader in readers):
            continue
        kind = _norm_kind(module, trace.norm_inputs[name])
        if kind is not None:
            sites.append(FoldSite(kind, name, tuple(readers), torch.arange(width)))
    return sites


def _norm_kind(module: nn.Module, value: torch.Tensor) -> Literal["norm", "offset_norm"] | None:
    """How the weight enters: doubling w, or 1 + w, doubles the output (the bias aside); None where neither does."""
    with torch.no_grad():
        weight, bias = _weight(module), _bias(module)
        shift = torch.zeros(1) if bias is None else bias
        expected = 2 * (module(value) - shift)
        kept = weight.clone()
        kinds: list[tuple[Literal["norm", "offset_norm"], float]] = [("norm", 0.0), ("offset_norm", 1.0)]
        for kind, offset in kinds:
            weight.copy_(2 * (kept + offset) - offset)
            found = module(value) - shift
            weight.copy_(kept)
            if torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item()):
                return kind
    return None


def _linear_sites(block: nn.Module, run: Run, sample: torch.Tensor, trace: _Trace, fed: set[str]) -> list[FoldSite]:
    """Pairs of linears, each consumer with the producer that feeds most of its channels."""
    consumers = [name for name in trace.inputs if name not in fed]
    best: dict[str, FoldSite] = {}
    for producer in linears_of(block):
        if producer not in trace.inputs:
            continue
        for consumer, channel in _channels_fed(block, run, sample, producer, consumers).items():
            best.setdefault(consumer, FoldSite("linear", producer, (consumer,), channel))
    return list(best.values())


def _channels_fed(
    block: nn.Module, run: Run, sample: torch.Tensor, producer: str, consumers: list[str]
) -> dict[str, torch.Tensor]:
    """For each consumer that `producer` feeds in full: the producer's row behind each of its input channels."""
    rows = len(_weight(block.get_submodule(producer)))
    found: dict[str, torch.Tensor] = {}
    pieces = [(0, rows)]
    while pieces:
        start, end = pieces.pop(0)
        part, spoiled = _probe(block, run, sample, producer, (start, end), consumers)
        for consumer, channel in part.items():
            known = found.setdefault(consumer, torch.full_like(channel, -1))
            found[consumer] = torch.where(channel >= 0, channel, known)
        # A piece that mixes (queries, keys, gates) is split: a fused producer may hold a part that does not.
        if spoiled and (end - start) // 2 >= max(1, rows // _FINEST):
            middle = (start + end) // 2
            pieces += [(start, middle), (middle, end)]
    return {consumer: channel for consumer, channel in found.items() if bool((channel >= 0).all())}


def _probe(
    block: nn.Module,
    run: Run,
    sample: torch.Tensor,
    producer: str,
    rows: tuple[int, int],
    consumers: list[str],
) -> tuple[dict[str, torch.Tensor], bool]:
    """Scale rows of the producer by factors that spell their numbers, and read the numbers off the consumers' inputs.

    Returns for each consumer the row behind each channel (-1: not fed by these rows), and whether any input changed by
    something that is not such a factor.
    """
    start, end = rows
    numbers = torch.arange(end - start)
    plain = _inputs(block, run, sample, consumers)
    spelled = {name: torch.zeros(value.shape[-1], dtype=torch.int64) for name, value in plain.items()}
    fed = {name: torch.ones(value.shape[-1], dtype=torch.bool) for name, value in plain.items()}
    spoiled = False
    place = 1
    while place == 1 or place < end - start:
        digits = numbers // place % _BASE
        factors = torch.ones(len(_weight(block.get_submodule(producer))))
        # No digit is a factor of one, so that every row of the piece shows.
        factors[start:end] = torch.exp2((digits + 0.5) / 16 - 1)
        with _scaled_rows(block.get_submodule(producer), factors):
            changed = _inputs(block, run, sample, consumers)
        for name, value in plain.items():
            if name not in changed or changed[name].shape != value.shape:  # other tokens are routed to it
                spoiled = True
                fed[name][:] = False
                continue
            ratio, constant = _ratios(value, changed[name])
            spoiled |= not bool(constant.all())
            digit = torch.round((torch.log2(ratio.clamp(min=1e-3)) + 1) * 16 - 0.5)
            exact = (torch.exp2((digit + 0.5) / 16 - 1) / ratio - 1).abs() < 1e-3
            fed[name] &= constant & exact & (digit >= 0) & (digit < _BASE)
            spelled[name] += digit.long().clamp(0, _BASE - 1) * place
        place *= _BASE
    return {
        name: torch.where(fed[name] & (number < end - start), number + start, -1) for name, number in spelled.items()
    }, spoiled


def _ratios(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Least-squares factor of each channel from `before` to `after`, and whether it explains the change."""
    old, new = before.flatten(0, -2).double(), after.flatten(0, -2).double()
    size = old.square().sum(0)
    ratio = (old * new).sum(0) / size.clamp(min=torch.finfo(torch.float64).tiny)
    rest = (new - ratio * old).square().sum(0).sqrt()
    return ratio, rest <= 1e-4 * new.square().sum(0).sqrt().clamp(min=1e-12)


def _inputs(block: nn.Module, run: Run, sample: torch.Tensor, names: list[str]) -> dict[str, torch.Tensor]:
    """What the linears `names` read when `sample` runs."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        found[name] = value.clone()

    with hooked(on_read(block.get_submodule(name), partial(keep, name)) for name in names):
        run(sample)
    return found


@contextmanager
def _scaled_rows(linear: nn.Module, factors: torch.Tensor) -> Iterator[None]:
    """The linear with its output rows multiplied by `factors`, put back to the bit afterwards."""
    kept = [(tensor, tensor.clone()) for tensor in (_weight(linear), _bias(linear)) if tensor is not None]
    with torch.no_grad():
        for tensor, _ in kept:
            tensor.mul_(factors.reshape(-1, *[1] * (tensor.dim() - 1)))
        try:
            yield
        finally:
            for tensor, old in kept:
                tensor.copy_(old)


@contextmanager
def _restored(block: nn.Module, site: FoldSite) -> Iterator[None]:
    """Put the weights of a site's modules back to the bit afterwards."""
    modules = [block.get_submodule(name) for name in (site.producer, *site.consumers)]
    kept = [(tensor, tensor.clone()) for module in modules for tensor in module.parameters(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, old in kept:
                tensor.copy_(old)
