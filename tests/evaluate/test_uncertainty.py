"""The paired bootstrap: the same draws each time, intervals that cover, and pairs that cancel what they share."""

import numpy as np
import pytest

from quantkit.evaluate.uncertainty import RESAMPLES, draw, estimate, interval


def mean_of(values: np.ndarray):  # type: ignore[no-untyped-def]
    return lambda windows: float(values[windows].mean())


def test_draws_are_the_same_each_time_and_use_no_global_state() -> None:
    np.random.seed(1)
    first = draw(7)
    np.random.seed(2)
    before = np.random.get_state()[1].tolist()
    second = draw(7)
    assert np.array_equal(first, second)
    assert np.random.get_state()[1].tolist() == before


def test_draws_are_with_replacement_over_all_windows() -> None:
    draws = draw(7)
    assert draws.shape == (RESAMPLES, 7)
    assert set(np.unique(draws)) == set(range(7))
    assert any(len(set(row)) < 7 for row in draws.tolist())


def test_draws_are_pinned() -> None:
    """The intervals of published reports depend on these numbers: PCG64 gives them on every machine."""
    assert draw(5, resamples=2).tolist() == np.random.Generator(np.random.PCG64(20240)).integers(0, 5, (2, 5)).tolist()
    assert not np.array_equal(draw(5, resamples=2, seed=1), draw(5, resamples=2))


def test_the_value_is_the_statistic_on_every_window_once() -> None:
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = estimate(draw(4), mean_of(values))
    assert found["value"] == 4.0
    assert found["low"] < 4.0 < found["high"]
    assert values.min() <= found["low"]
    assert found["high"] <= values.max()


def test_one_window_has_a_value_and_no_interval() -> None:
    assert estimate(draw(1), mean_of(np.array([3.0]))) == {"value": 3.0}


def test_the_interval_of_equal_windows_has_no_width() -> None:
    assert interval(draw(6), mean_of(np.full(6, 2.5))) == (2.5, 2.5)


def test_the_interval_is_that_of_textbook_percentiles() -> None:
    values, draws = np.arange(10.0) ** 2, draw(10)
    means = np.sort([values[row].mean() for row in draws])
    low, high = interval(draws, mean_of(values))
    assert low == pytest.approx(np.quantile(means, 0.025))
    assert high == pytest.approx(np.quantile(means, 0.975))
    assert np.mean((means >= low) & (means <= high)) == pytest.approx(0.95, abs=0.01)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator, draws, covered, runs = np.random.default_rng(0), draw(40), 0, 200
    for _ in range(runs):
        low, high = interval(draws, mean_of(generator.normal(5.0, 2.0, 40)))
        covered += low <= 5.0 <= high
    # 95 % nominal; percentiles of 40 windows are a little short, and 200 runs are uncertain by 1.5 points.
    assert 0.89 <= covered / runs <= 0.985


def test_a_paired_difference_is_certain_where_the_values_are_not() -> None:
    noise = np.random.default_rng(3).normal(0, 1, 30)
    worse, draws = noise + 0.25, draw(30)
    alone = estimate(draws, mean_of(worse))
    paired = estimate(draws, lambda windows: float(worse[windows].mean() - noise[windows].mean()))
    assert alone["high"] - alone["low"] > 0.3
    assert paired["low"] == pytest.approx(0.25)
    assert paired["high"] == pytest.approx(0.25)
