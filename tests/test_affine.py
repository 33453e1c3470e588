"""Scales, zeros and codes: worked examples, degenerate groups, and the property that every code is the nearest."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import affine
from quantkit.affine import choose_qparams, dequantize, qparams_from_range, quantize, smallest_scale
from quantkit.errors import NumericsError
from quantkit.types import SCALE_DTYPES, QuantizedTensor, QuantScheme

BITS = [2, 3, 4, 8]
SYMMETRY = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "zp"])


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rounded(weight: torch.Tensor, scheme: QuantScheme) -> QuantizedTensor:
    return quantize(weight, *choose_qparams(weight, scheme), scheme)


def assert_sound(weight: torch.Tensor, tensor: QuantizedTensor) -> None:
    """Scales are finite and positive in the dtype of the file, zeros and codes inside their ranges."""
    scheme, (rows, columns) = tensor.scheme, weight.shape
    assert tensor.scales.dtype == scheme.torch_scale_dtype
    assert tensor.scales.shape == (rows, scheme.groups(columns))
    assert torch.isfinite(tensor.scales).all()
    assert (tensor.scales > 0).all()
    assert (tensor.scales.float() > 0).all()
    assert tensor.codes.dtype == torch.uint8
    assert tensor.codes.shape == weight.shape
    assert tensor.codes.max().item() < scheme.levels
    if scheme.symmetric:
        assert tensor.zeros is None
        assert tensor.codes.min() >= 1
    else:
        assert tensor.zeros is not None
        assert tensor.zeros.dtype == torch.uint8
        assert tensor.zeros.max().item() < scheme.levels
    assert torch.isfinite(dequantize(tensor)).all()


def assert_nearest(weight: torch.Tensor, tensor: QuantizedTensor) -> None:
    """No other allowed code is nearer, given the scales and zeros as they are stored (float64, all codes tried)."""
    scheme, (rows, columns) = tensor.scheme, weight.shape
    groups = tensor.scales.shape[1]
    allowed = torch.arange(1 if scheme.symmetric else 0, scheme.levels, dtype=torch.float64)
    zeros = torch.full((rows, groups), float(scheme.midpoint)) if tensor.zeros is None else tensor.zeros
    values = (allowed - zeros.double().unsqueeze(-1)) * tensor.scales.double().unsqueeze(-1)
    grouped = weight.double().reshape(rows, groups, columns // groups)
    best = (grouped.unsqueeze(-1) - values.unsqueeze(-2)).abs().amin(-1)
    chosen = (tensor.codes.double().reshape(grouped.shape) - zeros.double().unsqueeze(-1)) * tensor.scales.double()[
        ..., None
    ]
    # The division happens in float32: a value half way between two codes may go either way by its last bits.
    slack = 1e-6 * (grouped.abs() + tensor.scales.double().unsqueeze(-1))
    assert ((grouped - chosen).abs() <= best + slack).all()


def test_symmetric_three_bits_by_hand() -> None:
    # absmax 0.75 over 3 steps is 0.25; steps 1, -3, 2, 0; codes are 4 more
    tensor = rounded(torch.tensor([[0.25, -0.75, 0.5, 0.0]]), QuantScheme(3, "channel"))
    assert tensor.scales.tolist() == [[0.25]]
    assert tensor.codes.tolist() == [[5, 1, 6, 4]]
    assert dequantize(tensor).tolist() == [[0.25, -0.75, 0.5, 0.0]]


def test_zero_point_two_bits_by_hand() -> None:
    # range -0.5 .. 1.0 over 3 steps is 0.5; zero at code 1
    tensor = rounded(torch.tensor([[-0.5, 0.0, 0.6, 1.0]]), QuantScheme(2, "channel", symmetric=False))
    assert tensor.scales.tolist() == [[0.5]]
    assert tensor.zeros is not None
    assert tensor.zeros.tolist() == [[1]]
    assert tensor.codes.tolist() == [[0, 1, 2, 3]]
    assert dequantize(tensor).tolist() == [[-0.5, 0.0, 0.5, 1.0]]


def test_the_zero_point_is_the_nearest_code() -> None:
    # scale 1; zero at 0.75 is nearer to code 1 than to 0, and zero at 2.25 nearer to 2 than to 3
    _, zeros = choose_qparams(torch.tensor([[-0.75, 2.25], [-2.25, 0.75]]), QuantScheme(2, "channel", symmetric=False))
    assert zeros is not None
    assert zeros.tolist() == [[1], [2]]


def test_values_beyond_a_given_scale_take_the_last_code_of_their_side() -> None:
    scales, weight = torch.tensor([[0.5]], dtype=torch.float16), torch.tensor([[-9.0, 9.0, -1.0]])
    assert quantize(weight, scales, None, QuantScheme(3, "channel")).codes.tolist() == [[1, 7, 2]]
    zeros = torch.tensor([[3]], dtype=torch.uint8)
    assert quantize(weight, scales, zeros, QuantScheme(3, "channel", symmetric=False)).codes.tolist() == [[0, 7, 1]]


def test_zero_points_follow_their_own_group_and_row() -> None:
    weight = torch.tensor([[0.0, 3.0, -3.0, 0.0], [-1.0, 2.0, -2.0, 1.0]])
    tensor = rounded(weight, QuantScheme(2, "group", 2, symmetric=False))
    assert tensor.zeros is not None
    assert tensor.zeros.tolist() == [[0, 3], [1, 2]]
    assert tensor.codes.tolist() == [[0, 3, 0, 3], [0, 3, 0, 3]]
    assert torch.equal(dequantize(tensor), weight)


def test_values_half_way_go_to_the_even_code() -> None:
    tensor = rounded(torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 7.0]]), QuantScheme(4, "channel"))
    assert tensor.codes.tolist() == [[8, 10, 10, 8, 6, 15]]


def test_codes_are_chosen_against_the_rounded_scale() -> None:
    # 0.9 / 3 is 0.300048828125 in float16; 0.75006 is 2.4998 of those and 2.5002 of the exact ones
    weight = torch.tensor([[0.9, 0.75006]])
    tensor = rounded(weight, QuantScheme(3, "channel"))
    assert tensor.scales.item() == 0.300048828125
    assert tensor.codes.tolist() == [[7, 6]]
    assert rounded(weight, QuantScheme(3, "channel", scale_dtype="float32")).codes.tolist() == [[7, 7]]


@SYMMETRY
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("granularity", "group_size"), [("tensor", None), ("channel", None), ("group", 8)])
def test_every_code_is_the_nearest_given_the_stored_scale(
    bits: int, granularity: str, group_size: int | None, scale_dtype: str, symmetric: bool
) -> None:
    scheme = QuantScheme(bits, granularity, group_size, symmetric, scale_dtype)  # type: ignore[arg-type]
    weight = random_weight(5, 24, seed=bits)
    tensor = rounded(weight, scheme)
    assert_sound(weight, tensor)
    assert_nearest(weight, tensor)


@settings(max_examples=120, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from(sorted(SCALE_DTYPES)),
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    size=st.integers(1, 9),
    exponent=st.integers(-12, 4),
    offset=st.floats(-3, 3, width=32),
    seed=st.integers(0, 1 << 30),
)
def test_any_group_of_any_magnitude_is_sound_and_nearest(
    bits: int,
    symmetric: bool,
    scale_dtype: str,
    rows: int,
    groups: int,
    size: int,
    exponent: int,
    offset: float,
    seed: int,
) -> None:
    weight = (random_weight(rows, groups * size, seed) + offset) * 10.0**exponent
    tensor = rounded(weight, QuantScheme(bits, "group", size, symmetric, scale_dtype))
    assert_sound(weight, tensor)
    assert_nearest(weight, tensor)


DEGENERATE = {
    "all zero": [0.0, 0.0, 0.0, 0.0],
    "negative zero": [-0.0, -0.0, -0.0, -0.0],
    "constant": [0.7, 0.7, 0.7, 0.7],
    "negative constant": [-0.7, -0.7, -0.7, -0.7],
    "one value": [0.0, 0.0, 3.0, 0.0],
    "all positive": [0.5, 0.6, 0.7, 0.9],
    "all negative": [-0.5, -0.6, -0.7, -0.9],
    "tiny": [1e-30, -2e-30, 3e-30, 0.0],
    "subnormal": [1e-44, -1e-44, 0.0, 1e-45],
    "float16 subnormal scale": [1e-6, -2e-6, 1.5e-6, 3e-6],
    "below every float16 scale": [1e-9, -1e-9, 0.0, 5e-10],
    "outlier": [1e-4, -1e-4, 1e-4, 60.0],
}


@SYMMETRY
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("values", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_groups_are_sound_and_nearest(
    values: list[float], bits: int, scale_dtype: str, symmetric: bool
) -> None:
    # beside an ordinary group, which must not notice
    weight = torch.tensor([[*values, 0.1, -0.2, 0.3, -0.4]])
    scheme = QuantScheme(bits, "group", 4, symmetric, scale_dtype)
    tensor = rounded(weight, scheme)
    assert_sound(weight, tensor)
    assert_nearest(weight, tensor)
    alone = rounded(weight[:, 4:].contiguous(), scheme)
    assert torch.equal(tensor.codes[:, 4:], alone.codes)
    assert torch.equal(tensor.scales[:, 1:], alone.scales)


@SYMMETRY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["all zero", "negative zero", "below every float16 scale"])
def test_groups_without_range_come_back_as_zeros(kind: str, bits: int, symmetric: bool) -> None:
    tensor = rounded(torch.tensor([DEGENERATE[kind]]), QuantScheme(bits, "channel", symmetric=symmetric))
    assert dequantize(tensor).tolist() == [[0.0] * 4]
    assert tensor.scales.item() == smallest_scale(torch.float16)


@SYMMETRY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.5, -0.5])
def test_constant_groups_come_back_within_the_rounding_of_the_scale(bits: int, value: float, symmetric: bool) -> None:
    weight = torch.full((2, 6), value)
    error = (dequantize(rounded(weight, QuantScheme(bits, "channel", symmetric=symmetric))) - weight).abs().max()
    assert error <= 0.5 * 2**-11


@pytest.mark.parametrize("bits", BITS)
def test_zero_is_exact_in_every_zero_point_group(bits: int) -> None:
    weight = random_weight(4, 32) + 0.8
    weight[:, ::5] = 0.0
    restored = dequantize(rounded(weight, QuantScheme(bits, "group", 8, symmetric=False)))
    assert torch.equal(restored[:, ::5], torch.zeros(4, 7))


@pytest.mark.parametrize("bits", BITS)
def test_zero_points_use_all_codes_and_symmetric_groups_all_but_the_lowest(bits: int) -> None:
    weight = torch.linspace(-1, 1, 1024).reshape(1, -1)
    zero_point = rounded(weight, QuantScheme(bits, "channel", symmetric=False))
    symmetric = rounded(weight, QuantScheme(bits, "channel"))
    assert sorted(set(zero_point.codes.flatten().tolist())) == list(range(1 << bits))
    assert sorted(set(symmetric.codes.flatten().tolist())) == list(range(1, 1 << bits))


def test_one_sided_groups_put_the_zero_point_at_the_end_of_the_codes() -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    _, zeros = choose_qparams(weight, QuantScheme(4, "channel", symmetric=False))
    assert zeros is not None
    assert zeros.tolist() == [[0], [15]]


def test_symmetric_codes_of_a_negated_weight_are_mirrored() -> None:
    weight, scheme = random_weight(4, 32), QuantScheme(4, "group", 8)
    plus, minus = rounded(weight, scheme), rounded(-weight, scheme)
    assert torch.equal(plus.scales, minus.scales)
    assert torch.equal(plus.codes.int() - 8, 8 - minus.codes.int())


def test_a_tensor_scale_is_one_value_for_all_rows() -> None:
    weight = torch.tensor([[0.1, -0.2], [7.0, 0.3]])
    scales, _ = choose_qparams(weight, QuantScheme(4, "tensor"))
    assert scales.tolist() == [[1.0], [1.0]]


def test_a_channel_scale_is_the_range_of_its_row() -> None:
    scales, _ = choose_qparams(torch.tensor([[7.0, -3.5], [0.5, -1.75]]), QuantScheme(4, "channel"))
    assert scales.tolist() == [[1.0], [0.25]]


@pytest.mark.parametrize("columns", [4, 12])
def test_one_group_a_row_equals_one_channel(columns: int) -> None:
    weight = random_weight(3, columns)
    group = rounded(weight, QuantScheme(4, "group", columns, symmetric=False))
    channel = rounded(weight, QuantScheme(4, "channel", symmetric=False))
    assert torch.equal(group.codes, channel.codes)
    assert torch.equal(group.scales, channel.scales)


@SYMMETRY
@pytest.mark.parametrize(("rows", "groups", "size"), [(1, 1, 1), (3, 1, 5), (7, 3, 8), (2, 5, 3), (33, 2, 17)])
def test_ragged_shapes_round_group_by_group(rows: int, groups: int, size: int, symmetric: bool) -> None:
    weight = random_weight(rows, groups * size)
    tensor = rounded(weight, QuantScheme(3, "group", size, symmetric))
    pieces = [
        rounded(weight[r : r + 1, g * size : (g + 1) * size].contiguous(), QuantScheme(3, "channel", None, symmetric))
        for r, g in itertools.product(range(rows), range(groups))
    ]
    whole = torch.cat([dequantize(piece).flatten() for piece in pieces]).reshape(rows, groups * size)
    assert torch.equal(dequantize(tensor), whole)


@SYMMETRY
def test_permuting_rows_permutes_the_result(symmetric: bool) -> None:
    weight, scheme = random_weight(9, 16), QuantScheme(4, "group", 8, symmetric)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(dequantize(rounded(weight, scheme))[order], dequantize(rounded(weight[order], scheme)))


@SYMMETRY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_source_dtypes_round_like_their_float32_values(dtype: torch.dtype, symmetric: bool) -> None:
    weight, scheme = random_weight(6, 32).to(dtype), QuantScheme(4, "group", 16, symmetric, "bfloat16")
    narrow, wide = rounded(weight, scheme), rounded(weight.float(), scheme)
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales, wide.scales)


@SYMMETRY
def test_rounding_what_came_back_changes_no_code(symmetric: bool) -> None:
    weight, scheme = random_weight(5, 32), QuantScheme(4, "group", 8, symmetric)
    first = rounded(weight, scheme)
    again = quantize(dequantize(first), first.scales, first.zeros, scheme)
    assert torch.equal(first.codes, again.codes)


@SYMMETRY
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_the_size_of_the_slices_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, granularity: str, symmetric: bool
) -> None:
    weight = random_weight(13, 24)
    scheme = QuantScheme(4, granularity, 8 if granularity == "group" else None, symmetric)  # type: ignore[arg-type]
    whole = rounded(weight, scheme)
    restored = dequantize(whole)
    for values in (1, 25, 100):
        monkeypatch.setattr(affine, "_SLICE_VALUES", values)
        sliced = rounded(weight, scheme)
        assert torch.equal(sliced.codes, whole.codes)
        assert torch.equal(sliced.scales, whole.scales)
        assert torch.equal(dequantize(sliced), restored)


def test_slices_cover_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affine, "_SLICE_VALUES", 20)
    parts = list(affine.row_slices(7, 8))
    assert [part.stop - part.start for part in parts] == [2, 2, 2, 1]
    assert [row for part in parts for row in range(7)[part]] == list(range(7))


@SYMMETRY
def test_the_number_of_threads_changes_nothing(symmetric: bool) -> None:
    weight, scheme = random_weight(300, 1024), QuantScheme(4, "group", 64, symmetric)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)  # the fixture of all tests puts it back
        tensor = rounded(weight, scheme)
        results.append((tensor.codes, tensor.scales, dequantize(tensor)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_a_weight_that_is_not_finite_is_an_error_wherever_it_stands(value: float, granularity: str) -> None:
    scheme = QuantScheme(4, granularity, 4 if granularity == "group" else None)  # type: ignore[arg-type]
    for place in ((0, 0), (2, 7), (1, 4)):
        weight = random_weight(3, 8)
        weight[place] = value
        with pytest.raises(NumericsError, match="NaN or infinite"):
            choose_qparams(weight, scheme)


@SYMMETRY
def test_a_scale_beyond_its_dtype_is_an_error_that_names_another_dtype(symmetric: bool) -> None:
    weight = torch.tensor([[1e7, -1e7]])
    with pytest.raises(NumericsError, match=r"does not fit float16; set weights.scale_dtype to bfloat16"):
        choose_qparams(weight, QuantScheme(4, "channel", symmetric=symmetric))
    for dtype in ("bfloat16", "float32"):
        assert_sound(weight, rounded(weight, QuantScheme(4, "channel", symmetric=symmetric, scale_dtype=dtype)))


def test_a_range_wider_than_float32_still_has_a_zero_point_scale() -> None:
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([[-largest, largest, 0.0, largest / 2]])
    tensor = rounded(weight, QuantScheme(8, "channel", symmetric=False, scale_dtype="float32"))
    assert torch.isfinite(tensor.scales).all()
    assert_nearest(weight, tensor)


def test_a_group_size_that_does_not_divide_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match="group size 64 does not divide the input width 96"):
        choose_qparams(torch.zeros(2, 96), QuantScheme(4, "group", 64))


@pytest.mark.parametrize("name", SCALE_DTYPES)
def test_the_smallest_scale_is_positive_in_the_file_and_normal_in_float32(name: str) -> None:
    stored = torch.tensor(smallest_scale(SCALE_DTYPES[name])).to(SCALE_DTYPES[name])
    assert stored.float().item() >= torch.finfo(torch.float32).tiny


def test_ranges_given_directly_give_the_scales_of_weights_with_that_range() -> None:
    weight = random_weight(4, 8)
    scheme = QuantScheme(4, "channel", symmetric=False)
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    for ours, theirs in zip(qparams_from_range(low, high, scheme), choose_qparams(weight, scheme), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


@SYMMETRY
def test_inputs_are_left_alone(symmetric: bool) -> None:
    weight, scheme = random_weight(3, 8), QuantScheme(4, "group", 4, symmetric)
    before = weight.clone()
    tensor = rounded(weight, scheme)
    codes, scales = tensor.codes.clone(), tensor.scales.clone()
    dequantize(tensor)
    assert torch.equal(weight, before)
    assert torch.equal(tensor.codes, codes)
    assert torch.equal(tensor.scales, scales)


@SYMMETRY
def test_arithmetic_in_the_scale_dtype_rounds_each_product_once(symmetric: bool) -> None:
    tensor = rounded(random_weight(4, 16), QuantScheme(8, "group", 8, symmetric))
    exact = dequantize(tensor)
    narrow = dequantize(tensor, arithmetic=torch.float16)
    assert torch.equal(narrow, exact.half().float())
    assert not torch.equal(narrow, exact)
    assert torch.equal(dequantize(tensor, torch.bfloat16), exact.bfloat16())
