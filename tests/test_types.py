"""Schemes: what they refuse, and their arithmetic."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from quantkit.types import SCALE_DTYPES, QuantizedTensor, QuantScheme


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16])
def test_bits_outside_two_to_eight_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"not {bits}"):
        QuantScheme(bits, "channel")


@pytest.mark.parametrize(("granularity", "group_size"), [("group", None), ("channel", 64), ("tensor", 64)])
def test_group_size_without_groups_or_groups_without_size_is_refused(granularity: str, group_size: int | None) -> None:
    with pytest.raises(ValueError, match="group_size belongs"):
        QuantScheme(4, granularity, group_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_size", [0, -1, -128])
def test_group_sizes_below_one_are_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"positive, not {group_size}"):
        QuantScheme(4, "group", group_size)


def test_an_unknown_scale_dtype_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match="float16, bfloat16, float32, not float8"):
        QuantScheme(4, "channel", scale_dtype="float8")


@pytest.mark.parametrize(("bits", "levels", "midpoint"), [(2, 4, 2), (3, 8, 4), (4, 16, 8), (8, 256, 128)])
def test_levels_and_midpoint_follow_the_bits(bits: int, levels: int, midpoint: int) -> None:
    scheme = QuantScheme(bits, "channel")
    assert (scheme.levels, scheme.midpoint) == (levels, midpoint)


@pytest.mark.parametrize("name", SCALE_DTYPES)
def test_the_scale_dtype_is_the_one_named(name: str) -> None:
    assert str(QuantScheme(4, "channel", scale_dtype=name).torch_scale_dtype) == f"torch.{name}"


def test_groups_are_the_width_over_the_group_size_and_one_without_groups() -> None:
    assert QuantScheme(4, "group", 32).groups(96) == 3
    assert QuantScheme(4, "channel").groups(97) == 1
    assert QuantScheme(4, "tensor").groups(97) == 1


def test_a_group_size_that_does_not_divide_names_both_numbers() -> None:
    with pytest.raises(ValueError, match="group size 64 does not divide the input width 96"):
        QuantScheme(4, "group", 64).groups(96)


def test_with_group_size_changes_nothing_else() -> None:
    scheme = QuantScheme(3, "group", 128, symmetric=False, scale_dtype="bfloat16")
    assert scheme.with_group_size(32) == QuantScheme(3, "group", 32, symmetric=False, scale_dtype="bfloat16")


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (QuantScheme(4, "group", 64, symmetric=False), "int4 g64 zp"),
        (QuantScheme(8, "channel"), "int8 channel sym"),
        (QuantScheme(8, "tensor"), "int8 tensor sym"),
    ],
)
def test_the_short_form_says_bits_granularity_and_symmetry(scheme: QuantScheme, text: str) -> None:
    assert scheme.describe() == text


@pytest.mark.parametrize(
    ("group_size", "symmetric", "bits"),
    [(128, True, 4.125), (64, True, 4.25), (32, True, 4.5), (128, False, 4.15625), (64, False, 4.3125)],
)
def test_nominal_bits_count_code_scale_and_zero_point(group_size: int, symmetric: bool, bits: float) -> None:
    assert QuantScheme(4, "group", group_size, symmetric).nominal_bits(1024) == bits


def test_nominal_bits_of_a_channel_spread_one_scale_over_the_row() -> None:
    assert QuantScheme(8, "channel").nominal_bits(64) == 8.25
    assert QuantScheme(8, "channel", scale_dtype="float32").nominal_bits(64) == 8.5


def test_a_scheme_cannot_be_changed() -> None:
    scheme = QuantScheme(4, "channel")
    with pytest.raises(FrozenInstanceError):
        scheme.bits = 8  # type: ignore[misc]


def test_the_shape_of_a_quantised_tensor_is_that_of_its_codes() -> None:
    codes = torch.zeros(3, 5, dtype=torch.uint8)
    assert QuantizedTensor(codes, torch.ones(3, 1), None, QuantScheme(4, "channel")).shape == (3, 5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_tensor_split_by_rows_and_joined_is_the_same(symmetric: bool) -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(6, 4) % 16
    scales = torch.rand(6, 2, generator=torch.Generator().manual_seed(0))
    zeros = None if symmetric else torch.arange(12, dtype=torch.uint8).reshape(6, 2)
    whole = QuantizedTensor(codes, scales, zeros, QuantScheme(4, "group", 2, symmetric))
    again = QuantizedTensor.join(whole.split([1, 3, 2]))
    assert torch.equal(again.codes, codes)
    assert torch.equal(again.scales, scales)
    assert (again.zeros is None) if zeros is None else torch.equal(again.zeros, zeros)
    assert again.scheme == whole.scheme
