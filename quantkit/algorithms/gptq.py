"""GPTQ: round one input column at a time, and let the columns not yet rounded make up for the error.

Frantar et al. 2022, "GPTQ: Accurate post-training quantization for generative pre-trained transformers", Algorithm 1.
One letter an axis: W and Q are `[out, in]`, H `[in, in]` is the Gram matrix `X^T X` of the layer's inputs (any positive
factor, such as 2 / tokens, leaves the codes alone). All minimise `tr((W - Q) H (W - Q)^T)`, the squared error of the
layer's output, in which the rows of W are independent.

    columns     |<- block ->|<- block ->|<-blk->|       errors inside a block are spread column by column,
    groups      |<-- g 0 -->|<-- g 1 -->|<- g 2 |       errors of a whole block reach all later columns as one product
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from quantkit.affine import choose_qparams, dequantize, smallest_scale
from quantkit.algorithms.search import code_zeros, round_to_codes
from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme

ActOrder = Literal["none", "static"]

# Errors that differ by less, relatively, are the same: they are found in two ways, in float32.
_SAME = 1e-5
# Columns that pass their changes on one at a time; to all others they go as one product.
_INNER_COLUMNS = 32
# Columns of a symmetric matrix that are multiplied at once: few, to read little of its other half.
_ERROR_COLUMNS = 128


class NotPositiveDefinite(NumericsError):  # noqa: N818 - as Interrupted: what happened, not "error"
    """The damped Hessian cannot be factorised: too few or repeated tokens for the width, and too little damping."""


@dataclass(frozen=True)
class GPTQResult:
    """What GPTQ chose, and what it gained.

    error_before, error_after: `tr((W - Q) H (W - Q)^T)` with the given, undamped H, of rounding to nearest and of the
    result, both on the same scales. damping: what was added to the diagonal of H, in the unit of H. dead_channels:
    inputs that were never active. nearest_rows: rows that rounding to nearest served at least as well.
    """

    tensor: QuantizedTensor
    error_before: float
    error_after: float
    damping: float
    dead_channels: int
    nearest_rows: int


@dataclass(frozen=True)
class Prepared:
    """A Gram matrix H `[in, in]` made ready, once for all rows of all weights that read the same inputs.

    damped: float32, with `damping` added to the diagonal, which had `added` `[in]` less before. dead: bool `[in]`,
    inputs that were never active. order: int64 `[in]`, the columns in the order of work. factor: `upper_factor` of the
    damped H in that order.
    """

    damped: torch.Tensor
    damping: float
    added: torch.Tensor
    dead: torch.Tensor
    order: torch.Tensor
    factor: torch.Tensor


def prepare_hessian(hessian: torch.Tensor, *, damp: float = 0.01, act_order: ActOrder = "none") -> Prepared:
    """What `gptq_quantize` and `coordinate_descent` need of a Gram matrix `[in, in]`.

    damp: fraction of the mean diagonal of the active channels that is added to the diagonal. act_order: "static" takes
    columns in descending order of H's diagonal. Raises NotPositiveDefinite: the caller decides whether to raise `damp`,
    and records it. NumericsError: a non-finite Hessian. ValueError: one that is not square, or another order.
    """
    damped, damping, dead = damp_hessian(hessian, damp)
    order = _column_order(damped, act_order)
    factor = upper_factor(damped[order][:, order])
    return Prepared(damped, damping, damped.diagonal() - hessian.diagonal(), dead, order, factor)


def gptq_quantize(
    weight: torch.Tensor,
    prepared: Prepared,
    scheme: QuantScheme,
    *,
    block_size: int = 128,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> GPTQResult:
    """Quantise `weight` `[out, in]` for inputs with the Gram matrix `prepared` (Algorithm 1).

    scales, zeros `[out, groups]`: as from `search_qparams`; min-max by default. They are fixed beforehand for groups of
    the original columns ("static groups"), so another order of columns needs no group index: codes come back in the
    original one. block_size changes speed only. A channel with `H[j, j] == 0` keeps its nearest codes. A row that is
    better rounded to nearest stays so (narrow layers have some; wide ones hardly any): no row, and so no layer, is
    worse than rounding to nearest on the same scales.

    Worked example, 2 bits, scale 1 (codes stand for -2 .. 1), H = [[1, .8], [.8, 1]], undamped, one row [0.4, 0.4]:
    nearest is [0, 0], error .576. GPTQ rounds .4 to 0, moves its error into the second column, .4 + .8 * .4 = .72, and
    rounds that to 1: [0, 1], error .4**2 + .6**2 - 2 * .8 * .4 * .6 = .136.

    Raises NumericsError: non-finite weight, scale overflow. ValueError: shapes that do not fit.
    """
    _check_weight(weight, prepared)
    if scales is None:
        scales, zeros = choose_qparams(weight, scheme)
    order = prepared.order
    nearest = round_to_codes(weight, scales, zeros, scheme)
    columns = weight.float().T[order].contiguous()
    steps = _Steps.of(nearest, order)
    codes = torch.empty_like(nearest.codes.T)
    codes[order], after = _round_columns(columns, prepared.factor, steps, block_size)
    chosen = replace(nearest, codes=codes.T.contiguous())

    deltas = [weight.float() - dequantize(tensor) for tensor in (nearest, chosen)]
    before = row_errors(deltas[0], prepared.damped)
    # Judged with the damped H. The undamped error is then no larger either: nearest codes have the least added term.
    worse = after >= before * (1 - _SAME)
    chosen.codes[worse] = nearest.codes[worse]
    deltas[1][worse], after[worse] = deltas[0][worse], before[worse]
    # The undamped error: damping is a diagonal, and what it added to each row is cheap to take off again.
    error_before, error_after = (
        (total - (delta.square() * prepared.added).sum(1, dtype=torch.float64)).clamp(min=0).sum().item()
        for delta, total in zip(deltas, (before, after), strict=True)
    )
    return GPTQResult(
        tensor=chosen,
        error_before=error_before,
        error_after=error_after,
        damping=prepared.damping,
        dead_channels=int(prepared.dead.sum()),
        nearest_rows=int(worse.sum()),
    )


def coordinate_descent(
    weight: torch.Tensor, prepared: Prepared, tensor: QuantizedTensor, *, sweeps: int = 8
) -> QuantizedTensor:
    """Improve the codes and scales of `tensor` one at a time until nothing changes, at most `sweeps` times.

    weight `[out, in]`, prepared: as `gptq_quantize` had them. Each step solves its one-dimensional problem exactly,
    with all else fixed, so none raises `tr((W - Q) H (W - Q)^T)` with the damped H: a code becomes the nearest to its
    optimum `c + (E H)_j / (s H_jj)`, E = W - Q (cyclic coordinate descent as in QuantEase, Behdin et al. 2023); a scale
    becomes `s + <c, E H> / <c, c H>` over the columns of its group, rounded to its dtype and kept where that is better.
    Zeros stay.

    Raises NumericsError for a non-finite weight, ValueError where shapes do not fit.
    """
    _check_weight(weight, prepared)
    damped = prepared.damped
    steps = _Steps.of(tensor, torch.arange(weight.shape[1], device=weight.device))
    current = (tensor.codes.T - steps.zeros[steps.groups]).contiguous()
    gradient = damped @ (weight.float().T - current * steps.scales[steps.groups])
    for sweep in range(sweeps):
        changed = _descend_codes(current, gradient, damped, steps)
        changed |= _refit_scales(current, gradient, damped, steps, last=sweep == sweeps - 1)
        if not changed:
            break
    codes = (current + steps.zeros[steps.groups]).to(torch.uint8).T.contiguous()
    return replace(tensor, codes=codes, scales=steps.scales.T.to(tensor.scales.dtype).contiguous())


def row_errors(delta: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """`diag(D H D^T)` for D `[out, in]` and H `[in, in]`: the squared output error of each row, float64 `[out]`.

    H is symmetric: what stands above its diagonal blocks counts twice, what stands below is not read.
    """
    total = torch.zeros(len(delta), dtype=torch.float64, device=delta.device)
    for start in range(0, len(hessian), _ERROR_COLUMNS):
        columns = slice(start, start + _ERROR_COLUMNS)
        part = delta[:, columns]
        image = part @ hessian[columns, columns]
        image.addmm_(delta[:, :start], hessian[:start, columns], alpha=2)
        total += image.mul_(part).sum(1, dtype=torch.float64)
    return total


def damp_hessian(hessian: torch.Tensor, damp: float) -> tuple[torch.Tensor, float, torch.Tensor]:
    """H with `damp` times the mean diagonal of its active channels added to the diagonal.

    Returns the damped H (float32 copy), what was added, and the mask `[in]` of dead channels (diagonal of zero), which
    are cut off from all others: no error flows into them or out of them.
    """
    if hessian.ndim != 2 or hessian.shape[0] != hessian.shape[1]:
        raise ValueError(f"the Hessian must be square, not {tuple(hessian.shape)}")
    damped = hessian.to(torch.float32, copy=True)
    diagonal = damped.diagonal()
    if not torch.isfinite(damped).all() or (diagonal < 0).any():
        raise NumericsError(
            "the Hessian holds NaN, infinite or negative diagonal values",
            "check the calibration activations of this layer; float16 overflows above 65504",
        )
    dead = diagonal == 0
    damping = damp * diagonal[~dead].double().mean().item() if not dead.all() else 0.0
    damped[dead, :] = 0
    damped[:, dead] = 0
    diagonal += damping
    # Without damping a dead channel still needs a pivot; any will do, since it stands alone.
    diagonal[dead] = damping or 1.0
    return damped, damping, dead


def upper_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Upper triangular R with `R R^T = H`, float32 `[in, in]`.

    The paper's "Cholesky form" (section 3.3, step 3) wants U with `U^T U = H^-1`, which is R^-1. R itself does as well
    and needs no inverse: `e H e^T = |e R|^2`, whose j-th term holds only the errors of the columns up to j, so each
    column in turn can make its own term small (Chen et al. 2025, "The geometry of LLM quantization: GPTQ as Babai's
    nearest plane algorithm"). In float64, for channels 2000 times the median square to ratios that float32 cannot hold.

    Callers should run this, and the column loops of this file, on one thread: where another process holds a core, each
    of their many small products waits milliseconds for it (1536 wide: 4.65 s on two threads, 0.11 s on one).
    """
    # Read from its last row up, H has the usual lower factor.
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1).double())
    # The Gram matrix was summed in float32: a pivot of that size is rounding, not information.
    noise = 2 * torch.finfo(torch.float32).eps * hessian.diagonal().double()
    if info.item() or not (lower.diagonal().flip(0).square() > noise).all():
        raise NotPositiveDefinite(
            "the damped Hessian is not positive definite (too few or repeated calibration tokens for this width)",
            "raise damp, or calibrate with more text",
        )
    return lower.float().flip(0, 1)


@dataclass
class _Steps:
    """Scales and zeros with the output rows last, so that one column of W is one piece of memory.

    scales, zeros: float32 `[groups, out]`; groups `[in]`: the group of each column, in the order of work.
    """

    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    scheme: QuantScheme

    @classmethod
    def of(cls, tensor: QuantizedTensor, order: torch.Tensor) -> "_Steps":
        groups = tensor.scales.shape[1]
        zeros = code_zeros(tensor.scales, tensor.zeros, tensor.scheme)
        group_of = order // (tensor.shape[1] // groups)
        return cls(tensor.scales.float().T.contiguous(), zeros.T.contiguous(), group_of, tensor.scheme)

    @property
    def top(self) -> int:
        return self.scheme.levels - 1


def _check_weight(weight: torch.Tensor, prepared: Prepared) -> None:
    if weight.shape[1] != len(prepared.damped):
        raise ValueError(f"a weight of {weight.shape[1]} inputs, and a Hessian of {len(prepared.damped)}")
    # NaN would pass every clamp and become an arbitrary code.
    if not torch.isfinite(weight).all():
        raise NumericsError("the weight holds NaN or infinite values", "repair or re-export the checkpoint")


def _column_order(hessian: torch.Tensor, act_order: ActOrder) -> torch.Tensor:
    """The order of work; stable, so that equal channels keep theirs and runs agree."""
    if act_order == "static":
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    if act_order == "none":
        return torch.arange(len(hessian), device=hessian.device)
    raise ValueError(f"act_order must be 'none' or 'static', not {act_order!r}")


def _round_columns(
    columns: torch.Tensor, factor: torch.Tensor, steps: _Steps, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loop of Algorithm 1 over `columns` `[in, out]` (W transposed), with `factor` from `upper_factor`.

    Returns codes `[in, out]`, and for each row of W the error `|e R|^2` that they leave, float64 `[out]`.
    """
    codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
    left = torch.zeros(columns.shape[1], dtype=torch.float64, device=columns.device)
    # What the columns done so far add to the term of each later one: `sum over i < j of e_i R_ij`.
    carried = torch.zeros_like(columns)
    groups, pivots = steps.groups.tolist(), factor.diagonal().tolist()
    for start in range(0, len(columns), block_size):
        end = min(start + block_size, len(columns))
        errors = torch.empty_like(columns[start:end])
        # Blocks inside the block: a column reaches few others one by one, the rest as one product.
        for first in range(start, end, _INNER_COLUMNS):
            last = min(first + _INNER_COLUMNS, end)
            for i in range(first, last):
                scale, zero = steps.scales[groups[i]], steps.zeros[groups[i]]
                wanted = torch.add(columns[i], carried[i], alpha=1 / pivots[i])
                code = wanted.div_(scale).round_().add_(zero).clamp_(0, steps.top)
                codes[i] = code
                error = torch.sub(columns[i], code.sub_(zero).mul_(scale), out=errors[i - start])
                carried[i].add_(error, alpha=pivots[i])
                carried[i + 1 : last].addr_(factor[i, i + 1 : last], error)
            carried[last:end].addmm_(factor[first:last, last:end].T, errors[first - start : last - start])
        carried[end:].addmm_(factor[start:end, end:].T, errors)
        left += carried[start:end].square().sum(0, dtype=torch.float64)
    return codes, left


def _descend_codes(
    current: torch.Tensor, gradient: torch.Tensor, hessian: torch.Tensor, steps: _Steps, block_size: int = 128
) -> bool:
    """One sweep over the columns. `current` (code minus zero) and `gradient` (H E^T), `[in, out]`, change in place."""
    changed = False
    groups, diagonal = steps.groups.tolist(), hessian.diagonal().tolist()
    for start in range(0, len(current), block_size):
        end = min(start + block_size, len(current))
        local = gradient[start:end].clone()
        moves = torch.empty_like(local)
        for first in range(start, end, _INNER_COLUMNS):
            last = min(first + _INNER_COLUMNS, end)
            for i in range(first, last):
                scale, zero, code, n = steps.scales[groups[i]], steps.zeros[groups[i]], current[i], i - start
                # Divided in turn: a tiny scale times a small diagonal underflows to zero, and 0 / 0 would be NaN.
                wanted = torch.round((local[n] / diagonal[i]).div_(scale)).add_(code)
                torch.clamp(wanted, -zero, steps.top - zero, out=wanted)
                torch.sub(code, wanted, out=moves[n]).mul_(scale)
                code.copy_(wanted)
                local[n + 1 : last - start].addr_(hessian[i, i + 1 : last], moves[n])
            local[last - start :].addmm_(hessian[last:end, first:last], moves[first - start : last - start])
        if moves.any():
            gradient.addmm_(hessian[:, start:end], moves)
            changed = True
    return changed


def _refit_scales(
    current: torch.Tensor, gradient: torch.Tensor, hessian: torch.Tensor, steps: _Steps, *, last: bool
) -> bool:
    """One sweep over the scales; `steps.scales` and `gradient` change in place.

    last: nothing reads the gradient any more, and so the part of it that this sweep has read already is left as it was.
    """
    changed = False
    size = len(current) // len(steps.scales)
    dtype = steps.scheme.torch_scale_dtype
    for group, scale in enumerate(steps.scales):
        part = slice(group * size, (group + 1) * size)
        unread = slice(part.start if last else 0, None)
        image = hessian[unread, part] @ current[part]
        slope = (current[part] * gradient[part]).sum(0)
        curvature = (current[part] * image[part.start - unread.start :][:size]).sum(0)
        if steps.scheme.granularity == "tensor":
            slope, curvature = slope.sum().expand_as(slope), curvature.sum().expand_as(curvature)
        fitted = (scale + slope / curvature).to(dtype).float()
        gain = fitted - scale
        # NaN (no code but zero) fails every comparison, and so leaves the scale as it is.
        better = (gain * (gain * curvature - 2 * slope) < 0) & (fitted * scale.sign() >= smallest_scale(dtype))
        better &= fitted.abs() <= torch.finfo(dtype).max
        if better.any():
            gain = torch.where(better, gain, 0.0)
            scale.copy_(torch.where(better, fitted, scale))
            gradient[unread].addcmul_(image, gain.expand_as(image), value=-1)
            changed = True
    return changed
