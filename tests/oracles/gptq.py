"""GPTQ as optimal brain surgery: explicit inverse, eliminated column by column, one row at a time (Frantar et al. 2022,
equations 2 and 3), and coordinate descent by its definition."""

import torch

Codes = list[list[int]]


def nearest_code(value: float, scale: float, zero: int, levels: int) -> int:
    return min(max(round(value / scale) + zero, 0), levels - 1)  # Python rounds ties to even, too


def damped(hessian: torch.Tensor, damp: float) -> torch.Tensor:
    """H plus damp times the mean of its non-zero diagonal; rows and columns of dead channels cleared."""
    result = hessian.double().clone()
    alive = [j for j in range(len(result)) if result[j, j] != 0]
    amount = damp * sum(float(result[j, j]) for j in alive) / max(1, len(alive))
    for j in range(len(result)):
        if j not in alive:
            result[j, :] = 0
            result[:, j] = 0
        result[j, j] += amount
        if result[j, j] == 0:
            result[j, j] = 1
    return result


def error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    """tr((W - Q) H (W - Q)^T), term by term over rows."""
    total = 0.0
    for exact, value in zip(weight.double(), rounded.double(), strict=True):
        delta = exact - value
        total += float(delta @ hessian.double() @ delta)
    return total


def values(codes: Codes, scales: torch.Tensor, zeros: list[list[int]], size: int) -> torch.Tensor:
    rows = [
        [(code - zeros[r][j // size]) * float(scales[r, j // size]) for j, code in enumerate(row)]
        for r, row in enumerate(codes)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scales: torch.Tensor,
    zeros: list[list[int]],
    levels: int,
    order: list[int],
) -> Codes:
    """Codes of each row; `hessian` is damped already, `order` is the order in which columns are fixed."""
    size = weight.shape[1] // scales.shape[1]
    codes = [[0] * weight.shape[1] for _ in range(len(weight))]
    for r, row in enumerate(weight.double()):
        remaining = row.clone()
        inverse = torch.linalg.inv(hessian.double())
        for j in order:
            scale, zero = float(scales[r, j // size]), zeros[r][j // size]
            code = nearest_code(float(remaining[j]), scale, zero, levels)
            codes[r][j] = code
            lost = (remaining[j] - (code - zero) * scale) / inverse[j, j]
            remaining = remaining - lost * inverse[j]
            inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
            inverse[j, j] = 1  # column j is out of the game; its row and column are zero from here on
    return codes


def descend(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    codes: Codes,
    scales: torch.Tensor,
    zeros: list[list[int]],
    levels: int,
    sweeps: int,
) -> tuple[Codes, torch.Tensor]:
    """Best code at a time by trying all of them, then the best scale at a time, float16 scales, each row alone."""
    size = weight.shape[1] // scales.shape[1]
    codes, scales = [list(row) for row in codes], scales.double().clone()
    exact_h = hessian.double()

    def row_error(r: int) -> float:
        delta = weight[r].double() - values([codes[r]], scales[r : r + 1], [zeros[r]], size)[0]
        return float(delta @ exact_h @ delta)

    for r in range(len(weight)):
        for _ in range(sweeps):
            for j in range(weight.shape[1]):
                trials = []
                for code in range(levels):
                    codes[r][j] = code
                    trials.append(row_error(r))
                codes[r][j] = trials.index(min(trials))
            for g in range(scales.shape[1]):
                part = slice(g * size, (g + 1) * size)
                direction = torch.zeros(weight.shape[1], dtype=torch.float64)
                direction[part] = torch.tensor(codes[r][part], dtype=torch.float64) - zeros[r][g]
                curvature = float(direction @ exact_h @ direction)
                if curvature == 0:
                    continue
                before, old = row_error(r), float(scales[r, g])
                delta = weight[r].double() - values([codes[r]], scales[r : r + 1], [zeros[r]], size)[0]
                scales[r, g] = old + float(direction @ exact_h @ delta) / curvature
                scales[r, g] = float(scales[r, g].half())
                if row_error(r) >= before or scales[r, g] <= 0:
                    scales[r, g] = old
    return codes, scales
