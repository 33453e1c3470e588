"""What the model's own loss feels at the outputs of its linears; one block in memory at a time.

Where outputs y of a linear move by e, the KL divergence of the model grows to second order by half the mean over tokens
of `(g . e)^2`: g is the gradient of -log p(t) at y, and t is drawn from the model's own prediction, not read off a text
(the Fisher information; Tseng et al. 2025, "Model-preserving adaptive rounding", section 3.1 and sketch A).

    forward     hidden states before and after every block go into one table
    head        the last of them becomes the gradient of the loss there
    backward    block by block, last first: the gradient after a block becomes the one before it, in the same table
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from quantkit.errors import CheckpointError, NumericsError, first_line
from quantkit.hooks import hooked
from quantkit.live import LiveModel, batches
from quantkit.stats import linears_of

# Outputs of a linear that are looked at together. Wider ones are cut: their second moments would outgrow the weights.
_TOGETHER = 2048
# Tokens count at most so many times as much as the median one, and at least that fraction: few gradients are huge.
_SPREAD = 10.0

# A context in which a block runs, in the precision of calibration.
Reduced = Callable[[nn.Module | None], AbstractContextManager[None]]


@dataclass(frozen=True)
class Felt:
    """What the loss feels at the outputs of one linear.

    grams: float32 `[n, n]` for runs of n outputs, in turn: the mean over tokens of g g^T. tokens: float32
    `[samples * length]`, the squared size of each token's g.
    """

    grams: tuple[torch.Tensor, ...]
    tokens: torch.Tensor

    def scaled(self, scales: torch.Tensor) -> "Felt":
        """The same of outputs divided by `scales` `[out]`."""
        parts = scales.split([len(gram) for gram in self.grams])
        return Felt(
            tuple(gram * part * part.unsqueeze(1) for gram, part in zip(self.grams, parts, strict=True)), self.tokens
        )

    def weights(self) -> torch.Tensor:
        """How much each token counts, float32 `[samples * length]` with mean one."""
        median = self.tokens.median()
        if not median > 0:
            return torch.ones_like(self.tokens)
        spread = (self.tokens / median).clamp(1 / _SPREAD, _SPREAD)
        return spread / spread.mean()


def feel(
    live: LiveModel,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    reduced: Reduced,
    generator: torch.Generator,
    *,
    first: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Felt]]:
    """For each block from number `first` on, by name in it, the linears that read every token of a sample once.

    ids `[samples, length]`; hidden `[samples, length, hidden]`, as `live.start` gives it for them; it is not changed.
    generator: draws the tokens. tell: is told what is being done, block by block. Raises CheckpointError naming the
    block that no gradient passes, NumericsError where logits or their gradient are not finite.
    """
    # Room for everything is taken before any work: it may be more than the disk has.
    space = _Space(live, first)
    table = live.table(len(live.blocks) + 1, *hidden.shape)
    table[0] = hidden
    for index in range(len(live.blocks)):
        tell(f"forwards through {live.prefix}.{index}")
        table[index + 1] = table[index]
        with reduced(live.load(index)):
            live.advance(index, table[index + 1])
        live.free(index)
    with reduced(None), live.head() as logits:
        for tokens, place in zip(ids.split(1), table[-1].split(1), strict=True):
            place.copy_(_loss_gradient(logits, tokens, place, generator))
    felt: list[dict[str, Felt]] = [{} for _ in live.blocks]
    for index in reversed(range(first, len(live.blocks))):
        tell(f"backwards through {live.prefix}.{index}")
        block = live.load(index)
        with reduced(block):
            felt[index] = _backward(live, index, block, table[index], table[index + 1], space)
        live.free(index)
    return felt


def _loss_gradient(
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    generator: torch.Generator,
) -> torch.Tensor:
    """The gradient at `hidden` of the sum of -log p(t), t drawn from p at each place; that of the logits is p - t."""
    exact = hidden.clone().requires_grad_()
    with torch.enable_grad():
        found = logits(tokens, exact)
    if not torch.isfinite(found).all():
        raise NumericsError("the logits of the source hold NaN or infinite values", "check its final norm and its head")
    slope = found.detach().float().softmax(-1).flatten(0, -2)
    drawn = torch.multinomial(slope, 1, generator=generator)
    slope.scatter_add_(1, drawn, torch.full_like(drawn, -1, dtype=slope.dtype))
    (gradient,) = torch.autograd.grad(found, exact, slope.reshape(found.shape).to(found.dtype))
    if not torch.isfinite(gradient).all():
        raise NumericsError("the gradient of the source's loss overflows", "check the size of its final norm and head")
    return gradient


class _Space:
    """One table for the second moments of all linears, which may lie on disk, given out piece by piece."""

    def __init__(self, live: LiveModel, first: int) -> None:
        blocks = list(live.blocks)[first:]
        widths = [module.out_features for block in blocks for module in linears_of(block).values()]
        self._table, self._used = live.table(sum(size**2 for width in widths for size in _runs(width))), 0

    def grams(self, width: int) -> tuple[torch.Tensor, ...]:
        grams = []
        for size in _runs(width):
            end = self._used + size**2
            grams.append(self._table[self._used : end].reshape(size, size).zero_())
            self._used = end
        return tuple(grams)


def _runs(width: int) -> list[int]:
    """Lengths of the runs of a linear's outputs that are looked at together."""
    return [min(_TOGETHER, width - start) for start in range(0, width, _TOGETHER)]


def _backward(
    live: LiveModel, index: int, block: nn.Module, given: torch.Tensor, gradient: torch.Tensor, space: _Space
) -> dict[str, Felt]:
    """What is felt in block `index`. given `[samples, length, hidden]`: its inputs, which become their gradients."""
    linears = linears_of(block)
    grams = {name: space.grams(module.out_features) for name, module in linears.items()}
    sizes: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    for place, after in zip(batches(given), batches(gradient), strict=True):
        seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
        exact = place.clone().requires_grad_()
        watched = hooked(module.register_forward_hook(partial(_watch, seen[name])) for name, module in linears.items())
        try:
            with watched, torch.enable_grad():
                found = live.run(index, exact, {})
            (before,) = torch.autograd.grad(found, exact, after.to(found.dtype))
        except RuntimeError as error:
            raise CheckpointError(
                f"{live.prefix}.{index}: no gradient passes this block: {first_line(error)}",
                "give the recipe's gptq objective: layer",
            ) from error
        place.copy_(before)
        for name, slopes in seen.items():
            if name not in sizes or len(slopes) != 1 or len(slopes[0]) != place.shape[0] * place.shape[1]:
                sizes.pop(name, None)  # routed, or called more than once
                continue
            with torch.autocast("cpu", enabled=False):
                for gram, part in zip(grams[name], slopes[0].split(_TOGETHER, dim=1), strict=True):
                    gram.addmm_(part.T, part)
            sizes[name].append(slopes[0].square().sum(1))
    tokens = given.shape[0] * given.shape[1]
    return {
        name: Felt(tuple(gram.div_(tokens) for gram in grams[name]), torch.cat(parts)) for name, parts in sizes.items()
    }


def _watch(slopes: list[torch.Tensor], _: nn.Module, __: object, output: object) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:  # a router may put out more than a tensor
        output.register_hook(lambda slope: slopes.append(slope.detach().float().flatten(0, -2)))
