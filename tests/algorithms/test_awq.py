"""AWQ's searches against sample-based float64 loops; never worse than leaving the weights alone."""

import pytest
import torch

from quantkit.affine import choose_qparams, dequantize, quantize
from quantkit.algorithms.awq import _INNER_GRID, awq_scales, clip, search_clip, search_scales
from quantkit.algorithms.search import round_to_codes, search_qparams
from quantkit.errors import NumericsError
from quantkit.types import QuantScheme
from tests.oracles import awq as oracle


def site(
    seed: int, columns: int = 24, tokens: int = 60, outlier: float = 30.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Two consumers of one input, and samples of it in which channel 3 is `outlier` times as large."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(rows, columns, generator=generator) * 0.05 for rows in (5, 3)]
    samples = torch.randn(tokens, columns, generator=generator)
    samples = samples + torch.randn(tokens, 3, generator=generator) @ torch.randn(3, columns, generator=generator)
    samples = samples * torch.randn(columns, generator=generator).mul(0.5).exp()
    samples[:, 3] *= outlier
    return weights, samples


@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, True), (4, False), (8, True)])
@pytest.mark.parametrize("size", [8, 24])
def test_ratio_and_errors_are_those_of_the_textbook(bits: int, symmetric: bool, size: int) -> None:
    weights, samples = site(bits)
    scheme = QuantScheme(bits, "group", size, symmetric)
    found = search_scales(weights, samples.abs().mean(0), samples.T @ samples, scheme, n_grid=6)
    ratio, before, after = oracle.best_ratio(weights, samples, size, bits, symmetric, n_grid=6)
    assert found.ratio == ratio
    assert found.error_before == pytest.approx(before, rel=1e-3)
    assert found.error_after == pytest.approx(after, rel=1e-3)
    if ratio:
        expected = torch.tensor(oracle.scales_of(samples.abs().mean(0), ratio))
        torch.testing.assert_close(found.scales, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("quantizer", ["minmax", "search"])
@pytest.mark.parametrize("granularity", [("tensor", None), ("channel", None), ("group", 8)])
def test_never_worse_than_unscaled(granularity: tuple[str, int | None], quantizer: str) -> None:
    for seed in range(5):
        for bits in (2, 3, 4, 8):
            weights, samples = site(seed, outlier=1 if seed % 2 else 2000)
            scheme = QuantScheme(bits, *granularity, symmetric=bool(seed % 2))  # type: ignore[arg-type]
            found = search_scales(weights, samples.abs().mean(0), samples.T @ samples, scheme, quantizer=quantizer)  # type: ignore[arg-type]
            assert found.error_after <= found.error_before
            assert torch.isfinite(found.scales).all()
            assert (found.scales > 0).all()
            assert found.ratio > 0 or (found.scales == 1).all()


def test_reported_error_is_what_scaled_rounding_gives() -> None:
    weights, samples = site(6)
    scheme = QuantScheme(4, "group", 8)
    found = search_scales(weights, samples.abs().mean(0), samples.T @ samples, scheme)
    total = 0.0
    for weight in weights:
        scaled = weight * found.scales
        rounded = dequantize(quantize(scaled, *choose_qparams(scaled, scheme), scheme))
        total += (samples @ weight.T - (samples / found.scales) @ rounded.T).square().sum().item()
    assert found.error_after == pytest.approx(total, rel=1e-3)


def test_ratios_are_tried_on_few_rows_and_the_best_is_judged_on_all() -> None:
    # Seed 5: the first rows alone want another ratio than all rows do, and all rows gain by it too.
    weights, samples = site(5)
    scheme, mean, gram = QuantScheme(4, "group", 8), samples.abs().mean(0), samples.T @ samples
    few = search_scales(weights, mean, gram, scheme, ranking_rows=1)
    first = search_scales([weight[:1] for weight in weights], mean, gram, scheme)
    assert few.ratio == first.ratio
    assert few.ratio != search_scales(weights, mean, gram, scheme).ratio
    factors = torch.tensor(oracle.scales_of(mean, few.ratio)).tolist()
    for error, scales in ((few.error_before, [1.0] * 24), (few.error_after, factors)):
        assert error == pytest.approx(oracle.output_error(weights, samples, scales, 8, 4, True), rel=1e-3)


def test_the_search_inside_weighs_channels_as_they_are_after_scaling() -> None:
    weights, samples = site(6)
    scheme, gram = QuantScheme(3, "group", 8, False), samples.T @ samples
    found = search_scales(weights, samples.abs().mean(0), gram, scheme, quantizer="search")
    assert found.ratio > 0
    total, scaled_samples = 0.0, samples / found.scales
    for weight in weights:
        scaled = weight * found.scales
        importance = scaled_samples.square().sum(0)
        qparams = search_qparams(scaled, importance, scheme, n_grid=_INNER_GRID, n_fine=0)
        rounded = dequantize(round_to_codes(scaled, *qparams, scheme))
        total += (samples @ weight.T - scaled_samples @ rounded.T).square().sum().item()
    assert found.error_after == pytest.approx(total, rel=1e-3)


def test_a_channel_2000_times_the_median_is_made_larger() -> None:
    weights, samples = site(7, outlier=2000)
    found = search_scales(weights, samples.abs().mean(0), samples.T @ samples, QuantScheme(4, "group", 8, False))
    assert found.scales.argmax() == 3
    assert found.error_after < found.error_before / 2


def test_scales_are_centred_on_their_extremes() -> None:
    scales = awq_scales(torch.tensor([1.0, 4.0, 16.0]), 0.5)
    torch.testing.assert_close(scales, torch.tensor([0.5, 1.0, 2.0]))


def test_dead_channels_keep_one_and_move_no_other() -> None:
    act_mean = torch.tensor([1.0, 0.0, 4.0, 0.0, 16.0])
    scales = awq_scales(act_mean, 1.0)
    assert scales[1] == scales[3] == 1
    torch.testing.assert_close(scales[[0, 2, 4]], awq_scales(act_mean[[0, 2, 4]], 1.0))
    assert (awq_scales(torch.zeros(3), 1.0) == 1).all()


def test_extreme_activations_give_scales_that_float16_holds() -> None:
    scales = awq_scales(torch.tensor([1e-38, 1.0, 3e38]), 1.0)
    assert (scales.half() > 0).all()
    assert torch.isfinite(scales.half()).all()


def test_a_silent_input_keeps_the_weights() -> None:
    weights, _ = site(8)
    found = search_scales(weights, torch.zeros(24), torch.zeros(24, 24), QuantScheme(4, "channel"))
    assert (found.ratio, found.error_before, found.error_after) == (0.0, 0.0, 0.0)


def test_permuted_inputs_permute_the_scales() -> None:
    weights, samples = site(9)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    scheme = QuantScheme(4, "channel")
    plain = search_scales(weights, samples.abs().mean(0), samples.T @ samples, scheme)
    moved = samples[:, order]
    permuted = search_scales([w[:, order] for w in weights], moved.abs().mean(0), moved.T @ moved, scheme)
    assert plain.ratio == permuted.ratio
    torch.testing.assert_close(plain.scales[order], permuted.scales)


def test_broken_statistics_and_shapes_are_errors() -> None:
    weights, samples = site(10)
    gram, scheme = samples.T @ samples, QuantScheme(4, "channel")
    with pytest.raises(NumericsError, match="statistics"):
        search_scales(weights, torch.full((24,), float("nan")), gram, scheme)
    with pytest.raises(ValueError, match="agree"):
        search_scales(weights, torch.ones(23), gram, scheme)
    with pytest.raises(ValueError, match="quantizer"):
        search_scales(weights, torch.ones(24), gram, scheme, quantizer="other")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="24 x 24"):
        search_clip(weights[0], gram[:3, :3], scheme)


@pytest.mark.parametrize(("bits", "symmetric", "size"), [(2, True, 8), (3, False, 8), (4, True, 24), (4, False, 6)])
def test_clip_bounds_are_those_of_the_textbook(bits: int, symmetric: bool, size: int) -> None:
    (weight, _), samples = site(11, outlier=3)
    bounds = search_clip(weight, samples.T @ samples, QuantScheme(bits, "group", size, symmetric), n_grid=10)
    expected = oracle.best_bounds(weight, samples, size, bits, symmetric, 10, 0.5)
    torch.testing.assert_close(bounds, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("granularity", [("tensor", None), ("channel", None), ("group", 8)])
def test_clipping_never_loses_on_its_own_objective(granularity: tuple[str, int | None]) -> None:
    for seed in range(4):
        (weight, _), samples = site(seed)
        scheme = QuantScheme(3, *granularity)  # type: ignore[arg-type]
        bounds = search_clip(weight, samples.T @ samples, scheme)
        assert bounds.shape == (5, scheme.groups(24))
        errors = []
        for candidate in (weight, clip(weight, bounds)):
            rounded = dequantize(quantize(candidate, *choose_qparams(candidate, scheme), scheme))
            parts = (weight - rounded).reshape(5, scheme.groups(24), -1)
            inputs = samples.reshape(len(samples), scheme.groups(24), -1)
            errors.append(torch.einsum("tgi,ogi->ogt", inputs, parts).square().sum(-1))
        if granularity[0] == "tensor":
            errors = [error.sum() for error in errors]
        assert (errors[1] <= errors[0] * (1 + 1e-4)).all()


def test_clipping_of_an_empty_group_is_harmless() -> None:
    (weight, _), samples = site(12)
    weight[:, :8] = 0
    bounds = search_clip(weight, samples.T @ samples, QuantScheme(4, "group", 8))
    assert (bounds[:, 0] == 0).all()
    assert torch.equal(clip(weight, bounds)[:, :8], weight[:, :8])
