"""Searched scales: never worse than min-max, close to an exhaustive search, safe on degenerate groups."""

import pytest
import torch

from quantkit.affine import choose_qparams, dequantize, quantize, smallest_scale
from quantkit.algorithms.search import round_to_codes, search_qparams
from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme

GRANULARITIES = [("tensor", None), ("channel", None), ("group", 8)]


def layer(seed: int, rows: int = 12, columns: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    importance = torch.randn(columns, generator=generator).mul(1.5).exp()
    return weight, importance


def group_errors(weight: torch.Tensor, importance: torch.Tensor, tensor: QuantizedTensor) -> torch.Tensor:
    """Float64 objective `[out, groups]`, or one number where the tensor has one scale."""
    errors = (weight.double() - dequantize(tensor, torch.float64, torch.float64)).square() * importance.double()
    table = errors.reshape(len(weight), tensor.scales.shape[1], -1).sum(-1)
    return table.sum() if tensor.scheme.granularity == "tensor" else table


def searched(weight: torch.Tensor, importance: torch.Tensor, scheme: QuantScheme) -> QuantizedTensor:
    return round_to_codes(weight, *search_qparams(weight, importance, scheme), scheme)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_no_group_is_worse_than_min_max(bits: int, granularity: tuple[str, int | None], symmetric: bool) -> None:
    scheme = QuantScheme(bits, *granularity, symmetric)  # type: ignore[arg-type]
    for seed in range(5):
        weight, importance = layer(seed)
        before = group_errors(weight, importance, quantize(weight, *choose_qparams(weight, scheme), scheme))
        found = searched(weight, importance, scheme)
        assert granularity[0] != "tensor" or (found.scales == found.scales[0]).all()
        after = group_errors(weight, importance, found)
        assert (after <= before * (1 + 1e-5)).all()
        assert after.sum() < before.sum()


@pytest.mark.parametrize("symmetric", [True, False])
def test_close_to_an_exhaustive_search(symmetric: bool) -> None:
    scheme = QuantScheme(3, "group", 64, symmetric, "float32")
    weight, importance = layer(1, columns=192)
    start, _ = choose_qparams(weight, scheme)
    best = torch.full(start.shape, float("inf"), dtype=torch.float64)
    for zero in [None] if symmetric else range(8):
        zeros = None if zero is None else torch.full(start.shape, zero, dtype=torch.uint8)
        for step in range(400):
            candidate = QuantizedTensor(*_rounded(weight, start * (1.2 - step / 400), zeros, scheme), scheme)
            best = torch.minimum(best, group_errors(weight, importance, candidate))
    after = group_errors(weight, importance, searched(weight, importance, scheme))
    assert after.sum() <= best.sum() * 1.02


def _rounded(
    weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: QuantScheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    tensor = round_to_codes(weight, scales, zeros, scheme)
    return tensor.codes, tensor.scales, tensor.zeros


def test_the_re_fit_gains_where_the_grid_is_too_coarse_to() -> None:
    weight, importance = layer(1)
    scheme = QuantScheme(8, "channel")
    start = choose_qparams(weight, scheme)
    found = search_qparams(weight, importance, scheme, n_grid=1, n_fine=0)
    before = group_errors(weight, importance, round_to_codes(weight, *start, scheme)).sum()
    assert group_errors(weight, importance, round_to_codes(weight, *found, scheme)).sum() < 0.98 * before


def test_important_inputs_lose_less() -> None:
    scheme = QuantScheme(3, "channel")
    weight, _ = layer(2)
    importance = torch.ones(48)
    importance[:4] = 1e4
    even = (weight - dequantize(searched(weight, torch.ones(48), scheme)))[:, :4].square().sum()
    weighted = (weight - dequantize(searched(weight, importance, scheme)))[:, :4].square().sum()
    assert weighted < even / 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_scales_come_in_the_dtype_of_the_file(dtype: str) -> None:
    weight, importance = layer(3)
    scheme = QuantScheme(4, "group", 8, False, dtype)
    scales, zeros = search_qparams(weight, importance, scheme)
    assert scales.dtype == scheme.torch_scale_dtype
    assert scales.shape == (12, 6)
    assert zeros is not None
    assert zeros.dtype == torch.uint8
    assert zeros.max() <= 15


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_degenerate_groups_have_usable_scales(granularity: tuple[str, int | None], symmetric: bool) -> None:
    weight, importance = layer(4)
    weight[:, :8] = 0
    weight[:, 8:16] = 0.3
    weight[:, 16:24] = 1e-12
    weight[:, 24:32] = -weight[:, 24:32].abs() - 1
    weight[:, 32:40] = weight[:, 32:40].abs() * 1e4
    scheme = QuantScheme(4, *granularity, symmetric)  # type: ignore[arg-type]
    tensor = searched(weight, importance, scheme)
    assert torch.isfinite(tensor.scales).all()
    # Only a symmetric scheme has a use for a negative scale: it turns the lonely lowest code around.
    magnitude = tensor.scales.float().abs() if symmetric else tensor.scales.float()
    assert (magnitude >= smallest_scale(torch.float16)).all()
    assert torch.isfinite(dequantize(tensor)).all()
    assert granularity[0] != "tensor" or (tensor.scales == tensor.scales[0]).all()
    if granularity[0] == "group":
        assert (dequantize(tensor)[:, :8] == 0).all()


def test_a_group_without_importance_keeps_its_min_max_scale() -> None:
    weight, importance = layer(5)
    importance[8:16] = 0
    scheme = QuantScheme(4, "group", 8)
    scales, _ = search_qparams(weight, importance, scheme)
    assert torch.equal(scales[:, 1], choose_qparams(weight, scheme)[0][:, 1])


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_the_unit_of_importance_does_not_matter(unit: float) -> None:
    weight, importance = layer(6)
    scheme = QuantScheme(4, "group", 8, False)
    plain = searched(weight, importance, scheme)
    other = searched(weight, importance.double() * unit, scheme)
    assert torch.equal(plain.scales, other.scales)
    assert torch.equal(plain.codes, other.codes)


def test_permuted_inputs_give_the_same_channel_scales() -> None:
    weight, importance = layer(7)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    scheme = QuantScheme(4, "channel")
    plain, _ = search_qparams(weight, importance, scheme)
    permuted, _ = search_qparams(weight[:, order], importance[order], scheme)
    torch.testing.assert_close(plain, permuted, rtol=1e-3, atol=0)


def test_rows_worked_on_in_slices_agree_with_rows_alone() -> None:
    weight, importance = layer(8, rows=700, columns=768)
    scheme = QuantScheme(4, "group", 256)
    scales, _ = search_qparams(weight, importance, scheme, n_grid=2, n_fine=0)
    for row in (0, 340, 341, 342, 699):
        alone, _ = search_qparams(weight[row : row + 1], importance, scheme, n_grid=2, n_fine=0)
        assert torch.equal(scales[row : row + 1], alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_importance_that_no_gram_matrix_has_is_an_error(bad: float) -> None:
    weight, importance = layer(9)
    importance[3] = bad
    with pytest.raises(NumericsError, match="importance"):
        search_qparams(weight, importance, QuantScheme(4, "channel"))


def test_wrong_shapes_are_errors() -> None:
    weight, importance = layer(10)
    with pytest.raises(ValueError, match="importance"):
        search_qparams(weight, importance[:-1], QuantScheme(4, "channel"))
    with pytest.raises(ValueError, match="does not divide"):
        search_qparams(weight, importance, QuantScheme(4, "group", 7))
    with pytest.raises(ValueError, match="n_grid"):
        search_qparams(weight, importance, QuantScheme(4, "channel"), n_grid=0)


def test_min_max_scales_round_to_the_codes_of_plain_rounding() -> None:
    weight, _ = layer(11)
    for scheme in (QuantScheme(4, "group", 8), QuantScheme(2, "channel", None, False), QuantScheme(8, "tensor")):
        qparams = choose_qparams(weight, scheme)
        assert torch.equal(round_to_codes(weight, *qparams, scheme).codes, quantize(weight, *qparams, scheme).codes)
