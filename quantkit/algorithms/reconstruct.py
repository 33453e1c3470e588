"""Learned rounding: let gradients of a whole block's output choose between neighbouring codes, and tune the scales.

Rounding one linear at a time cannot see that the errors of two linears add up or cancel in the block. Here all codes of
a block move together, by signed gradient descent through the rounding (SignRound: Cheng et al. 2023, "Optimize weight
rounding via signed gradient descent", section 3; the target is a block's output as in BRECQ, Li et al. 2021). Unlike
there, it starts from codes that are good already, and a weight's place between two codes is where the search begins.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quantkit.affine import dequantize
from quantkit.algorithms.search import code_zeros, round_scales
from quantkit.types import QuantizedTensor

# Where a weight may begin between its code and the next, as a fraction of the step: 0.5 would be a tie.
_NEAREST_EDGE = 0.45
_MOMENTUM = 0.9

# The loss of block weights `[out, in]` by name, on the batch of that number. Differentiable.
Loss = Callable[[dict[str, torch.Tensor], int], torch.Tensor]


@dataclass(frozen=True)
class Learned:
    """tensors by name; the mean loss over all batches before and after; changed: the share of codes that moved."""

    tensors: dict[str, QuantizedTensor]
    loss_before: float
    loss_after: float
    changed: float


def learn_rounding(
    weights: dict[str, torch.Tensor],
    tensors: dict[str, QuantizedTensor],
    loss: Loss,
    batches: int,
    *,
    steps: int = 100,
    rate: float = 0.01,
    scale_rate: float = 0.0005,
    generator: torch.Generator,
) -> Learned:
    """Move the codes and scales of `tensors` so that `loss` falls; zeros stay.

    weights: the floats that they were made of, `[out, in]`, by the same names. batches: how many there are, drawn
    by `generator` in shuffled turns, one a step. rate: how far a step moves a weight between codes, in units of its
    scale; scale_rate: how far it moves the logarithm of a scale (Adam). Both fall linearly to zero. Scales are rounded
    to their dtype before they are judged. The start is kept where the mean loss over all batches is no lower then.
    """
    items = {name: _Item(weights[name], tensor) for name, tensor in tensors.items()}
    before = _mean_loss(loss, {name: item.weight().detach() for name, item in items.items()}, batches)
    codes = [item.place for item in items.values()]
    velocity = [torch.zeros_like(place) for place in codes]
    scales = torch.optim.Adam([item.growth for item in items.values()], lr=scale_rate, betas=(0.9, 0.95))
    order: list[int] = []
    with torch.enable_grad():
        for step in range(steps):
            order = order or torch.randperm(batches, generator=generator).tolist()
            loss({name: item.weight() for name, item in items.items()}, order.pop()).backward()
            left = 1 - step / steps
            with torch.no_grad():
                for place, speed in zip(codes, velocity, strict=True):
                    if place.grad is None:  # no token of this batch came here
                        continue
                    speed.mul_(_MOMENTUM).add_(place.grad)
                    place.sub_(speed.sign(), alpha=rate * left)
                    place.grad = None
                scales.param_groups[0]["lr"] = scale_rate * left
                scales.step()
                scales.zero_grad()
    found = {name: item.result() for name, item in items.items()}
    after = _mean_loss(loss, {name: dequantize(tensor) for name, tensor in found.items()}, batches)
    if not after < before:
        return Learned(tensors, before, before, 0.0)
    moved = sum(int((found[name].codes != tensor.codes).sum()) for name, tensor in tensors.items())
    return Learned(found, before, after, moved / sum(tensor.codes.numel() for tensor in tensors.values()))


class _Item:
    """One tensor under way.

    place: `[out, groups, size]`, the codes as real numbers, whose nearest whole numbers are the present codes. growth:
    `[out, groups]`, or `[1, 1]` for one scale: the logarithm of what scales are multiplied by.
    """

    def __init__(self, weight: torch.Tensor, tensor: QuantizedTensor) -> None:
        self._tensor = tensor
        self._scales = tensor.scales.float()
        self._zeros = code_zeros(tensor.scales, tensor.zeros, tensor.scheme).unsqueeze(-1)
        grouped = (*tensor.scales.shape, -1)
        codes = tensor.codes.float().reshape(grouped)
        exact = weight.float().reshape(grouped) / self._scales.unsqueeze(-1) + self._zeros
        self.place = (codes + (exact - codes).clamp(-_NEAREST_EDGE, _NEAREST_EDGE)).requires_grad_()
        one_scale = tensor.scheme.granularity == "tensor"
        self.growth = torch.zeros(1, 1) if one_scale else torch.zeros_like(self._scales)
        self.growth.requires_grad_()

    def weight(self) -> torch.Tensor:
        """The decoded weight `[out, in]`; gradients pass through the rounding as if it were not there."""
        scales = (self._scales * self.growth.exp()).unsqueeze(-1)
        rounded = self.place + (self.place.round() - self.place).detach()
        return ((rounded.clamp(0, self._tensor.scheme.levels - 1) - self._zeros) * scales).flatten(1)

    @torch.no_grad()
    def result(self) -> QuantizedTensor:
        scheme = self._tensor.scheme
        codes = self.place.round().clamp(0, scheme.levels - 1).flatten(1).to(torch.uint8)
        scales = round_scales(self._scales * self.growth.exp(), scheme).to(self._tensor.scales.dtype)
        return replace(self._tensor, codes=codes, scales=scales)


@torch.no_grad()
def _mean_loss(loss: Loss, weights: dict[str, torch.Tensor], batches: int) -> float:
    return sum(loss(weights, batch).item() for batch in range(batches)) / batches
