"""Rows in turn: later rows of a weight make up, at the outputs that the model's loss feels, for what earlier rows lost.

GPTQ minimises `tr(E H E^T)` for E = W - Q `[out, in]`, in which rows are independent: an error counts the same at every
output. With G `[out, out]`, the second moments of the loss's gradient at the outputs, the KL divergence of the model is
to second order `tr(G E H E^T)` (Tseng et al. 2025, "Model-preserving adaptive rounding", section 3), and G couples rows
as H couples columns. Rounding rows one after the other, each row W_i plus what makes up for the rows before it, is
GPTQ's own step along the other axis; inside a row any quantiser will do, so rows of one piece are rounded at once.
"""

from collections.abc import Callable

import torch

from quantkit.affine import dequantize
from quantkit.algorithms.gptq import damp_hessian, upper_factor
from quantkit.types import QuantizedTensor


def round_in_turn(
    weight: torch.Tensor,
    outputs: torch.Tensor,
    quantise: Callable[[torch.Tensor, torch.Tensor], QuantizedTensor],
    *,
    damp: float = 0.1,
    rows: int = 64,
) -> QuantizedTensor:
    """Quantise `weight` `[out, in]` in pieces of `rows`, in the descending order of the diagonal of `outputs`.

    outputs: G `[out, out]`, positive semidefinite, in any unit. quantise: of values `[n, in]`, to be rounded in place
    of the rows of W with the numbers `[n]`. damp: fraction of the mean diagonal of G that is added to its diagonal.
    Outputs that the loss never feels are rounded as they are. Raises NotPositiveDefinite where G, damped, is not.
    """
    damped, _, _ = damp_hessian(outputs, damp)
    order = torch.argsort(damped.diagonal(), descending=True, stable=True)
    factor = upper_factor(damped[order][:, order])
    exact = weight.float()[order]
    errors = torch.zeros_like(exact)
    pieces = []
    for start in range(0, len(exact), rows):
        piece = slice(start, min(start + rows, len(exact)))
        # |R^T E|^2 is the error; the part of it that these rows can still change vanishes at E = -missed.
        carried = factor[:start, piece].T @ errors[:start]
        missed = torch.linalg.solve_triangular(factor[piece, piece].T, carried, upper=False)
        pieces.append(quantise(exact[piece] + missed, order[piece]))
        errors[piece] = exact[piece] - dequantize(pieces[-1])
    return QuantizedTensor.join(pieces).rows(torch.argsort(order))


def output_errors(delta: torch.Tensor, hessian: torch.Tensor, outputs: torch.Tensor) -> float:
    """`tr(G D H D^T)` for D `[out, in]`, H `[in, in]` and G `[out, out]`."""
    return ((outputs @ delta @ hessian) * delta).sum(dtype=torch.float64).item()
