"""Confidence intervals by the paired bootstrap over windows (Efron and Tibshirani 1993, section 13.3, percentiles).

Windows are the unit that is drawn, because tokens of one window depend on each other. Draws are made once and used for
every statistic, so the interval of a ratio or difference is that of pairs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

RESAMPLES = 1000
SEED = 20240
LEVEL = 0.95
# As the protocol records it.
BOOTSTRAP = {"resamples": RESAMPLES, "seed": SEED}

Draws = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, Any]


def draw(windows: int, resamples: int = RESAMPLES, seed: int = SEED) -> Draws:
    """Indices int64 `[resamples, windows]` of windows drawn with replacement; depends on nothing but the arguments."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, windows, size=(resamples, windows))


def interval(draws: Draws, statistic: Callable[[Draws], float]) -> tuple[float, float]:
    """The central `LEVEL` interval of `statistic` (window indices to a number) over the draws."""
    values = np.array([statistic(indices) for indices in draws])
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def estimate(draws: Draws, statistic: Callable[[Draws], float]) -> dict[str, float]:
    """The statistic on all windows once each, with its interval: {value, low, high}."""
    value = statistic(np.arange(draws.shape[1]))
    if draws.shape[1] < 2:  # one window says nothing about the spread between windows
        return {"value": float(value)}
    low, high = interval(draws, statistic)
    return {"value": float(value), "low": low, "high": high}
