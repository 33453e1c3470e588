"""torch's packed kernels: a few rows times a weight that stays in its codes, without unpacking it.

For decoding, where each step has one token a sequence: unpacking a layer would take a hundred times as long as its
product. The kernels want bfloat16 and round `(8 - zero) * scale` to it, so their results are close to those of the
unpacked weight, not equal.
"""

from collections.abc import Callable

import torch

from quantkit.types import QuantizedTensor

# Rows `[n, in]` in bfloat16 to `[n, out]`.
Kernel = Callable[[torch.Tensor], torch.Tensor]

# What the kernels are written for: group sizes, and rows of the weight at a time.
_GROUPS = {32, 64, 128, 256}
_TILE = 16


def packed_kernel(tensor: QuantizedTensor) -> Kernel | None:
    """The kernel for a weight, holding it in the kernel's own layout; None where there is none.

    There is one for 4 bits in groups of 32, 64, 128 or 256, with and without zero-points, and one for 8 symmetric bits
    with a scale a row. The scales must be numbers of bfloat16, as those of a bfloat16 checkpoint are.
    """
    rows, columns = tensor.shape
    groups = tensor.scales.shape[1]
    if not torch.equal(tensor.scales.bfloat16().float(), tensor.scales.float()):
        return None
    if tensor.scheme.bits == 4 and columns // groups in _GROUPS and rows % _TILE == 0:
        return _int4(tensor, columns // groups)
    if tensor.scheme.bits == 8 and tensor.scheme.symmetric and groups == 1:
        return _int8(tensor)
    return None


def _int4(tensor: QuantizedTensor, group: int) -> Kernel:
    codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(tensor.codes.int(), 1)
    scales = tensor.scales.float()
    # The kernel adds to `(code - 8) * scale`.
    added = torch.zeros_like(scales) if tensor.zeros is None else (8 - tensor.zeros.float()) * scales
    table = torch.stack([scales, added], dim=-1).transpose(0, 1).contiguous().bfloat16()
    return lambda inputs: torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, codes, group, table)


def _int8(tensor: QuantizedTensor) -> Kernel:
    codes = (tensor.codes.to(torch.int16) - tensor.scheme.midpoint).to(torch.int8)
    scales = tensor.scales[:, 0].bfloat16()
    return lambda inputs: torch.ops.aten._weight_int8pack_mm(inputs, codes, scales)
