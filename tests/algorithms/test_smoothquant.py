"""SmoothQuant's scales by hand and by oracle; safe with dead channels; the search never loses."""

import pytest
import torch

from quantkit.algorithms.smoothquant import W8A8Error, fake_quantize_tokens, search_alpha, smooth_scales
from quantkit.errors import NumericsError
from quantkit.types import QuantScheme
from tests.oracles import smoothquant as oracle


def site(seed: int, outlier: float = 100.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(17, 24, generator=generator)
    samples[:, 5] *= outlier
    return samples, [torch.randn(rows, 24, generator=generator) * 0.05 for rows in (6, 3)]


def test_worked_example_of_the_docstring() -> None:
    assert smooth_scales(torch.tensor([16.0]), torch.tensor([0.25])).tolist() == [8.0]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.85, 1.0])
def test_scales_are_those_of_equation_4(alpha: float) -> None:
    samples, weights = site(0)
    act, wide = samples.abs().amax(0), torch.cat(weights).abs().amax(0)
    act[2] = 0
    wide[4] = 0
    expected = torch.tensor(oracle.scales_of(act, wide, alpha))
    torch.testing.assert_close(smooth_scales(act, wide, alpha), expected)


def test_half_way_both_ranges_are_equal() -> None:
    samples, weights = site(1)
    act, wide = samples.abs().amax(0), weights[0].abs().amax(0)
    scales = smooth_scales(act, wide, 0.5)
    torch.testing.assert_close(act / scales, wide * scales)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dead_and_extreme_channels_stay_finite(alpha: float) -> None:
    act = torch.tensor([0.0, 0.0, 1.0, 1e-38, 3e38, 1e-38, 3e38])
    wide = torch.tensor([0.0, 1.0, 0.0, 1e-38, 3e38, 3e38, 1e-38])
    scales = smooth_scales(act, wide, alpha)
    assert (scales[:3] == 1).all()
    assert torch.isfinite(scales).all()
    assert (scales > 0).all()
    assert torch.isfinite(1 / scales).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_broken_maxima_are_errors(bad: float) -> None:
    with pytest.raises(NumericsError, match="activation"):
        smooth_scales(torch.tensor([bad]), torch.ones(1))
    with pytest.raises(NumericsError, match="weight"):
        smooth_scales(torch.ones(1), torch.tensor([bad]))


def test_alpha_outside_its_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="alpha"):
        smooth_scales(torch.ones(1), torch.ones(1), 1.5)


@pytest.mark.parametrize("seed", range(3))
def test_best_alpha_and_errors_are_those_of_the_textbook(seed: int) -> None:
    samples, weights = site(seed)
    found = search_alpha(samples, weights, n_grid=5)
    act, wide = samples.abs().amax(0), torch.cat(weights).abs().amax(0)
    plain = oracle.output_error(samples, weights, [1.0] * 24)
    errors = [oracle.output_error(samples, weights, oracle.scales_of(act, wide, step / 5)) for step in range(6)]
    assert found.alpha == errors.index(min(errors)) / 5
    assert found.error_before == pytest.approx(plain, rel=1e-2)
    assert found.error_after == pytest.approx(min(errors), rel=1e-2)


def test_never_worse_than_unsmoothed() -> None:
    for seed in range(8):
        samples, weights = site(seed, outlier=1 if seed % 2 else 2000)
        found = search_alpha(samples, weights)
        assert found.error_after <= found.error_before
        assert found.alpha is not None or (found.scales == 1).all()
        if not seed % 2:
            assert found.error_after < found.error_before / 4


def test_one_huge_token_does_not_decide_alone() -> None:
    """Its error is large in itself and small beside its output; smoothing for it would hurt all others."""
    samples, weights = site(5, outlier=1)
    with_huge = samples.clone()
    with_huge[0, 5] = 1e5
    found = search_alpha(with_huge, weights, n_grid=5)
    error_of = W8A8Error(samples[1:], weights, QuantScheme(8, "channel"))
    act, wide = with_huge.abs().amax(0), torch.cat(weights).abs().amax(0)
    errors = [error_of(torch.ones(24)), *(error_of(smooth_scales(act, wide, step / 5)) for step in range(6))]
    assert error_of(found.scales) == min(errors)


def test_a_channel_of_2000_times_the_rest_needs_a_scale_for_each_token_or_smoothing() -> None:
    generator = torch.Generator().manual_seed(0)
    samples, weight = torch.randn(64, 96, generator=generator), torch.randn(48, 96, generator=generator)
    samples[0, 5] *= 2000  # in one token only, as real models have it
    exact, step = samples @ weight.T, samples.abs().max() / 127
    static = (samples / step).round() * step @ weight.T

    def error(found: torch.Tensor) -> float:
        return ((found - exact).square().sum(1) / exact.square().sum(1)).mean().item()

    scales = smooth_scales(samples.abs().amax(0), weight.abs().amax(0), 0.8)
    smoothed = fake_quantize_tokens(samples / scales) @ (weight * scales).T
    assert error(static) > 0.5
    assert error(fake_quantize_tokens(samples) @ weight.T) < 0.001
    assert error(smoothed) < error(static) / 10


def test_unsmoothed_layers_are_kept_where_nothing_helps() -> None:
    samples, weights = site(0, outlier=1)
    found = search_alpha(torch.zeros_like(samples), weights)
    assert found.alpha is None
    assert (found.scales == 1).all()
    assert (found.error_before, found.error_after) == (0.0, 0.0)


def test_maxima_of_the_whole_calibration_set_are_used_where_given() -> None:
    samples, weights = site(2)
    wider = samples.abs().amax(0) * 3
    found = search_alpha(samples, weights, act_absmax=wider, n_grid=2)
    assert found.alpha is not None
    weight_maxima = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(found.scales, smooth_scales(wider, weight_maxima, found.alpha))


def test_permuted_inputs_permute_the_scales() -> None:
    samples, weights = site(3)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    plain = search_alpha(samples, weights)
    permuted = search_alpha(samples[:, order], [weight[:, order] for weight in weights])
    assert plain.alpha == permuted.alpha
    torch.testing.assert_close(plain.scales[order], permuted.scales)


def test_each_token_is_rounded_on_its_own_scale() -> None:
    rounded = fake_quantize_tokens(torch.tensor([[127.0, 1.4, -0.6], [1.27, 0.014, 0.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(rounded, torch.tensor([[127.0, 1.0, -1.0], [1.27, 0.01, 0.0], [0.0, 0.0, 0.0]]))


def test_consumers_of_another_width_are_errors() -> None:
    samples, weights = site(4)
    with pytest.raises(ValueError, match="number of inputs"):
        search_alpha(samples[:, :-1], weights)
