"""Round to nearest: the data-free quantiser, and the floor that every other method has to beat."""

import torch

from quantkit.affine import choose_qparams, quantize
from quantkit.types import QuantizedTensor, QuantScheme


def rtn_quantize(weight: torch.Tensor, scheme: QuantScheme) -> QuantizedTensor:
    """Quantise each value of `weight` (`[out, in]`, any float dtype) to its nearest code, scales from the range.

    Worked example, 3 bits, symmetric, one row [0.3, -0.9, 0.5]: scale = 0.9 / 3 = 0.3, steps [1, -3, 1.67 -> 2],
    codes (+4) [5, 1, 6], dequantised [0.3, -0.9, 0.6].

    Raises NumericsError (non-finite weight, scale overflow) and ValueError (group size does not divide the width).
    """
    scales, zeros = choose_qparams(weight, scheme)
    return quantize(weight, scales, zeros, scheme)
