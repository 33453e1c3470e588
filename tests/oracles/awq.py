"""AWQ on samples of activations, as in the paper (Lin et al. 2023, equations 4 and 5), absmax or min-max rounding."""

import torch


def round_row(row: torch.Tensor, size: int, bits: int, symmetric: bool) -> torch.Tensor:
    """Round to nearest with float16 scales for each group of `size` values."""
    rounded = torch.zeros(len(row), dtype=torch.float64)
    for start in range(0, len(row), size):
        group = [float(v) for v in row[start : start + size]]
        if symmetric:
            top = 2 ** (bits - 1) - 1
            scale, zero, low, high = max(abs(v) for v in group) / top, 0, -top, top
        else:
            high = 2**bits - 1
            smallest, largest = min(0.0, *group), max(0.0, *group)
            scale, low = (largest - smallest) / high, 0
        scale = float(torch.tensor(max(scale, 2.0**-24), dtype=torch.float64).half())
        if not symmetric:
            zero = min(max(round(-smallest / scale), 0), high)
        for j, value in enumerate(group):
            rounded[start + j] = (min(max(round(value / scale) + zero, low), high) - zero) * scale
    return rounded


def scales_of(act_mean: torch.Tensor, ratio: float) -> list[float]:
    powers = [float(a) ** ratio if a > 0 else None for a in act_mean.double()]
    alive = [p for p in powers if p is not None]
    centre = (max(alive) * min(alive)) ** 0.5
    return [1.0 if p is None else p / centre for p in powers]


def output_error(
    weights: list[torch.Tensor], samples: torch.Tensor, scales: list[float], size: int, bits: int, symmetric: bool
) -> float:
    """sum over consumers of |X W^T - (X / s) Q(W s)^T|^2."""
    factor = torch.tensor(scales, dtype=torch.float64)
    x, total = samples.double(), 0.0
    for weight in weights:
        for row in weight.double():
            rounded = round_row(row * factor, size, bits, symmetric)
            total += float(((x @ row) - (x / factor) @ rounded).square().sum())
    return total


def best_ratio(
    weights: list[torch.Tensor], samples: torch.Tensor, size: int, bits: int, symmetric: bool, n_grid: int
) -> tuple[float, float, float]:
    """The ratio, and the errors unscaled and at that ratio."""
    act_mean = samples.double().abs().mean(0)
    before = output_error(weights, samples, [1.0] * samples.shape[1], size, bits, symmetric)
    best = (0.0, before)
    for step in range(1, n_grid + 1):
        error = output_error(weights, samples, scales_of(act_mean, step / n_grid), size, bits, symmetric)
        if error < best[1]:
            best = (step / n_grid, error)
    return best[0], before, best[1]


def best_bounds(
    weight: torch.Tensor, samples: torch.Tensor, size: int, bits: int, symmetric: bool, n_grid: int, max_shrink: float
) -> list[list[float]]:
    """The clipping magnitude of each group with the least error of the group's own part of the output."""
    bounds = []
    for row in weight.double():
        found = []
        for start in range(0, len(row), size):
            group, x = row[start : start + size], samples.double()[:, start : start + size]
            best = (float("inf"), 0.0)
            for step in range(n_grid + 1):
                bound = float(group.abs().max()) * (1 - max_shrink * step / n_grid)
                rounded = round_row(group.clamp(-bound, bound), size, bits, symmetric)
                error = float((x @ (group - rounded)).square().sum())
                if error < best[0]:
                    best = (error, bound)
            found.append(best[1])
        bounds.append(found)
    return bounds
