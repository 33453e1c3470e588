"""Packed kernels against products with the unpacked weight."""

import pytest
import torch

from quantkit.affine import choose_qparams, dequantize, quantize
from quantkit.evaluate.kernels import packed_kernel
from quantkit.types import QuantizedTensor, QuantScheme


def rounded(rows: int, columns: int, scheme: QuantScheme) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    weight[:, ::7] += 1  # zero-points away from the middle
    return quantize(weight, *choose_qparams(weight, scheme), scheme)


def inputs(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)).bfloat16()


SERVED = [
    (QuantScheme(4, "group", group, symmetric, "bfloat16"), 2 * group)
    for group in (32, 64, 128, 256)
    for symmetric in (True, False)
] + [(QuantScheme(4, "channel", None, False, "bfloat16"), 64), (QuantScheme(8, "channel", None, True, "bfloat16"), 96)]


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize(("scheme", "columns"), SERVED)
def test_a_kernel_multiplies_with_the_weight_of_the_codes(scheme: QuantScheme, columns: int, count: int) -> None:
    tensor = rounded(48, columns, scheme)
    kernel = packed_kernel(tensor)
    assert kernel is not None
    found = kernel(inputs(count, columns))
    expected = inputs(count, columns).double() @ dequantize(tensor).double().T
    assert found.shape == (count, 48)
    assert found.dtype == torch.bfloat16
    # Two roundings to bfloat16: of the shift of each group, and of the result.
    assert ((found.double() - expected).norm() / expected.norm()).item() < 6e-3


@pytest.mark.parametrize(
    ("scheme", "rows", "columns"),
    [
        (QuantScheme(4, "group", 16, True, "bfloat16"), 48, 64),
        (QuantScheme(4, "group", 64, True, "bfloat16"), 40, 64),
        (QuantScheme(3, "group", 64, True, "bfloat16"), 48, 64),
        (QuantScheme(8, "group", 32, True, "bfloat16"), 48, 64),
        (QuantScheme(8, "channel", None, False, "bfloat16"), 48, 64),
        (QuantScheme(4, "group", 64, True, "float16"), 48, 64),
    ],
)
def test_what_no_kernel_is_written_for_has_none(scheme: QuantScheme, rows: int, columns: int) -> None:
    assert packed_kernel(rounded(rows, columns, scheme)) is None


def test_the_lowest_code_of_searched_scales_and_negative_scales_are_kept() -> None:
    scheme = QuantScheme(4, "group", 32, True, "bfloat16")
    codes = torch.arange(16, dtype=torch.uint8).repeat(16, 2)
    tensor = QuantizedTensor(codes, torch.full((16, 1), -0.5, dtype=torch.bfloat16), None, scheme)
    kernel = packed_kernel(tensor)
    assert kernel is not None
    assert torch.equal(kernel(torch.eye(32).bfloat16()), dequantize(tensor).T.bfloat16())
