"""Searched scales: the clipping range of each group that loses least, weighted by how much each input matters.

The cheapest large gain of all methods here: a min-max scale spends its codes on the one extreme value of a group, a
smaller scale clips that value and is finer for all others. The idea is the range search of OMSE (Choukroun et al. 2019)
and of the weight clipping in AWQ's code (Lin et al. 2023), here with the diagonal of the Hessian as weights, as in
SqueezeLLM (Kim et al. 2023), and followed by a closed-form re-fit.
"""

import torch

from quantkit.affine import choose_qparams, row_slices, smallest_scale
from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme

# Closed-form re-fits after the grid; a third one changes the error by less than a thousandth.
_REFITS = 2


def search_qparams(
    weight: torch.Tensor, importance: torch.Tensor, scheme: QuantScheme, *, n_grid: int = 16, n_fine: int = 4
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zeros that minimise `sum_j importance_j * (w_j - q_j)**2` over each group.

    weight `[out, in]`, any float dtype; importance `[in]`, not negative, in any unit (the diagonal of the Hessian).
    Returns scales `[out, groups]` in the scheme's dtype and zeros uint8 `[out, groups]` or None; give them to
    `round_to_codes` or `gptq_quantize`.

    The search starts from min-max and moves only to what is strictly better, so a group is never worse than min-max: a
    grid of `n_grid` shrunken ranges; `n_fine` steps to either side of the best, between its neighbours; then, for the
    codes so found, the least-squares scale `sum(h w c) / sum(h c c)`. With zero-points each range is tried with the
    zero and its two neighbours. Every scale is rounded to the dtype of the file before its codes are chosen.

    All codes `0 .. 2**bits - 1` may be used, for symmetric schemes too, and their scales may be negative, which gives
    the one code that is left over to the longer tail: readers only ever multiply by the scale. On groups of 64 normal
    weights the full range takes 10% (4 bits), 16% (3) and 23% (2) off the error of `+-(2**(bits-1) - 1)`, and the free
    sign as much again. A group without importance keeps its min-max scale. One scale for a tensor is searched on the
    whole tensor, in several float32 copies of it; otherwise memory is a few slices of rows.

    Raises NumericsError for non-finite weights, for an importance that is negative or not finite, and for a min-max
    scale that overflows its dtype; ValueError for shapes or grids that do not fit.
    """
    if n_grid < 1 or n_fine < 0:
        raise ValueError(f"n_grid must be positive and n_fine not negative, not {n_grid} and {n_fine}")
    rows, columns = weight.shape
    weights_of_columns = _normalised(importance, columns).reshape(scheme.groups(columns), -1)
    scales, zeros = choose_qparams(weight, scheme)
    scales = scales.clone(memory_format=torch.contiguous_format)
    zeros = None if zeros is None else zeros.clone(memory_format=torch.contiguous_format)
    parts = [slice(0, rows)] if scheme.granularity == "tensor" else row_slices(rows, columns)
    for part in parts:
        values = weight[part].float().reshape(-1, *weights_of_columns.shape)
        best = _Best(values, weights_of_columns, scheme, scales[part], None if zeros is None else zeros[part])
        _search_grid(best, n_grid, n_fine)
        for _ in range(_REFITS):
            best.refit()
        scales[part] = best.scales.to(scales.dtype)
        if zeros is not None:
            zeros[part] = best.zeros.to(torch.uint8)
    return scales, zeros


def round_to_codes(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: QuantScheme
) -> QuantizedTensor:
    """Round `weight` `[out, in]` to the nearest of all codes `0 .. 2**bits - 1` (ties to even).

    It differs from `affine.quantize` in one code: the lowest of a symmetric scheme, which absmax scales never reach and
    searched scales make use of.
    """
    rows, columns = weight.shape
    groups = scales.shape[1]
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    for part in row_slices(rows, columns):
        values = weight[part].float().reshape(-1, groups, columns // groups)
        zero = code_zeros(scales[part], zeros if zeros is None else zeros[part], scheme).unsqueeze(-1)
        steps = torch.round(values / scales[part].float().unsqueeze(-1)).add_(zero)
        codes[part] = steps.clamp_(0, scheme.levels - 1).reshape(-1, columns).to(torch.uint8)
    return QuantizedTensor(codes, scales, zeros, scheme)


def code_zeros(scales: torch.Tensor, zeros: torch.Tensor | None, scheme: QuantScheme) -> torch.Tensor:
    """The code of value zero for each scale, float32 in the shape of `scales`; the midpoint for symmetric schemes."""
    if zeros is None:
        return torch.full_like(scales, scheme.midpoint, dtype=torch.float32)
    return zeros.float()


def round_scales(scales: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """float32 scales as the file will hold them: finite, not zero, rounded to the scheme's dtype; back in float32."""
    dtype = scheme.torch_scale_dtype
    magnitude = scales.abs().clamp(smallest_scale(dtype), torch.finfo(dtype).max)
    return torch.copysign(magnitude, scales).to(dtype).float()


class _Best:
    """The best scales and zeros so far of the groups of some rows, and their error.

    values `[rows, groups, size]`, importance `[groups, size]`; scales (already rounded), zeros and errors are float32
    `[rows, groups]`. With one scale for the tensor all rows share one error, and so every choice.
    """

    def __init__(
        self,
        values: torch.Tensor,
        importance: torch.Tensor,
        scheme: QuantScheme,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
    ) -> None:
        self._values = values
        self._importance = importance
        self.scheme = scheme
        self.scales = scales.float()
        self.zeros = code_zeros(scales, zeros, scheme)
        self.errors = torch.full_like(self.scales, torch.inf)
        self._take(self.scales, self.zeros)

    def consider(self, scales: torch.Tensor, *choices: torch.Tensor) -> None:
        """Take these (unrounded) scales, with the best of some zeros, for the groups whose error they lower."""
        self._take(round_scales(scales, self.scheme), *(zeros.clamp(0, self.scheme.levels - 1) for zeros in choices))

    def _take(self, scales: torch.Tensor, *choices: torch.Tensor) -> None:
        # Dividing and rounding is half of the work, and all zeros share it.
        exact = self._values / scales.unsqueeze(-1)
        nearest = torch.round(exact)
        for zeros in choices:
            errors = self._error(exact, nearest, scales, zeros)
            better = errors < self.errors
            self.scales = torch.where(better, scales, self.scales)
            self.zeros = torch.where(better, zeros, self.zeros)
            self.errors = torch.where(better, errors, self.errors)

    def refit(self) -> None:
        """Consider the least-squares scale for the present codes."""
        steps = self._coded(torch.round(self._values / self.scales.unsqueeze(-1)), self.zeros)
        weighted = steps * self._importance
        top = self._shared((weighted * self._values).sum(-1))
        bottom = self._shared(weighted.mul_(steps).sum(-1))
        # No code apart from zero, or 0/0 after underflow: nothing to fit, and clamping would turn NaN into a scale.
        fitted = torch.where(bottom > 0, top / bottom, self.scales)
        self.consider(torch.where(torch.isfinite(fitted), fitted, self.scales), self.zeros)

    def _error(
        self, exact: torch.Tensor, nearest: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> torch.Tensor:
        """Weighted squared error of each group, `[rows, groups]`. exact: values in steps; nearest: whole ones."""
        difference = self._coded(nearest, zeros).sub_(exact)
        # In units of the step first: squares of tiny weights would underflow.
        return self._shared(difference.square_().mul_(self._importance).sum(-1) * scales.square())

    def _coded(self, nearest: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The signed whole steps next to `nearest` that have a code."""
        if self.scheme.symmetric:
            return nearest.clamp(-self.scheme.midpoint, self.scheme.midpoint - 1)
        zero = zeros.unsqueeze(-1)
        # Two passes with one bound each are faster than one clamp with two.
        steps = torch.maximum(nearest, -zero)
        return torch.minimum(steps, self.scheme.levels - 1 - zero, out=steps)

    def _shared(self, table: torch.Tensor) -> torch.Tensor:
        """The sum over all rows, in every row, where the tensor has one scale; else `table`."""
        if self.scheme.granularity != "tensor":
            return table
        return table.sum(dtype=torch.float64).float().expand_as(table)


def _search_grid(best: _Best, n_grid: int, n_fine: int) -> None:
    """A coarse grid over shrunken ranges, then a fine one between the neighbours of the best."""
    scheme = best.scheme
    # The fewer the codes, the more it pays to clip: normal values want 0.37 of their range at 2 bits, all of it at 8.
    spacing = min(0.8, 2.4 / scheme.bits) / n_grid
    offsets = (0,) if scheme.symmetric else (0, -1, 1)
    # A symmetric scheme has one code more below zero than above: a negative scale gives it to the positive values.
    signs = (1, -1) if scheme.symmetric else (1,)
    scales, zeros = best.scales, best.zeros
    for step in range(n_grid + 1):
        for sign in signs:
            # Shrinking both ends alike keeps the zero where it is.
            best.consider(scales * (sign * (1 - spacing * step)), *(zeros + offset for offset in offsets))
    scales, zeros = best.scales, best.zeros
    for step in range(-n_fine, n_fine + 1):
        best.consider(scales * (1 + spacing * step / max(1, n_fine)), *(zeros + offset for offset in offsets))


def _normalised(importance: torch.Tensor, columns: int) -> torch.Tensor:
    """Importance as float32 with mean one, so that its unit can neither overflow nor underflow the errors."""
    if importance.shape != (columns,):
        raise ValueError(f"importance must have one value for each of the {columns} inputs, not {importance.shape}")
    if not torch.isfinite(importance).all() or (importance < 0).any():
        raise NumericsError(
            "the importance of the inputs holds negative, NaN or infinite values",
            "check the calibration activations of this layer for non-finite values",
        )
    exact = importance.double()
    return (exact / exact.mean().clamp(min=torch.finfo(torch.float64).tiny)).float()
