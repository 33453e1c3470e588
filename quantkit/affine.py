"""Affine quantisation: choosing scales and zeros, rounding to codes, and back.

Everything is exact and elementwise, so the result does not depend on the number of threads or on the machine. Rows are
worked on in slices that stay in the processor's cache; a whole float32 copy of the tensor never exists.
"""

from collections.abc import Iterator

import torch

from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme

# 2 MB of float32: fewer would take longer to start an operation than to do it where two threads share an interpreter,
# more leave the cache.
_SLICE_VALUES = 1 << 19


def row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Slices over rows that hold about `_SLICE_VALUES` values each."""
    step = max(1, _SLICE_VALUES // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def smallest_scale(dtype: torch.dtype) -> float:
    """The smallest scale that is written: positive in `dtype`, and a normal number in float32, where it is used."""
    return max(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps, torch.finfo(torch.float32).tiny)


def choose_qparams(weight: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros from the range of each group (absmax for symmetric schemes, min-max with zero-points).

    weight: `[out, in]`, any float dtype. Returns scales `[out, groups]` in the scheme's dtype, and zeros uint8
    `[out, groups]` or None. Symmetric: scale = absmax / (2**(bits-1) - 1). Zero-point: the range is widened to contain
    zero, scale = (max - min) / (2**bits - 1), zero = round(-min / scale), both against the *rounded* scale. A group
    without range (all zero, or too small for the dtype) gets the smallest positive scale.

    Raises NumericsError for non-finite weights and for a scale that overflows its dtype; ValueError where the group
    size does not divide the width.
    """
    rows, columns = weight.shape
    groups = scheme.groups(columns)
    low, high = _group_range(weight, groups)
    if scheme.granularity == "tensor":
        low, high = low.min().expand(rows, 1), high.max().expand(rows, 1)
    if not torch.isfinite(low).all() or not torch.isfinite(high).all():
        raise NumericsError("the weight holds NaN or infinite values", "repair or re-export the checkpoint")
    return qparams_from_range(low, high, scheme)


def qparams_from_range(
    low: torch.Tensor, high: torch.Tensor, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros of groups whose values lie in `[low, high]` (float32 `[out, groups]`, low <= 0 <= high)."""
    if scheme.symmetric:
        scales = _round_scale(torch.maximum(-low, high) / (scheme.midpoint - 1), scheme)
        return scales, None
    top = scheme.levels - 1
    # high / top - low / top instead of (high - low) / top: the difference may overflow where its parts do not.
    scales = _round_scale(high / top - low / top, scheme)
    zeros = torch.round(-low / scales.float()).clamp_(0, top).to(torch.uint8)
    return scales, zeros


def quantize(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: QuantScheme
) -> QuantizedTensor:
    """Round to the nearest code (ties to even) against the given scales and zeros.

    weight `[out, in]`; scales and zeros `[out, groups]`. Symmetric codes are restricted to
    `-(2**(bits-1) - 1) .. 2**(bits-1) - 1` around the midpoint, so that the range has no lonely negative end.
    """
    rows, columns = weight.shape
    groups = scales.shape[1]
    codes = torch.empty(rows, columns, dtype=torch.uint8)
    lowest = 1 if scheme.symmetric else 0
    for part in row_slices(rows, columns):
        grouped = weight[part].float().reshape(-1, groups, columns // groups)
        steps = grouped / scales[part].float().unsqueeze(-1)
        steps.round_().add_(scheme.midpoint if zeros is None else zeros[part].float().unsqueeze(-1))
        codes[part] = steps.clamp_(lowest, scheme.levels - 1).reshape(-1, columns).to(torch.uint8)
    return QuantizedTensor(codes, scales, zeros, scheme)


def dequantize(
    tensor: QuantizedTensor, dtype: torch.dtype = torch.float32, arithmetic: torch.dtype = torch.float32
) -> torch.Tensor:
    """`(codes - zeros) * scales` as `[out, in]` in `dtype`.

    `arithmetic` is the dtype of the product: float32 is exact for the bits that we store; readers that multiply in the
    stored scale dtype (transformers with `dequantize: true`) round there, and can be reproduced with it.
    """
    rows, columns = tensor.shape
    groups = tensor.scales.shape[1]
    weight = torch.empty(rows, columns, dtype=dtype)
    for part in row_slices(rows, columns):
        steps = tensor.codes[part].to(arithmetic).reshape(-1, groups, columns // groups)
        steps -= tensor.scheme.midpoint if tensor.zeros is None else tensor.zeros[part].to(arithmetic).unsqueeze(-1)
        steps *= tensor.scales[part].to(arithmetic).unsqueeze(-1)
        weight[part] = steps.reshape(-1, columns).to(dtype)
    return weight


def _group_range(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each group, widened to contain zero, float32 `[out, groups]`."""
    rows, columns = weight.shape
    low = torch.empty(rows, groups)
    high = torch.empty(rows, groups)
    for part in row_slices(rows, columns):
        grouped = weight[part].float().reshape(-1, groups, columns // groups)
        low[part] = grouped.amin(-1).clamp_(max=0)
        high[part] = grouped.amax(-1).clamp_(min=0)
    return low, high


def _round_scale(scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Scales in the dtype of the file: finite and positive, or an error."""
    dtype = scheme.torch_scale_dtype
    rounded = scales.clamp(min=smallest_scale(dtype)).to(dtype)
    if not torch.isfinite(rounded).all():
        raise NumericsError(
            f"a scale of {scales.max().item():.4g} does not fit {scheme.scale_dtype}",
            "set weights.scale_dtype to bfloat16 or float32",
        )
    return rounded
