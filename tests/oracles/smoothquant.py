"""SmoothQuant by its equations (Xiao et al. 2022, equations 1, 3 and 4), value by value."""

import torch


def scales_of(act_absmax: torch.Tensor, weight_absmax: torch.Tensor, alpha: float) -> list[float]:
    return [
        float(a) ** alpha / float(w) ** (1 - alpha) if a > 0 and w > 0 else 1.0
        for a, w in zip(act_absmax.double(), weight_absmax.double(), strict=True)
    ]


def round_int8(row: torch.Tensor, half_scale: bool) -> torch.Tensor:
    """Symmetric int8 on the absmax of the row; the scale of weights is stored in float16."""
    scale = max(abs(float(v)) for v in row) / 127
    if half_scale:
        scale = float(torch.tensor(scale, dtype=torch.float64).half())
    if scale == 0:
        return torch.zeros_like(row)
    return torch.tensor([min(max(round(float(v) / scale), -127), 127) * scale for v in row], dtype=torch.float64)


def output_error(samples: torch.Tensor, weights: list[torch.Tensor], scales: list[float]) -> float:
    """Squared error of a token's outputs over their own square, averaged over tokens."""
    factor = torch.tensor(scales, dtype=torch.float64)
    total = 0.0
    for sample in samples.double():
        token = round_int8(sample / factor, False)
        error = size = 0.0
        for weight in weights:
            for row in weight.double():
                exact = float(sample @ row)
                error += (exact - float(token @ round_int8(row * factor, True))) ** 2
                size += exact**2
        total += error / size
    return total / len(samples)
