"""Learned rounding lowers the loss that it is given, and never raises it."""

import pytest
import torch

from quantkit.affine import dequantize
from quantkit.algorithms.reconstruct import Learned, learn_rounding
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.types import QuantScheme

SCHEMES = [
    QuantScheme(3, "group", 8),
    QuantScheme(4, "group", 16, symmetric=False),
    QuantScheme(4, "channel"),
    QuantScheme(4, "tensor"),
]
BATCHES = 4


def _problem() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Two linears with a nonlinearity between, and inputs that are strongly correlated."""
    generator = torch.Generator().manual_seed(0)
    weights = {"first": torch.randn(24, 48, generator=generator), "second": torch.randn(16, 24, generator=generator)}
    mix = torch.randn(6, 48, generator=generator)
    inputs = [torch.randn(40, 6, generator=generator) @ mix for _ in range(BATCHES)]
    return weights, inputs


def _block(weights: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    return torch.tanh(inputs @ weights["first"].T / 10) @ weights["second"].T


def _learn(scheme: QuantScheme, seed: int = 1, **options: float) -> tuple[Learned, dict[str, torch.Tensor]]:
    weights, inputs = _problem()
    shaped = {n: QuantScheme(scheme.bits, "group", 8, scheme.symmetric) for n in weights} if scheme.group_size else {}
    tensors = {name: rtn_quantize(weight, shaped.get(name, scheme)) for name, weight in weights.items()}

    def loss(candidates: dict[str, torch.Tensor], batch: int) -> torch.Tensor:
        return (_block(candidates, inputs[batch]) - _block(weights, inputs[batch])).square().mean()

    generator = torch.Generator().manual_seed(seed)
    return learn_rounding(weights, tensors, loss, BATCHES, generator=generator, **options), weights


def _loss(learned: Learned, weights: dict[str, torch.Tensor]) -> float:
    _, inputs = _problem()
    found = {name: dequantize(tensor) for name, tensor in learned.tensors.items()}
    return sum((_block(found, x) - _block(weights, x)).square().mean().item() for x in inputs) / BATCHES


@pytest.mark.parametrize("scheme", SCHEMES, ids=QuantScheme.describe)
def test_the_loss_falls_by_much_and_is_that_of_the_tensors(scheme: QuantScheme) -> None:
    learned, weights = _learn(scheme, steps=60)
    assert learned.loss_after < 0.8 * learned.loss_before
    assert learned.loss_after == pytest.approx(_loss(learned, weights), rel=1e-4)
    assert 0 < learned.changed < 0.5
    for tensor in learned.tensors.values():
        assert tensor.scales.dtype == tensor.scheme.torch_scale_dtype
        assert int(tensor.codes.max()) < tensor.scheme.levels


def test_a_start_that_is_not_beaten_is_kept() -> None:
    learned, weights = _learn(SCHEMES[0], steps=3, rate=1.0, scale_rate=0.1)
    start = {name: rtn_quantize(weight, QuantScheme(3, "group", 8)) for name, weight in weights.items()}
    assert learned.loss_after == learned.loss_before
    assert learned.changed == 0
    assert all(torch.equal(learned.tensors[name].codes, tensor.codes) for name, tensor in start.items())


def test_a_linear_that_few_batches_reach_is_trained_on_those_and_one_that_none_reaches_stays() -> None:
    weights, inputs = _problem()
    weights["never"] = weights["second"].clone()
    tensors = {name: rtn_quantize(weight, QuantScheme(3, "group", 8)) for name, weight in weights.items()}

    def loss(candidates: dict[str, torch.Tensor], batch: int) -> torch.Tensor:
        routed = candidates if batch == 2 else candidates | {"second": weights["second"]}
        return (_block(routed, inputs[batch]) - _block(weights, inputs[batch])).square().mean()

    learned = learn_rounding(weights, tensors, loss, BATCHES, steps=60, generator=torch.Generator().manual_seed(1))
    assert learned.loss_after < learned.loss_before
    moved = {name: int((learned.tensors[name].codes != tensor.codes).sum()) for name, tensor in tensors.items()}
    assert moved["never"] == 0
    assert moved["second"] > 0
    assert torch.equal(learned.tensors["never"].scales, tensors["never"].scales)


def test_one_scale_for_a_tensor_stays_one() -> None:
    learned, _ = _learn(QuantScheme(4, "tensor"), steps=20)
    assert all(len(tensor.scales.unique()) == 1 for tensor in learned.tensors.values())


def test_the_seed_decides() -> None:
    first, again, other = (_learn(SCHEMES[1], seed=seed, steps=10)[0].tensors["first"].codes for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
