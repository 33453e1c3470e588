"""Rows rounded in turn lose less where the loss feels it, as the slow textbook version says."""

import pytest
import torch

from quantkit.affine import choose_qparams, dequantize
from quantkit.algorithms.feedback import output_errors, round_in_turn
from quantkit.algorithms.gptq import coordinate_descent, gptq_quantize, prepare_hessian
from quantkit.algorithms.search import round_to_codes
from quantkit.types import QuantizedTensor, QuantScheme

SCHEMES = [QuantScheme(4, "group", 16), QuantScheme(3, "group", 16, symmetric=False), QuantScheme(4, "channel")]


def _gram(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    seen = torch.randn(4 * size, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return seen.T @ seen / len(seen)


def _problem(scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    weight = torch.randn(36, 48, generator=torch.Generator().manual_seed(0)) / 10
    return weight, _gram(36, 1), _gram(48, 2), *choose_qparams(weight, scheme)


def _nearest(scheme: QuantScheme, scales: torch.Tensor, zeros: torch.Tensor | None):
    def quantise(values: torch.Tensor, numbers: torch.Tensor) -> QuantizedTensor:
        return round_to_codes(values, scales[numbers], None if zeros is None else zeros[numbers], scheme)

    return quantise


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_codes_are_those_of_the_textbook(scheme: QuantScheme) -> None:
    """Each row in turn, at the best that it can be for the rows before it if all after it may still be anything."""
    weight, outputs, _, scales, zeros = _problem(scheme)
    found = round_in_turn(weight, outputs, _nearest(scheme, scales, zeros), damp=0.01, rows=1)
    exact, felt = weight.double(), outputs.double()
    felt = felt + 0.01 * felt.diagonal().mean() * torch.eye(len(felt), dtype=torch.float64)
    order = felt.diagonal().argsort(descending=True)
    errors = torch.zeros_like(exact)
    for n, row in enumerate(order):
        before, open_ = order[:n], order[n:]
        best = -torch.linalg.solve(felt[open_][:, open_], felt[open_][:, before] @ errors[before])[0]
        chosen = _nearest(scheme, scales, zeros)((exact[row] - best).float().unsqueeze(0), row.unsqueeze(0))
        assert torch.equal(found.codes[row], chosen.codes[0])
        errors[row] = exact[row] - dequantize(chosen)[0].double()


@pytest.mark.parametrize("rows", [1, 5, 36, 100])
@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_outputs_that_are_felt_alike_are_rounded_as_they_are(scheme: QuantScheme, rows: int) -> None:
    weight, _, _, scales, zeros = _problem(scheme)
    quantise = _nearest(scheme, scales, zeros)
    found = round_in_turn(weight, 3 * torch.eye(36), quantise, rows=rows)
    expected = quantise(weight, torch.arange(36))
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_gptq_in_turn_loses_less_where_it_is_felt(scheme: QuantScheme) -> None:
    weight, outputs, hessian, scales, zeros = _problem(scheme)
    prepared = prepare_hessian(hessian, damp=0.01, act_order="static")

    def quantise(values: torch.Tensor, numbers: torch.Tensor) -> QuantizedTensor:
        chosen = None if zeros is None else zeros[numbers]
        found = gptq_quantize(values, prepared, scheme, scales=scales[numbers], zeros=chosen).tensor
        return coordinate_descent(values, prepared, found, sweeps=1)

    alone = weight - dequantize(quantise(weight, torch.arange(36)))
    losses = [output_errors(alone, hessian, outputs)]
    for rows in (36, 12, 1):
        turned = round_in_turn(weight, outputs, quantise, damp=0.01, rows=rows)
        losses.append(output_errors(weight - dequantize(turned), hessian, outputs))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] < 0.8 * losses[1]
    assert losses[3] < 0.9 * losses[2]


def test_an_output_that_is_never_felt_is_rounded_as_it_is() -> None:
    weight, outputs, _, scales, zeros = _problem(SCHEMES[0])
    outputs[7] = outputs[:, 7] = 0
    quantise = _nearest(SCHEMES[0], scales, zeros)
    found = round_in_turn(weight, outputs, quantise, rows=4)
    assert torch.equal(found.codes[7], quantise(weight, torch.arange(36)).codes[7])
