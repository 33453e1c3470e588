"""Passes: thin adapters between a recipe's steps and the pure algorithms.

A transform is asked, for one fold site, for scales; the pipeline folds them. A quantiser is asked, for one linear, for
codes; a refiner, for a whole block, for better ones. Weights are `[out, in]` in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from quantkit.affine import choose_qparams, dequantize
from quantkit.algorithms.awq import clip, search_clip, search_scales
from quantkit.algorithms.feedback import output_errors, round_in_turn
from quantkit.algorithms.gptq import NotPositiveDefinite, Prepared, coordinate_descent, gptq_quantize, prepare_hessian
from quantkit.algorithms.reconstruct import Learned, Loss, learn_rounding
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.algorithms.search import round_to_codes, search_qparams
from quantkit.algorithms.smoothquant import W8A8Error, search_alpha, shared_max, smooth_scales
from quantkit.schema import Strict
from quantkit.types import CalibrationStats, QuantizedTensor, QuantScheme

# Factors by which damping is raised, in turn, where the Hessian is not positive definite.
_DAMP_STEPS = (1, 3, 10, 30, 100)


class RtnOptions(Strict):
    """Round to nearest.

    scales: from the range of each group; or searched on the diagonal of H; or from a range that is clipped where that
    lowers the output error of the group, as published with AWQ.
    """

    scales: Literal["minmax", "searched", "clipped"] = "minmax"


class GptqOptions(Strict):
    """GPTQ.

    damp: fraction of the mean diagonal added to H. act_order: columns by descending diagonal, groups static. scales:
    from the range of each group, or searched on the diagonal of H. sweeps: of coordinate descent on codes and scales
    afterwards, 0 for none. objective: the squared error of each layer's own output, or what that does to the
    predictions of the model.
    """

    damp: Annotated[float, Field(gt=0, le=10)] = 0.1
    block_size: Annotated[int, Field(ge=1)] = 128
    act_order: Literal["none", "static"] = "static"
    scales: Literal["minmax", "searched"] = "searched"
    sweeps: Annotated[int, Field(ge=0)] = 1
    objective: Literal["layer", "model"] = "layer"


class SignroundOptions(Strict):
    """SignRound from the quantiser's codes. steps: one a batch of samples. rate, scale_rate: see `learn_rounding`."""

    steps: Annotated[int, Field(ge=1)] = 100
    rate: Annotated[float, Field(gt=0, le=1)] = 0.01
    scale_rate: Annotated[float, Field(ge=0, le=0.1)] = 0.0005


class AwqOptions(Strict):
    """AWQ.

    n_grid: ratios tried. ranking_rows: of each weight, those that they are tried on. scales: how rounding is done
    inside the search, best as the quantiser does it.
    """

    n_grid: Annotated[int, Field(ge=1)] = 20
    ranking_rows: Annotated[int, Field(ge=1)] = 256
    scales: Literal["minmax", "searched"] = "searched"


class SmoothquantOptions(Strict):
    """SmoothQuant. alpha: between the weights' ranges (0) and the activations' (1), or searched a site on `n_grid`."""

    alpha: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    n_grid: Annotated[int, Field(ge=1)] = 20


@dataclass(frozen=True)
class Chosen:
    """What a quantiser did.

    damping: fraction of the mean diagonal added to H, or None. notes: what was unusual. raised: the note that says that
    damping had to be raised, or None.
    """

    tensor: QuantizedTensor
    damping: float | None = None
    notes: tuple[str, ...] = ()
    raised: str | None = None

    def split(self, rows: list[int]) -> "list[Chosen]":
        """One for each run of rows, where several layers were quantised as one."""
        return [replace(self, tensor=tensor) for tensor in self.tensor.split(rows)]

    @classmethod
    def join(cls, parts: "Sequence[Chosen]") -> "Chosen":
        """One for all rows, of runs of them that were quantised with the same preparation."""
        return replace(parts[0], tensor=QuantizedTensor.join([part.tensor for part in parts]))


@dataclass(frozen=True)
class Scaled:
    """What a transform proposes for a site: scales `[in]`, the setting that gave them, and the error it estimates."""

    scales: torch.Tensor
    setting: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Quantiser:
    """A step that turns a float weight into codes. calibrated: whether it needs statistics with these options.

    prepare: of the statistics, what all rows of all weights of one input need alike. run: codes for any run of rows;
    or, where felt says that these options ask for it, for all rows of one weight, given what the model's loss feels at
    runs of its outputs (`[n, n]` each).
    """

    options: type[Strict]
    prepare: Callable[[CalibrationStats | None, Any], Any]
    run: Callable[[torch.Tensor, QuantScheme, Any, Any, Sequence[torch.Tensor]], Chosen]
    calibrated: Callable[[Any], bool]
    felt: Callable[[Any], bool]


@dataclass(frozen=True)
class Refiner:
    """A step that improves the codes of all linears of a block together; always calibrated."""

    options: type[Strict]
    run: Callable[[dict[str, torch.Tensor], dict[str, QuantizedTensor], Loss, int, torch.Generator, Any], Learned]


@dataclass(frozen=True)
class Transform:
    """A step that proposes scales for the consumers of a site; always calibrated."""

    options: type[Strict]
    run: Callable[[Sequence[torch.Tensor], QuantScheme, CalibrationStats, torch.Tensor, Any], Scaled]


def _rtn(
    weight: torch.Tensor,
    scheme: QuantScheme,
    stats: CalibrationStats | None,
    options: RtnOptions,
    outputs: Sequence[torch.Tensor],  # noqa: ARG001 - as all quantisers
) -> Chosen:
    if options.scales == "minmax":
        return Chosen(rtn_quantize(weight, scheme))
    assert stats is not None
    if options.scales == "clipped":
        return Chosen(rtn_quantize(clip(weight, search_clip(weight, stats.hessian, scheme)), scheme))
    scales, zeros = search_qparams(weight, stats.gram.diagonal(), scheme)
    return Chosen(round_to_codes(weight, scales, zeros, scheme))


def _prepare_gptq(stats: CalibrationStats | None, options: GptqOptions) -> tuple[Prepared, torch.Tensor, float]:
    """H made ready, its own diagonal, and the damping that it took."""
    assert stats is not None
    for damp in (options.damp * step for step in _DAMP_STEPS):
        try:
            prepared = prepare_hessian(stats.hessian, damp=damp, act_order=options.act_order)
            return prepared, stats.hessian.diagonal(), damp
        except NotPositiveDefinite as error:
            failure = error
    raise failure


def _gptq(
    weight: torch.Tensor,
    scheme: QuantScheme,
    ready: tuple[Prepared, torch.Tensor, float],
    options: GptqOptions,
    outputs: Sequence[torch.Tensor],
) -> Chosen:
    prepared, diagonal, damp = ready
    searched = options.scales == "searched"
    scales, zeros = search_qparams(weight, diagonal, scheme) if searched else choose_qparams(weight, scheme)

    def quantise(values: torch.Tensor, rows: torch.Tensor) -> QuantizedTensor:
        given = None if zeros is None else zeros[rows]
        found = gptq_quantize(
            values, prepared, scheme, block_size=options.block_size, scales=scales[rows], zeros=given
        ).tensor
        return coordinate_descent(values, prepared, found, sweeps=options.sweeps) if options.sweeps else found

    tensor = quantise(weight, torch.arange(len(weight)))
    if outputs and scheme.granularity != "tensor":
        sizes = [len(gram) for gram in outputs]
        runs = zip(outputs, torch.arange(len(weight)).split(sizes), tensor.split(sizes), strict=True)
        turned = [_in_turn(weight, rows, alone, prepared.damped, gram, quantise) for gram, rows, alone in runs]
        tensor = QuantizedTensor.join(turned)
    dead = int(prepared.dead.sum())
    notes, raised = [], None
    if damp != options.damp:
        raised = f"damping raised from {options.damp:g} to {damp:g}: the Hessian was not positive definite"
        notes.append(raised)
    if dead:
        notes.append(f"{dead} input channels never active in calibration: rounded to nearest")
    return Chosen(tensor, damp, tuple(notes), raised)


def _in_turn(
    weight: torch.Tensor,
    rows: torch.Tensor,
    alone: QuantizedTensor,
    hessian: torch.Tensor,
    gram: torch.Tensor,
    quantise: Callable[[torch.Tensor, torch.Tensor], QuantizedTensor],
) -> QuantizedTensor:
    """The rows of a weight with the numbers `rows` rounded in turn, or `alone` where the loss feels that no more."""
    values = weight[rows]
    try:
        turned = round_in_turn(values, gram, lambda given, which: quantise(given, rows[which]))
    except NotPositiveDefinite:  # gradients so small that their squares underflow
        return alone
    losses = [output_errors(values - dequantize(one), hessian, gram) for one in (turned, alone)]
    return turned if losses[0] < losses[1] else alone


def _awq(
    weights: Sequence[torch.Tensor],
    scheme: QuantScheme,
    stats: CalibrationStats,
    channel: torch.Tensor,
    options: AwqOptions,
) -> Scaled:
    # Inputs that share a producer channel (grouped heads) must share a scale, and so its statistic.
    mean = shared_mean(stats.act_mean, channel)
    quantizer: Literal["minmax", "search"] = "search" if options.scales == "searched" else "minmax"
    found = search_scales(
        weights,
        mean,
        stats.hessian,
        scheme,
        n_grid=options.n_grid,
        ranking_rows=options.ranking_rows,
        quantizer=quantizer,
    )
    return Scaled(found.scales, found.ratio, found.error_before, found.error_after)


def _smoothquant(
    weights: Sequence[torch.Tensor],
    scheme: QuantScheme,
    stats: CalibrationStats,
    channel: torch.Tensor,
    options: SmoothquantOptions,
) -> Scaled:
    if options.alpha == "auto":
        found = search_alpha(
            stats.samples, weights, act_absmax=stats.absmax, channel=channel, n_grid=options.n_grid, scheme=scheme
        )
        return Scaled(found.scales, -1.0 if found.alpha is None else found.alpha, found.error_before, found.error_after)
    weight_absmax = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scales = smooth_scales(shared_max(stats.absmax, channel), shared_max(weight_absmax, channel), options.alpha)
    error_of = W8A8Error(stats.samples, weights, scheme)
    return Scaled(scales, options.alpha, error_of(torch.ones_like(scales)), error_of(scales))


def _signround(
    weights: dict[str, torch.Tensor],
    tensors: dict[str, QuantizedTensor],
    loss: Loss,
    batches: int,
    generator: torch.Generator,
    options: SignroundOptions,
) -> Learned:
    return learn_rounding(weights, tensors, loss, batches, generator=generator, **options.model_dump())


def shared_mean(values: torch.Tensor, channel: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the mean over the inputs of its producer channel; both `[in]`."""
    size = int(channel.max()) + 1
    total = torch.zeros(size).index_add(0, channel, values)
    count = torch.zeros(size).index_add(0, channel, torch.ones_like(values))
    return (total / count.clamp(min=1))[channel]


QUANTISERS: dict[str, Quantiser] = {
    "rtn": Quantiser(
        RtnOptions, lambda stats, _: stats, _rtn, lambda options: options.scales != "minmax", lambda _: False
    ),
    "gptq": Quantiser(GptqOptions, _prepare_gptq, _gptq, lambda _: True, lambda options: options.objective == "model"),
}

TRANSFORMS: dict[str, Transform] = {
    "awq": Transform(AwqOptions, _awq),
    "smoothquant": Transform(SmoothquantOptions, _smoothquant),
}

REFINERS: dict[str, Refiner] = {"signround": Refiner(SignroundOptions, _signround)}

# Every step that a recipe may name.
PASSES: dict[str, Quantiser | Transform | Refiner] = {**QUANTISERS, **TRANSFORMS, **REFINERS}
