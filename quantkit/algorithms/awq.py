"""AWQ: make the channels that matter larger before rounding, so that they lose less.

Lin et al. 2023, "AWQ: Activation-aware weight quantization", equations 4 and 5. W is `[out, in]`; the consumers of one
site share the input x. Scaling inputs by 1/s and columns by s changes no output before rounding; after rounding the
error of the layer is that of `Q(W diag(s)) diag(1/s)`. The paper measures it on samples of activations; the Gram matrix
`H = X^T X` gives the same number exactly, for all tokens, as `tr((W - Q) H (W - Q)^T)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.affine import choose_qparams, dequantize, quantize
from quantkit.algorithms.gptq import row_errors
from quantkit.algorithms.search import round_to_codes, search_qparams
from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme

Quantizer = Literal["minmax", "search"]

# Scales are folded into 16-bit weights: a factor outside these bounds would eat their range.
_LARGEST_SCALE = 1e4
# The search of scales inside the search of ratios: coarse, for it is run n_grid times and only has to rank ratios.
_INNER_GRID = 6


@dataclass(frozen=True)
class AWQResult:
    """scales float32 `[in]`: multiply columns by them, divide the producer by them. ratio: the exponent chosen, 0 where
    nothing beat the unscaled weights (scales are then all one). Errors: summed over consumers, before and after."""

    scales: torch.Tensor
    ratio: float
    error_before: float
    error_after: float


def search_scales(
    weights: Sequence[torch.Tensor],
    act_mean: torch.Tensor,
    gram: torch.Tensor,
    scheme: QuantScheme,
    *,
    n_grid: int = 20,
    ranking_rows: int = 256,
    quantizer: Quantizer = "minmax",
) -> AWQResult:
    """The best `s = act_mean ** ratio` over `n_grid` ratios in (0, 1], or none (equation 5).

    weights: every consumer of the input, `[out_i, in]`; act_mean `[in]`: mean |x| of each channel; gram `[in, in]`.
    s is divided by `sqrt(max(s) * min(s))` over the active channels; dead channels keep 1. quantizer: how columns are
    rounded while ratios are compared; "search" is the closer to a recipe that searches scales afterwards. Ratios are
    compared on at most `ranking_rows` rows of each consumer, evenly spread: all ratios see the same rows, so few rows
    tell the ratio that all of them tell. The best is then judged on all rows.

    Raises NumericsError for non-finite weights or statistics, ValueError where shapes do not fit.
    """
    if not torch.isfinite(act_mean).all() or not torch.isfinite(gram).all():
        raise NumericsError(
            "the activation statistics hold NaN or infinite values", "check the calibration activations of this site"
        )
    if any(weight.shape[1] != len(act_mean) for weight in weights) or gram.shape != (len(act_mean),) * 2:
        raise ValueError("weights, act_mean and gram must agree on the number of inputs")
    exact = gram.float()
    none = torch.ones_like(act_mean, dtype=torch.float32)
    sampled = _together([_some_rows(weight, ranking_rows) for weight in weights], scheme)
    weights = _together(weights, scheme)
    ratios = [step / n_grid for step in range(1, n_grid + 1)]
    errors = [_scaled_error(sampled, awq_scales(act_mean, ratio), exact, scheme, quantizer) for ratio in ratios]
    ratio = ratios[errors.index(min(errors))]
    scales = awq_scales(act_mean, ratio)
    before, after = (_scaled_error(weights, candidate, exact, scheme, quantizer) for candidate in (none, scales))
    if after < before:
        return AWQResult(scales, ratio, before, after)
    return AWQResult(none, 0.0, before, before)


def _some_rows(weight: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` rows of `weight`, evenly spread."""
    rows = len(weight)
    return weight if rows <= count else weight[torch.arange(count) * rows // count]


def _together(weights: Sequence[torch.Tensor], scheme: QuantScheme) -> Sequence[torch.Tensor]:
    """As one weight where rows do not share a scale: few large operations take less time than many small ones."""
    return weights if scheme.granularity == "tensor" else [torch.cat([weight.float() for weight in weights])]


def awq_scales(act_mean: torch.Tensor, ratio: float) -> torch.Tensor:
    """`act_mean ** ratio`, centred on one (geometric mean of its extremes), float32 `[in]`; dead channels keep 1."""
    live = act_mean > 0
    if not live.any():
        return torch.ones_like(act_mean, dtype=torch.float32)
    # Logarithms: the product of the extremes may overflow.
    powers = ratio * act_mean.double().clamp(min=torch.finfo(torch.float64).tiny).log()
    centred = powers - (powers[live].max() + powers[live].min()) / 2
    scales = centred.exp().clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE)
    return torch.where(live, scales, 1.0).float()


def search_clip(
    weight: torch.Tensor, gram: torch.Tensor, scheme: QuantScheme, *, n_grid: int = 20, max_shrink: float = 0.5
) -> torch.Tensor:
    """The magnitude at which to clip each group before min-max scales are chosen (as the authors' code does).

    weight `[out, in]`, gram `[in, in]`. Returns bounds, float32 `[out, groups]`: clamp the group to `[-bound, bound]`.
    Tried are the largest magnitude times 1 down to `1 - max_shrink` in `n_grid` steps; the first is no clipping, and
    stays unless another is strictly better on the group's own part of the output, `e_g H_gg e_g^T`.

    Raises NumericsError for non-finite weights, ValueError where shapes do not fit.
    """
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    if gram.shape != (columns, columns):
        raise ValueError(f"the Gram matrix must be {columns} x {columns}, not {tuple(gram.shape)}")
    grouped = weight.float().reshape(rows, groups, -1)
    blocks = gram.float().reshape(groups, columns // groups, groups, -1).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    largest = grouped.abs().amax(-1)
    if scheme.granularity == "tensor":
        largest = largest.max().expand(rows, 1)
    bounds = largest.clone()
    lowest = _clip_error(grouped, blocks, bounds, scheme)
    for step in range(1, n_grid + 1):
        candidate = largest * (1 - max_shrink * step / n_grid)
        errors = _clip_error(grouped, blocks, candidate, scheme)
        better = errors < lowest
        bounds = torch.where(better, candidate, bounds)
        lowest = torch.where(better, errors, lowest)
    return bounds


def clip(weight: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """`weight` `[out, in]` with each group clamped to `[-bound, bound]`, bounds `[out, groups]`; dtype kept."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, bounds.shape[1], -1)
    limits = bounds.to(weight.dtype).unsqueeze(-1)
    return torch.clamp(grouped, -limits, limits).reshape(rows, columns)


def _scaled_error(
    weights: Sequence[torch.Tensor], scales: torch.Tensor, gram: torch.Tensor, scheme: QuantScheme, quantizer: Quantizer
) -> float:
    """Squared output error of all consumers with columns scaled by `scales` and the input divided by them."""
    total = 0.0
    for weight in weights:
        exact = weight.float()
        rounded = dequantize(_quantize(exact * scales, gram.diagonal() / scales.square(), scheme, quantizer))
        total += row_errors(exact - rounded / scales, gram).sum().item()
    return total


def _quantize(
    weight: torch.Tensor, importance: torch.Tensor, scheme: QuantScheme, quantizer: Quantizer
) -> QuantizedTensor:
    if quantizer == "minmax":
        return quantize(weight, *choose_qparams(weight, scheme), scheme)
    if quantizer == "search":
        qparams = search_qparams(weight, importance, scheme, n_grid=_INNER_GRID, n_fine=0)
        return round_to_codes(weight, *qparams, scheme)
    raise ValueError(f"quantizer must be 'minmax' or 'search', not {quantizer!r}")


def _clip_error(grouped: torch.Tensor, blocks: torch.Tensor, bounds: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """`e_g H_gg e_g^T`, float32 `[out, groups]`, of min-max codes after clipping; one sum where the tensor has one
    scale. grouped `[out, groups, size]`, blocks `[groups, size, size]`."""
    weight = grouped.flatten(1)
    clipped = clip(weight, bounds)
    delta = (weight - dequantize(quantize(clipped, *choose_qparams(clipped, scheme), scheme))).reshape(grouped.shape)
    errors = (torch.einsum("ogi,gij->ogj", delta, blocks) * delta).sum(-1)
    return errors.sum().expand_as(errors) if scheme.granularity == "tensor" else errors
