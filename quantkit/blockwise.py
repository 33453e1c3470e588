"""The calibrated loop: for each block, load it, gather statistics, fold, quantise, write, read back, run on.

Memory is one block, its Gram matrices and the hidden states. Later blocks see the outputs of the quantised ones before
them, computed from the numbers that their packed tensors hold. A quantiser alone takes one forward (sequential.py).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from quantkit.affine import dequantize
from quantkit.algorithms.gptq import row_errors
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.algorithms.smoothquant import fake_quantize_tokens
from quantkit.errors import CheckpointError, NumericsError, first_line
from quantkit.fold import TOLERANCE, apply_fold, check_closure, discover_fold_sites
from quantkit.hooks import hooked, on_read
from quantkit.journal import generator_state, set_generator
from quantkit.live import LiveModel, batches
from quantkit.manifest import FallbackRecord, FoldRecord, OutputError
from quantkit.passes import QUANTISERS, REFINERS, TRANSFORMS, Chosen
from quantkit.plan import Plan, Quantised
from quantkit.sensitivity import Felt, feel
from quantkit.sequential import OutOfStepError, reading_order, run_in_step
from quantkit.sink import Sink
from quantkit.stats import collect, linears_of, summed
from quantkit.types import CalibrationStats, FoldSite, QuantScheme

# Fold scales of the equivalence check are drawn with it; any seed would do, one makes runs repeat.
_SEED = 20240
# Tokens on which fold sites are found and proved: enough for attention to mix, short enough to run many times.
_PROOF_TOKENS = 32
# Rows that are quantised at once: so many that an operation on a column takes longer than to start it.
_PIECE_ROWS = 4096
# A block is quantised in one forward where no more than this waits in memory: 32 samples of 512 tokens at width 4096.
_LARGEST_HELD = 1 << 31


@dataclass
class _Block:
    """One live block at work. layers, stats: by name in the block; stats change as folds move scales.

    size: of each layer, the squared output. before: the squared error of it as the source has it, rounded to nearest,
    over that output. exact: float weights of layers that are quantised already. felt: what the loss of the source feels
    at outputs of layers, where the recipe asks for it; changes as folds move scales.
    """

    name: str
    module: nn.Module
    layers: dict[str, Quantised]
    stats: dict[str, CalibrationStats] = field(default_factory=dict)
    size: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)
    felt: dict[str, Felt] = field(default_factory=dict)

    def calibrate(self, part: str, stats: CalibrationStats) -> None:
        """Take the statistics of a layer that is as the source has it."""
        weight = self.weight(part)
        nearest = dequantize(rtn_quantize(weight, self.layers[part].scheme))
        self.stats[part] = stats
        self.size[part] = _squared(weight, stats) or 1.0
        self.before[part] = _squared(weight - nearest, stats) / self.size[part]

    def weight(self, part: str) -> torch.Tensor:
        """The float weight of a layer."""
        return self.exact[part] if part in self.exact else self._live(part)

    def together(self, part: str) -> bool:
        """Whether the rows of a layer need each other: they share a scale, or make up for one another."""
        return self.layers[part].scheme.granularity == "tensor" or part in self.felt

    def replace(self, part: str, weight: torch.Tensor) -> None:
        """Make a layer compute with another weight."""
        self._live(part).copy_(weight)

    def _live(self, part: str) -> torch.Tensor:
        weight = self.module.get_submodule(part).weight
        assert isinstance(weight, torch.Tensor)
        return weight


def quantise_blocks(plan: Plan, ids: torch.Tensor, sink: Sink) -> None:
    """Run every block of the plan's checkpoint on token ids `[samples, length]`, and write its quantised layers.

    Blocks that the sink has from an earlier run are run again as they stand in its files: the earlier run went on with
    numbers that were read back from the same bytes. Raises NumericsError naming the layer (non-finite weights or
    activations) and CheckpointError (a model whose blocks cannot be run alone).
    """
    live = LiveModel(plan.checkpoint, scratch=sink.writer.directory)
    if sink.blocks == len(live.blocks):
        return
    loop = _Loop(plan, sink, live, ids)
    done = sink.blocks
    for index in range(len(live.blocks)):
        if index < done:
            loop.restore(index)
        else:
            loop.quantise(index)
        live.free(index)


class _Loop:
    """What goes from block to block. hidden: what the next block is given, `[samples, length, hidden]`."""

    def __init__(self, plan: Plan, sink: Sink, live: LiveModel, ids: torch.Tensor) -> None:
        assert plan.recipe.calibration is not None
        hidden = live.start(ids, short=_PROOF_TOKENS)
        self._plan, self._sink, self._live, self._hidden = plan, sink, live, hidden
        self._by_module = {layer.module: layer for layer in plan.quantised}
        self._folding, self._refining = _Folding(plan, sink, live), _Refining(plan, live, hidden)
        self._generators = {"fold": self._folding.generator, "refine": self._refining.generator}
        for kind, state in sink.generators.items():
            set_generator(self._generators[kind], state)
        self._reduced = partial(_reduced, wanted=plan.recipe.calibration.dtype == "bfloat16")
        by_loss = _by_loss(plan)
        self._felt = self._feel(ids) if by_loss else [{} for _ in live.blocks]
        # Folds need the statistics of a whole block first, and so do refiners.
        alone = len(plan.recipe.steps) == 1 and not by_loss
        self._in_step = alone and _held_bytes(hidden, self._by_module) <= _LARGEST_HELD

    def _load(self, index: int) -> _Block:
        name = f"{self._live.prefix}.{index}"
        layers = {m.removeprefix(f"{name}."): one for m, one in self._by_module.items() if m.startswith(f"{name}.")}
        felt = {part: one for part, one in self._felt[index].items() if part in layers}
        return _Block(name, self._live.load(index), layers, felt=felt)

    def _feel(self, ids: torch.Tensor) -> list[dict[str, Felt]]:
        generator = torch.Generator().manual_seed(_SEED)
        tell = lambda doing: self._sink.progress(doing, 0)  # noqa: E731
        first = self._sink.blocks  # those before it are quantised
        return feel(self._live, ids, self._hidden, self._reduced, generator, first=first, tell=tell)

    def restore(self, index: int) -> None:
        """Run all samples through a block as an earlier run has written it."""
        work = self._load(index)
        with self._reduced(work.module):
            self._refining.advance(index)
        self._folding.candidates(work.module, partial(self._live.run, index), self._sample)
        _read_back(work, self._sink, self._live)
        self._advance(index, work)

    def quantise(self, index: int) -> None:
        """Quantise a block, write it, and have all samples pass it."""
        work = self._load(index)
        passing = self._in_one_forward(index, work)
        chosen = self._after_a_forward(index, work) if passing is None else passing
        _write(self._plan, work, chosen, self._sink)
        self._sink.blocks = index + 1
        self._sink.generators = {kind: generator_state(generator) for kind, generator in self._generators.items()}
        self._sink.save()
        if passing is None:
            self._advance(index, work)

    def _advance(self, index: int, work: _Block) -> None:
        """Run all samples through a block that is quantised, if another one follows."""
        if index + 1 == len(self._live.blocks):
            return
        rounded = _rounded_inputs(work.module, work.layers, self._plan.recipe.activations is not None)
        with self._reduced(work.module), rounded:
            self._live.advance(index, self._hidden)

    @property
    def _sample(self) -> torch.Tensor:
        return self._hidden[:1, :_PROOF_TOKENS]

    def _in_one_forward(self, index: int, work: _Block) -> dict[str, Chosen] | None:
        if not self._in_step:
            return None
        reduced = partial(self._reduced, work.module)
        return _quantise_in_step(self._plan, work, reduced, partial(self._live.run, index), self._hidden)

    def _after_a_forward(self, index: int, work: _Block) -> dict[str, Chosen]:
        run = partial(self._live.run, index)
        with self._reduced(work.module):
            statistics = _statistics(work, run, self._hidden)
            self._refining.advance(index)
        for part, stats in statistics.items():
            work.calibrate(part, stats)
        self._folding.run(work, run, self._sample)
        chosen = _quantise(self._plan, work, work.layers)
        with self._reduced():
            return self._refining.run(index, work, chosen)


@contextmanager
def _reduced(block: nn.Module | None = None, *, wanted: bool) -> Iterator[None]:
    """Products in bfloat16 where `wanted`, all else in float32; fold sites are proved outside, in float32 throughout.

    block: one whose weights are cast once, and again where they change; autocast alone would cast them for each batch.
    """
    linears = [] if block is None or not wanted else linears_of(block).values()
    plain = [module for module in linears if type(module) is nn.Linear]
    for module in plain:
        vars(module)["forward"] = partial(_product, module, _Cast(module.weight))
    try:
        with torch.autocast("cpu", torch.bfloat16, wanted):
            yield
    finally:
        for module in plain:
            del vars(module)["forward"]


class _Cast:
    """A weight in bfloat16, cast again only where it has changed."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight
        self._version = -1

    def __call__(self) -> torch.Tensor:
        if self._version != self._weight._version:
            self._cast, self._version = self._weight.bfloat16(), self._weight._version
        return self._cast


def _product(module: nn.Linear, cast: _Cast, input: torch.Tensor) -> torch.Tensor:
    """What a linear puts out: from bfloat16 for wherever a model has not turned autocast off."""
    return linear(input, cast() if torch.is_autocast_enabled("cpu") else module.weight, module.bias)


def _read_back(work: _Block, sink: Sink, live: LiveModel) -> None:
    """Make the source's block what an earlier run has written of it."""
    form = sink.plan.format
    for part, parameter in work.module.named_parameters():
        layer = work.layers.get(part.removesuffix(".weight")) if part.endswith(".weight") else None
        if layer is not None:
            stored = {spec.name: sink.writer.read(spec.name) for spec in sink.plan.layer_specs(layer)}
            local = {key.removeprefix(f"{layer.name}."): tensor for key, tensor in stored.items()}
            parameter.copy_(dequantize(form.unpack(local, layer.scheme)))
            continue
        entry = live.entry_of(f"{work.name}.{part}")
        if entry is not None and entry.name in sink.done:  # a fold has changed it
            parameter.copy_(sink.writer.read(entry.name))


def _statistics(
    work: _Block, run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
) -> dict[str, CalibrationStats]:
    order = reading_order(work.module, work.layers, run, hidden[:1, :_PROOF_TOKENS]) if work.felt else []
    counts: dict[str, torch.Tensor] = {}
    for parts in order:
        felt = [work.felt[part].weights() for part in parts if part in work.felt]
        if len(felt) == len(parts):  # one Gram matrix for all that read one input
            counts |= dict.fromkeys(parts, torch.stack(felt).mean(0))
    with _naming(work.name):
        shared = collect(work.module, work.layers, run, batches(hidden), counts)
    return {part: found.stats for found in shared for part in found.names}


def _held_bytes(hidden: torch.Tensor, layers: dict[str, Quantised]) -> int:
    """About what all samples hold while they wait inside a block: states, what the linears before made, one input."""
    samples, length, width = hidden.shape
    return 4 * samples * length * (4 * width + max((layer.shape[1] for layer in layers.values()), default=0))


def _quantise_in_step(
    plan: Plan,
    work: _Block,
    reduced: Callable[[], AbstractContextManager[None]],
    run: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
) -> dict[str, Chosen] | None:
    """Quantise a block in one forward, at the end of which `hidden` is what comes out of it.

    None, with block and hidden states as they were, where samples call its linears in different ways.
    """
    rounded = _rounded_inputs(work.module, work.layers, plan.recipe.activations is not None)
    sample = hidden[:1, :_PROOF_TOKENS].clone()
    order = reading_order(work.module, work.layers, run, sample)
    if not order:
        return None
    chosen: dict[str, Chosen] = {}

    def reached(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:
        with torch.autocast("cpu", enabled=False):
            with _naming(work.name):
                stats = summed(parts[0], inputs)
            for part in parts:
                work.calibrate(part, stats)
            found = _quantise(plan, work, parts)
            for part, one in found.items():
                work.exact[part] = work.weight(part).clone()
                work.replace(part, dequantize(one.tensor))
            chosen.update(found)

    try:
        with reduced(), rounded:
            outputs = run_in_step(work.module, order, run, batches(hidden), reached, sample)
    except OutOfStepError:
        for part, weight in work.exact.items():
            work.replace(part, weight)
        work.exact.clear()
        return None
    for batch, output in zip(batches(hidden), outputs, strict=True):
        batch.copy_(output)
    return chosen


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Errors of numbers name the block or layer that they came up in."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{name}: {error.problem}", error.action) from None


class _Folding:
    """The transforms of a recipe at the fold sites of each block."""

    def __init__(self, plan: Plan, sink: Sink, live: LiveModel) -> None:
        self._plan, self._sink, self._live = plan, sink, live
        self._steps = [(name, options) for name, options in plan.recipe.steps if name in TRANSFORMS]
        self.generator = torch.Generator().manual_seed(_SEED)
        # Blocks built alike have the same candidates; each is still proved in each block.
        self._known: dict[tuple[Any, ...], list[FoldSite]] = {}

    def run(self, work: _Block, run: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor) -> None:
        """Fold what the transforms propose, and write the kept tensors that changed."""
        if not self._steps:
            return
        changed: set[str] = set()
        candidates = self.candidates(work.module, run, sample)
        proved = check_closure(work.module, candidates, run, sample, self.generator)
        refusals = [self._refusal(work, site) for site in proved]
        usable = [site for site, reason in zip(proved, refusals, strict=True) if reason is None]
        # Linear sites first: norm sites then see the weights that will be rounded.
        used = self._fold_all(work, [site for site in usable if site.kind == "linear"])
        used |= self._fold_all(work, [site for site in usable if site.kind != "linear"])
        for site, reason in zip(proved, refusals, strict=True):
            self._record(work, site, used.get(site.consumers, []), reason)
            if reason is None:
                changed |= {f"{site.producer}.{part}" for part in ("weight", "bias")}
        changed -= {f"{name}.weight" for name in work.layers}
        for name, parameter in work.module.named_parameters():
            if name in changed:
                entry = self._live.entry_of(f"{work.name}.{name}")
                if entry is not None:
                    parameter.copy_(self._sink.changed(entry, parameter))

    def candidates(
        self, block: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor
    ) -> list[FoldSite]:
        """The sites that may be in a block as the source has it, found on the first one of its shape."""
        if not self._steps:
            return []
        shape = tuple((name, tuple(parameter.shape)) for name, parameter in block.named_parameters())
        if shape not in self._known:
            self._known[shape] = discover_fold_sites(block, run, sample)
        return self._known[shape]

    def _refusal(self, work: _Block, site: FoldSite) -> str | None:
        if not site.residual <= TOLERANCE:
            return f"folding changes the block's output by {site.residual:.2g}"
        involved = [*site.consumers, *([site.producer] if site.kind == "linear" else [])]
        unquantised = [name for name in involved if name not in work.layers]
        if unquantised:
            return f"{unquantised[0]} stays unquantised"
        if site.kind != "linear" and self._live.entry_of(f"{work.name}.{site.producer}.weight") is None:
            return f"{site.producer} is not one tensor on disk"
        return None

    def _fold_all(self, work: _Block, sites: list[FoldSite]) -> dict[tuple[str, ...], list[dict[str, str | float]]]:
        """Fold sites side by side where they share no module, else in turn. By the names of the consumers."""
        modules = [name for site in sites for name in (site.producer, *site.consumers)]
        workers = os.cpu_count() if len(set(modules)) == len(modules) else 1
        with _single_threaded(), ThreadPoolExecutor(workers) as pool:
            return dict(zip([s.consumers for s in sites], pool.map(lambda s: self._fold(work, s), sites), strict=True))

    def _fold(self, work: _Block, site: FoldSite) -> list[dict[str, str | float]]:
        used: list[dict[str, str | float]] = []
        for name, options in self._steps:
            step = TRANSFORMS[name]
            weights = [work.weight(consumer) for consumer in site.consumers]
            scheme = work.layers[site.consumers[0]].scheme
            stats = work.stats[site.consumers[0]]
            scaled = step.run(weights, scheme, stats, site.channel, step.options.model_validate(options))
            used.append(
                {
                    "pass": name,
                    "setting": scaled.setting,
                    "error_before": _digits(scaled.error_before),
                    "error_after": _digits(scaled.error_after),
                }
            )
            dtype = self._plan.checkpoint.dtype
            factors = apply_fold(work.module, site, scaled.scales, dtype)
            moved = stats.scaled(factors)
            for consumer in site.consumers:
                work.stats[consumer] = moved
            if site.kind == "linear" and site.producer in work.felt:
                felt = work.felt[site.producer]
                rows = torch.ones(len(work.weight(site.producer))).index_copy(0, site.channel, factors)
                work.felt[site.producer] = felt.scaled(rows)
            if site.producer in work.layers:
                # Its rows, and so its outputs, were divided: errors are relative to what it puts out now.
                work.size[site.producer] = _squared(work.weight(site.producer), work.stats[site.producer]) or 1.0
        return used

    def _record(self, work: _Block, site: FoldSite, used: list[dict[str, str | float]], reason: str | None) -> None:
        producer = f"{work.name}.{site.producer}"
        self._sink.fold_sites.append(
            FoldRecord(
                kind=site.kind,
                producer=producer,
                consumers=[f"{work.name}.{consumer}" for consumer in site.consumers],
                residual=_digits(site.residual),
                used=used,
                refused=reason,
            )
        )
        if reason:
            self._sink.fallbacks.append(FallbackRecord(layer=producer, kind="fold", detail=reason))


class _Refining:
    """The refiners of a recipe, at the output of each block: its target is what the source's blocks give.

    hidden: what the next block of the artifact is given, `[samples, length, hidden]`; read, not changed.
    """

    def __init__(self, plan: Plan, live: LiveModel, hidden: torch.Tensor) -> None:
        self._steps = [(name, options) for name, options in plan.recipe.steps if name in REFINERS]
        self._live = live
        self.generator = torch.Generator().manual_seed(_SEED)
        if self._steps:
            self._exact = live.another(hidden)
            # Views: both tables change in place from block to block.
            self._given, self._wanted = list(batches(hidden)), list(batches(self._exact))

    def advance(self, index: int) -> None:
        """Run the source's block `index`, as loaded, on the hidden states of the source."""
        if self._steps:
            self._live.advance(index, self._exact)

    def run(self, index: int, work: _Block, chosen: dict[str, Chosen]) -> dict[str, Chosen]:
        """Better codes for a block whose folds are done."""
        if not chosen or not self._steps:
            return chosen
        weights = {part: work.weight(part) for part in chosen}
        loss, count = partial(self._loss, index), len(self._given)
        for name, options in self._steps:
            refiner = REFINERS[name]
            tensors = {part: one.tensor for part, one in chosen.items()}
            parsed = refiner.options.model_validate(options)
            try:
                learned = refiner.run(weights, tensors, loss, count, self.generator, parsed)
            except RuntimeError as error:  # of autograd: a block may write into what a gradient still needs
                raise CheckpointError(
                    f"{work.name}: {name} cannot train this block: {first_line(error)}",
                    f"leave {name} out of the recipe",
                ) from error
            note = (
                f"{name}: error of the block {learned.loss_before:.4g}, after it {learned.loss_after:.4g}; "
                f"{100 * learned.changed:.1f} % of its codes changed"
            )
            chosen = {
                part: replace(one, tensor=learned.tensors[part], notes=(*one.notes, note))
                for part, one in chosen.items()
            }
        return chosen

    def _loss(self, index: int, weights: dict[str, torch.Tensor], batch: int) -> torch.Tensor:
        named = {f"{part}.weight": weight for part, weight in weights.items()}
        return _relative_error(self._live.run(index, self._given[batch], named), self._wanted[batch])


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Mean over tokens of the squared error relative to the token's size: norms that follow see no more than that."""
    size = wanted.square().mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found - wanted).square() / size).mean()


def _quantise(plan: Plan, work: _Block, parts: Iterable[str]) -> dict[str, Chosen]:
    """Codes for layers `parts` of a block, on all cores."""
    name, options = plan.recipe.quantiser
    quantiser = QUANTISERS[name]
    parsed = quantiser.options.model_validate(options)
    parts = list(parts)
    for part in parts:
        if part not in work.stats:
            raise NumericsError(f"{work.name}.{part}: no calibration token reached it", "add it to the recipe's ignore")
    # The widest first: it takes longest.
    teams = sorted(_teams(work, parts), key=lambda team: -work.weight(team[0]).shape[1])

    def prepare(part: str) -> Any:
        with _naming(f"{work.name}.{part}"):
            return quantiser.prepare(work.stats[part], parsed)

    def choose(team: list[str], prepared: Any, rows: torch.Tensor) -> Chosen:
        with _naming(f"{work.name}.{team[0]}"):
            outputs = work.felt[team[0]].grams if team[0] in work.felt else ()
            return quantiser.run(rows, work.layers[team[0]].scheme, prepared, parsed, outputs)

    with _single_threaded(), ThreadPoolExecutor(os.cpu_count()) as pool:
        inputs = {id(work.stats[team[0]]): team[0] for team in teams}
        ready = {key: pool.submit(prepare, part) for key, part in inputs.items()}
        jobs = []
        for team in teams:
            prepared = ready[id(work.stats[team[0]])].result()
            jobs.append([pool.submit(choose, team, prepared, rows) for rows in _pieces(work, team)])
        found: dict[str, Chosen] = {}
        for team, pieces in zip(teams, jobs, strict=True):
            whole = Chosen.join([piece.result() for piece in pieces])
            found.update(zip(team, whole.split([len(work.weight(part)) for part in team]), strict=True))
        return found


def _pieces(work: _Block, team: list[str]) -> tuple[torch.Tensor, ...]:
    """The rows of a team's weights, in as many pieces as are large enough to be quantised side by side."""
    rows = torch.cat([work.weight(part) for part in team])
    return rows.split(len(rows) if work.together(team[0]) else _PIECE_ROWS)


def _write(plan: Plan, work: _Block, chosen: dict[str, Chosen], sink: Sink) -> None:
    """Write the layers of a block in model order, and read them back into it."""
    passes = [step for step, _ in plan.recipe.steps]
    for part, layer in work.layers.items():
        weight = work.weight(part)
        stats = work.stats[part]
        rounded = dequantize(chosen[part].tensor)
        after = _squared(weight - rounded, stats) / work.size[part]
        error = OutputError(before=_digits(work.before[part]), after=_digits(after))
        stored = sink.layer(layer, weight, chosen[part], passes, error, stats.tokens)
        if (raised := chosen[part].raised) is not None:
            sink.fallbacks.append(FallbackRecord(layer=layer.name, kind="damping", detail=raised))
        work.replace(part, dequantize(plan.format.unpack(stored, layer.scheme)))


def _by_loss(plan: Plan) -> bool:
    """Whether the recipe's quantiser asks what the loss of the model feels."""
    name, options = plan.recipe.quantiser
    return QUANTISERS[name].felt(QUANTISERS[name].options.model_validate(options))


def _teams(work: _Block, parts: Iterable[str]) -> list[list[str]]:
    """Layers that read one input in one scheme are quantised as one weight, for rows are independent of each other."""
    teams: dict[tuple[int, QuantScheme, str], list[str]] = {}
    for part in parts:
        layer = work.layers[part]
        alone = part if work.together(part) else ""
        teams.setdefault((id(work.stats[part]), layer.scheme, alone), []).append(part)
    return list(teams.values())


def _squared(weight: torch.Tensor, stats: CalibrationStats) -> float:
    """`tr(W H W^T)`: the mean squared size of the layer's output."""
    return row_errors(weight, stats.hessian).sum().item()


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


@contextmanager
def _rounded_inputs(block: nn.Module, layers: Iterable[str], active: bool) -> Iterator[None]:
    """The block's quantised linears see inputs rounded to int8, as the artifact's will."""

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return fake_quantize_tokens(value.reshape(-1, value.shape[-1])).reshape(value.shape)

    modules = [block.get_submodule(part) for part in layers] if active else []
    with hooked(on_read(module, rounded) for module in modules):
        yield


@contextmanager
def _single_threaded() -> Iterator[None]:
    """One thread an operation: the passes are many small ones, and layers already run side by side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
