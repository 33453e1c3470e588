"""SmoothQuant: move the outliers of the activations into the weights, where they are easier to round.

Xiao et al. 2022, "SmoothQuant: Accurate and efficient post-training quantization for large language models", section 4,
equations 3 and 4: `Y = (X diag(1/s)) (diag(s) W^T)`, with s between what equalises the ranges of the activations
(alpha = 1) and those of the weights (alpha = 0).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.affine import choose_qparams, dequantize, quantize
from quantkit.errors import NumericsError
from quantkit.types import QuantScheme

# Scales are folded into 16-bit weights and norms: a factor outside these bounds would eat their range.
_LARGEST_SCALE = 1e5
_INT8_CHANNEL = QuantScheme(bits=8, granularity="channel")


@dataclass(frozen=True)
class SmoothResult:
    """scales float32 `[in]`: divide activations, multiply weight columns. alpha: the exponent chosen, None where
    nothing beat the unsmoothed layer (scales are then all one). Errors: relative output error on the samples."""

    scales: torch.Tensor
    alpha: float | None
    error_before: float
    error_after: float


def smooth_scales(act_absmax: torch.Tensor, weight_absmax: torch.Tensor, alpha: float = 0.5) -> torch.Tensor:
    """`s_j = act_absmax_j ** alpha / weight_absmax_j ** (1 - alpha)`, float32 `[in]` (equation 4).

    act_absmax `[in]`: the largest |x| of each channel over calibration; weight_absmax `[in]`: the largest |w| of each
    column over all consumers. A channel with no activation or no weight has nothing to balance and keeps 1; the others
    are held within 1e-5 and 1e5.

    Worked example, alpha 0.5: activation 16, weight 0.25 gives s = 4 / 0.5 = 8; both ranges become 2.

    Raises NumericsError for values that are negative or not finite, ValueError for an alpha outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must lie in [0, 1], not {alpha}")
    for name, values in (("activation", act_absmax), ("weight", weight_absmax)):
        if not torch.isfinite(values).all() or (values < 0).any():
            raise NumericsError(
                f"the {name} maxima hold negative, NaN or infinite values",
                "check the checkpoint and the calibration activations of this site",
            )
    live = (act_absmax > 0) & (weight_absmax > 0)
    act, wide = (torch.where(live, values.double(), 1.0) for values in (act_absmax, weight_absmax))
    scales = act.pow(alpha) / wide.pow(1 - alpha)
    return torch.where(live, scales.clamp(1 / _LARGEST_SCALE, _LARGEST_SCALE), 1.0).float()


def search_alpha(
    activations: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *,
    act_absmax: torch.Tensor | None = None,
    channel: torch.Tensor | None = None,
    n_grid: int = 20,
    scheme: QuantScheme = _INT8_CHANNEL,
) -> SmoothResult:
    """The alpha out of `0, 1/n_grid .. 1` with the least W8A8 output error on samples, or none.

    activations: float samples `[tokens, in]`; weights: all consumers, `[out_i, in]`. The error is that of `W8A8Error`,
    with each token rounded to symmetric int8 on its own scale and weights by `scheme` (min-max).
    act_absmax `[in]`: maxima over the whole calibration set, where the samples are fewer; by default theirs.
    channel `[in]`: the producer channel of each input, where several inputs share one and so must share a scale.

    Raises NumericsError for non-finite values, ValueError where shapes do not fit.
    """
    if any(weight.shape[1] != activations.shape[1] for weight in weights):
        raise ValueError("activations and weights must agree on the number of inputs")
    samples = activations.float()
    maxima = shared_max(samples.abs().amax(0) if act_absmax is None else act_absmax, channel)
    weight_maxima = shared_max(torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0), channel)
    # Alpha 0 of equation 4 is not "no smoothing" but equal weight ranges; no smoothing is a candidate of its own.
    none = torch.ones_like(maxima, dtype=torch.float32)
    error_of = W8A8Error(samples, weights, scheme)
    before = error_of(none)
    best = SmoothResult(none, None, before, before)
    for step in range(n_grid + 1):
        scales = smooth_scales(maxima, weight_maxima, step / n_grid)
        error = error_of(scales)
        if error < best.error_after:
            best = SmoothResult(scales, step / n_grid, before, error)
    return best


def token_codes(activations: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of `[tokens, in]` rounded to symmetric integers on its own absmax scale.

    Returns codes int8 `[tokens, in]` in `-(2**(bits-1) - 1) .. 2**(bits-1) - 1` and scales float32 `[tokens, 1]`.
    """
    top = (1 << (bits - 1)) - 1
    values = activations.float()
    scales = (values.abs().amax(-1, keepdim=True) / top).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.round(values / scales).clamp_(-top, top).to(torch.int8), scales


def fake_quantize_tokens(activations: torch.Tensor, bits: int = 8) -> torch.Tensor:
    """Each row of `[tokens, in]` rounded as by `token_codes`, back in float32."""
    codes, scales = token_codes(activations, bits)
    return codes.float() * scales


def shared_max(values: torch.Tensor, channel: torch.Tensor | None) -> torch.Tensor:
    """Each value `[in]` replaced by the largest over the inputs of its producer channel `[in]`; None: each its own."""
    if channel is None:
        return values
    largest = torch.zeros(int(channel.max()) + 1).scatter_reduce(0, channel, values, "amax")
    return largest[channel]


class W8A8Error:
    """The error of W8A8 on samples, as a function of the scales; the exact outputs are computed once.

    samples `[tokens, in]`; weights: all consumers, `[out_i, in]`. A token counts by its error relative to its own
    output: a few tokens may be thousands of times as large as the rest, and would decide alone.
    """

    def __init__(self, samples: torch.Tensor, weights: Sequence[torch.Tensor], scheme: QuantScheme) -> None:
        self._samples, self._scheme = samples, scheme
        self._weights = [weight.float() for weight in weights]
        self._exact = [samples @ weight.T for weight in self._weights]
        sizes = sum(exact.square().sum(1, dtype=torch.float64) for exact in self._exact)
        self._sizes = torch.as_tensor(sizes).clamp(min=torch.finfo(torch.float64).tiny)

    def __call__(self, scales: torch.Tensor) -> float:
        """Mean over tokens of `|x W^T - xq Wq^T|^2 / |x W^T|^2`, both sides rounded after smoothing by `scales`."""
        rounded = fake_quantize_tokens(self._samples / scales)
        errors = torch.zeros_like(self._sizes)
        for weight, exact in zip(self._weights, self._exact, strict=True):
            scaled = weight * scales
            codes = quantize(scaled, *choose_qparams(scaled, self._scheme), self._scheme)
            errors += (exact - rounded @ dequantize(codes).T).square_().sum(1, dtype=torch.float64)
        return (errors / self._sizes).mean().item()
