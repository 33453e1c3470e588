"""GPTQ and coordinate descent against float64 loops, their guarantees, and the inputs that break others."""

from typing import Any

import pytest
import torch

from quantkit.affine import choose_qparams, dequantize
from quantkit.algorithms.gptq import (
    ActOrder,
    GPTQResult,
    NotPositiveDefinite,
    coordinate_descent,
    damp_hessian,
    gptq_quantize,
    prepare_hessian,
    row_errors,
    upper_factor,
)
from quantkit.algorithms.search import round_to_codes, search_qparams
from quantkit.errors import NumericsError
from quantkit.types import QuantizedTensor, QuantScheme
from tests.oracles import gptq as oracle

SCHEMES = [
    QuantScheme(3, "group", 8),
    QuantScheme(4, "group", 8, False),
    QuantScheme(2, "group", 6, False),
    QuantScheme(4, "channel"),
    QuantScheme(8, "tensor"),
]


def layer(
    seed: int, rows: int = 6, columns: int = 24, tokens: int = 200, outlier: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the Gram matrix of correlated inputs; channel 5 is `outlier` times as large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 0.05
    inputs = torch.randn(tokens, columns, generator=generator)
    inputs = inputs + torch.randn(tokens, 4, generator=generator) @ torch.randn(4, columns, generator=generator)
    inputs = inputs * torch.randn(columns, generator=generator).mul(0.7).exp()
    inputs[:, 5] *= outlier
    return weight, inputs.T @ inputs / tokens


def zeros_of(tensor: QuantizedTensor) -> list[list[int]]:
    if tensor.zeros is None:
        return [[tensor.scheme.midpoint] * tensor.scales.shape[1] for _ in tensor.scales]
    return tensor.zeros.tolist()  # type: ignore[no-any-return]


def nearest(weight: torch.Tensor, scheme: QuantScheme) -> QuantizedTensor:
    return round_to_codes(weight, *choose_qparams(weight, scheme), scheme)


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: QuantScheme,
    *,
    damp: float = 0.01,
    act_order: ActOrder = "none",
    **options: Any,
) -> GPTQResult:
    return gptq_quantize(weight, prepare_hessian(hessian, damp=damp, act_order=act_order), scheme, **options)


def descend(
    weight: torch.Tensor, hessian: torch.Tensor, tensor: QuantizedTensor, *, damp: float = 0.01, sweeps: int = 8
) -> QuantizedTensor:
    return coordinate_descent(weight, prepare_hessian(hessian, damp=damp), tensor, sweeps=sweeps)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
@pytest.mark.parametrize("act_order", ["none", "static"])
@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_codes_are_those_of_the_textbook(scheme: QuantScheme, act_order: ActOrder, block_size: int) -> None:
    weight, hessian = layer(0)
    result = gptq(weight, hessian, scheme, damp=0.05, act_order=act_order, block_size=block_size)
    exact = oracle.damped(hessian, 0.05)
    order = list(range(24)) if act_order == "none" else sorted(range(24), key=lambda j: -float(exact[j, j]))
    start = nearest(weight, scheme)
    codes = oracle.gptq(weight, exact, start.scales.double(), zeros_of(start), scheme.levels, order)
    size = 24 // start.scales.shape[1]
    after = oracle.values(codes, start.scales.double(), zeros_of(start), size)
    before, kept = dequantize(start).double(), 0
    for row in range(len(weight)):
        one = slice(row, row + 1)
        if oracle.error(weight[one], after[one], exact) >= oracle.error(weight[one], before[one], exact):
            codes[row], after[row], kept = start.codes[row].tolist(), before[row], kept + 1
    assert kept <= 3
    assert result.nearest_rows == kept
    assert result.tensor.codes.tolist() == codes
    assert result.error_before == pytest.approx(oracle.error(weight, dequantize(start), hessian), rel=1e-4)
    assert result.error_after == pytest.approx(oracle.error(weight, after, hessian), rel=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", ["none", "static"])
def test_no_row_is_worse_than_rounding_to_nearest_on_the_same_scales(
    bits: int, symmetric: bool, act_order: ActOrder
) -> None:
    scheme = QuantScheme(bits, "group", 16, symmetric)
    for seed in range(6):
        weight, hessian = layer(seed, rows=32, columns=80, outlier=1 + 2000.0 * (seed % 2))
        for qparams in (choose_qparams(weight, scheme), search_qparams(weight, hessian.diagonal(), scheme)):
            result = gptq(
                weight,
                hessian,
                scheme,
                act_order=act_order,
                scales=qparams[0],
                zeros=qparams[1],  # type: ignore[arg-type]
            )
            assert result.tensor.scales is qparams[0]
            before = row_errors(weight - dequantize(round_to_codes(weight, *qparams, scheme)), hessian)
            after = row_errors(weight - dequantize(result.tensor), hessian)
            assert (after <= before * (1 + 1e-5)).all()
            assert result.error_after < result.error_before


def test_worked_example_of_the_docstring() -> None:
    hessian = torch.tensor([[1.0, 0.8], [0.8, 1.0]])
    scheme = QuantScheme(2, "channel")
    result = gptq(torch.tensor([[0.4, 0.4]]), hessian, scheme, damp=0, scales=torch.ones(1, 1).half())
    assert result.tensor.codes.tolist() == [[2, 3]]
    assert result.error_before == pytest.approx(0.576)
    assert result.error_after == pytest.approx(0.136)


def test_block_size_changes_speed_only() -> None:
    weight, hessian = layer(1, columns=48)
    results = [gptq(weight, hessian, SCHEMES[0], block_size=size).tensor.codes for size in (1, 5, 20, 48, 99)]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_permuted_inputs_permute_the_codes() -> None:
    weight, hessian = layer(2)
    scheme = QuantScheme(4, "channel")
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    plain = gptq(weight, hessian, scheme, act_order="static").tensor
    permuted = gptq(weight[:, order], hessian[order][:, order], scheme, act_order="static").tensor
    assert torch.equal(plain.codes[:, order], permuted.codes)


def test_permuted_rows_permute_the_codes() -> None:
    weight, hessian = layer(3)
    plain = gptq(weight, hessian, SCHEMES[1]).tensor
    flipped = gptq(weight.flip(0), hessian, SCHEMES[1]).tensor
    assert torch.equal(plain.codes.flip(0), flipped.codes)


def test_the_unit_of_the_hessian_does_not_matter() -> None:
    weight, hessian = layer(4)
    plain = gptq(weight, hessian, SCHEMES[0]).tensor.codes
    for unit in (2.0**-40, 2.0**40):
        assert torch.equal(plain, gptq(weight, hessian * unit, SCHEMES[0]).tensor.codes)


def test_uncorrelated_inputs_leave_nothing_to_make_up() -> None:
    weight, hessian = layer(5)
    result = gptq(weight, torch.diag(hessian.diagonal()), SCHEMES[0])
    assert torch.equal(result.tensor.codes, nearest(weight, SCHEMES[0]).codes)
    assert result.nearest_rows == 6


@pytest.mark.parametrize("act_order", ["none", "static"])
@pytest.mark.parametrize("damp", [0.0, 0.01])
def test_dead_channels_keep_their_nearest_codes(act_order: ActOrder, damp: float) -> None:
    weight, hessian = layer(6)
    dead = torch.tensor([0, 7, 8, 23])
    hessian[dead] = 0
    hessian[:, dead] = 0
    result = gptq(weight, hessian, SCHEMES[1], damp=damp, act_order=act_order)
    assert result.dead_channels == 4
    assert torch.equal(result.tensor.codes[:, dead], nearest(weight, SCHEMES[1]).codes[:, dead])
    descended = descend(weight, hessian, result.tensor, damp=damp)
    again = round_to_codes(weight, descended.scales, descended.zeros, SCHEMES[1])
    assert (descended.codes[:, dead].int() - again.codes[:, dead].int()).abs().max() <= 1


def test_rounding_noise_beside_a_dead_channel_does_not_leak() -> None:
    weight, hessian = layer(6)
    hessian[7], hessian[:, 7] = 0, 0
    clean = gptq(weight, hessian, SCHEMES[1])
    hessian[7, 8:], hessian[8:, 7] = 0.5, 0.5
    assert torch.equal(gptq(weight, hessian, SCHEMES[1]).tensor.codes, clean.tensor.codes)


def test_a_layer_that_saw_nothing_is_rounded_to_nearest() -> None:
    weight, _ = layer(7)
    result = gptq(weight, torch.zeros(24, 24), SCHEMES[0])
    assert torch.equal(result.tensor.codes, nearest(weight, SCHEMES[0]).codes)
    assert (result.dead_channels, result.damping, result.error_after) == (24, 0.0, 0.0)


@pytest.mark.parametrize("tokens", [1, 10, 23])
def test_too_few_tokens_without_damping_are_an_error_of_their_own(tokens: int) -> None:
    weight, hessian = layer(8, tokens=tokens)
    with pytest.raises(NotPositiveDefinite, match="raise damp"):
        gptq(weight, hessian, SCHEMES[0], damp=0)
    assert gptq(weight, hessian, SCHEMES[0], damp=0.01).damping > 0


def test_repeated_channels_without_damping_are_not_positive_definite() -> None:
    weight, hessian = layer(9)
    hessian[3], hessian[:, 3] = hessian[4].clone(), hessian[:, 4].clone()
    hessian[3, 3] = hessian[4, 4]
    with pytest.raises(NotPositiveDefinite):
        gptq(weight, hessian, SCHEMES[0], damp=0)


def test_a_pivot_of_rounding_noise_is_not_information() -> None:
    weight, hessian = layer(9)
    hessian = hessian.double()
    hessian[3], hessian[:, 3] = hessian[4].clone(), hessian[:, 4].clone()
    hessian[3, 3] = hessian[4, 4]
    hessian[4, 4] *= 1 + 1e-7
    with pytest.raises(NotPositiveDefinite):
        gptq(weight, hessian, SCHEMES[0], damp=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_broken_hessian_is_not_a_matter_of_damping(bad: float) -> None:
    weight, hessian = layer(10)
    hessian[2, 2] = bad
    for call in (
        lambda: gptq(weight, hessian, SCHEMES[0]),
        lambda: descend(weight, hessian, nearest(weight, SCHEMES[0])),
    ):
        with pytest.raises(NumericsError, match="Hessian") as caught:
            call()
        assert not isinstance(caught.value, NotPositiveDefinite)


def test_non_finite_weights_are_an_error_with_given_scales_too() -> None:
    weight, hessian = layer(11)
    start = nearest(weight, SCHEMES[0])
    weight[1, 1] = float("nan")
    with pytest.raises(NumericsError, match="weight"):
        gptq(weight, hessian, SCHEMES[0], scales=start.scales)
    with pytest.raises(NumericsError, match="weight"):
        descend(weight, hessian, start)


def test_wrong_arguments_are_errors() -> None:
    weight, hessian = layer(12)
    with pytest.raises(ValueError, match="24 inputs"):
        gptq(weight, hessian[:5, :5], SCHEMES[0])
    with pytest.raises(ValueError, match="act_order"):
        gptq(weight, hessian, SCHEMES[0], act_order="dynamic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not divide"):
        gptq(weight, hessian, QuantScheme(4, "group", 7))


def test_a_channel_2000_times_the_median_is_factorised_and_helps() -> None:
    weight, hessian = layer(13, rows=16, columns=96, tokens=400, outlier=2000)
    damped, _, _ = damp_hessian(hessian, 0.01)
    factor = upper_factor(damped).double()
    # Entry by entry against the size of its row and column: the largest channel must not hide the others.
    size = damped.diagonal().double().sqrt()
    torch.testing.assert_close(factor @ factor.T / size / size[:, None], damped.double() / size / size[:, None])
    scheme = QuantScheme(4, "group", 16)
    scales, _ = search_qparams(weight, hessian.diagonal(), scheme)
    plain = gptq(weight, hessian, scheme, act_order="static")
    searched = gptq(weight, hessian, scheme, act_order="static", scales=scales)
    assert plain.error_after < plain.error_before
    assert searched.error_after < plain.error_after / 10


def test_inputs_are_left_alone() -> None:
    weight, hessian = layer(14)
    kept = weight.clone(), hessian.clone()
    tensor = gptq(weight, hessian, SCHEMES[0]).tensor
    codes, scales = tensor.codes.clone(), tensor.scales.clone()
    descend(weight, hessian, tensor)
    assert torch.equal(weight, kept[0])
    assert torch.equal(hessian, kept[1])
    assert torch.equal(tensor.codes, codes)
    assert torch.equal(tensor.scales, scales)


@pytest.mark.parametrize("scheme", SCHEMES[:4], ids=QuantScheme.describe)
@pytest.mark.parametrize("sweeps", [1, 3])
def test_descent_takes_the_steps_of_the_textbook(scheme: QuantScheme, sweeps: int) -> None:
    weight, hessian = layer(15, rows=3)
    start = nearest(weight, scheme)
    found = descend(weight, hessian, start, sweeps=sweeps, damp=0.05)
    codes, scales = oracle.descend(
        weight,
        oracle.damped(hessian, 0.05),
        start.codes.tolist(),
        start.scales,
        zeros_of(start),
        scheme.levels,
        sweeps,
    )
    assert found.codes.tolist() == codes
    assert torch.equal(found.scales.double(), scales)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("granularity", [("tensor", None), ("channel", None), ("group", 16)])
def test_no_sweep_of_the_descent_raises_the_error(bits: int, granularity: tuple[str, int | None]) -> None:
    for symmetric in (True, False):
        scheme = QuantScheme(bits, *granularity, symmetric)  # type: ignore[arg-type]
        for seed in range(3):
            weight, hessian = layer(seed, rows=20, columns=80, outlier=1 + 2000.0 * (seed % 2))
            damped = oracle.damped(hessian, 0.1)
            tensor = gptq(weight, hessian, scheme, damp=0.1).tensor
            first = error = oracle.error(weight, dequantize(tensor), damped)
            for _ in range(4):
                tensor = descend(weight, hessian, tensor, sweeps=1, damp=0.1)
                now = oracle.error(weight, dequantize(tensor), damped)
                assert now <= error * (1 + 1e-5)
                error = now
            assert error < first
            assert torch.isfinite(tensor.scales).all()
            assert (tensor.scales > 0).all()
            assert int(tensor.codes.max()) < scheme.levels
            assert tensor.scales.shape == (20, scheme.groups(80))
            assert granularity[0] != "tensor" or (tensor.scales == tensor.scales[0]).all()


def test_many_sweeps_are_the_same_as_one_at_a_time() -> None:
    weight, hessian = layer(16)
    start = nearest(weight, SCHEMES[0])
    together = descend(weight, hessian, start, sweeps=3)
    apart = start
    for _ in range(3):
        apart = descend(weight, hessian, apart, sweeps=1)
    assert torch.equal(together.codes, apart.codes)
    assert torch.equal(together.scales, apart.scales)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_degenerate_groups_stay_finite(symmetric: bool, dtype: str) -> None:
    weight, hessian = layer(17, columns=48)
    weight[:, :8] = 0
    weight[:, 8:16] = 0.3
    weight[:, 16:24] = 1e-12
    weight[:, 24:32] = -weight[:, 24:32].abs()
    scheme = QuantScheme(4, "group", 8, symmetric, dtype)
    for unit in (1.0, 1e-30):
        tensor = gptq(weight, hessian * unit, scheme).tensor
        for found in (tensor, descend(weight, hessian * unit, tensor)):
            assert torch.isfinite(dequantize(found)).all()
            assert torch.isfinite(found.scales).all()
            assert (found.scales > 0).all()
            assert int(found.codes.max()) < 16
            assert (weight - dequantize(found)).abs().max() < 0.1


def test_an_empty_group_of_tiny_scale_and_small_inputs_keeps_its_codes() -> None:
    weight = torch.zeros(2, 24)
    weight[:, 8:] = torch.linspace(-1, 1, 16)
    start = nearest(weight, QuantScheme(4, "group", 8, True, "float32"))
    found = descend(weight, torch.eye(24) * 1e-20, start)
    assert (found.codes[:, :8] == 8).all()
    assert torch.equal(found.scales[:, 0], start.scales[:, 0])
