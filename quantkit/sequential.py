"""A block quantised in one forward: all samples wait at each input until the linears that read it are quantised.

What comes later in the block is then calibrated behind its quantised linears, as with `true_sequential` in the code of
GPTQ's authors (Frantar et al. 2022), and what comes out is what the next block is given. The price is the memory of
what each sample has computed so far.

    samples    q k v ....... o ....... gate up ..... down ....... out
       0     -->|           |          |            |              |
       1     -->| all here  |          |            |              |
       2     -->| quantise  | quantise | quantise   | quantise     | done

One sample runs at a time, each in a greenlet: a stack of its own, which can stop in the middle of a model's code.
Threads could too, but each would have workers and memory of its own for tensor operations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import nn

from quantkit.hooks import Place, hooked, on_read, place_of

Run = Callable[[torch.Tensor], torch.Tensor]


class OutOfStepError(Exception):
    """Samples cannot wait for each other here: they call linears in different ways, or disturb one another."""


def reading_order(block: nn.Module, names: Iterable[str], run: Run, sample: torch.Tensor) -> list[tuple[str, ...]]:
    """The linears `names` that read one tensor together, in the order in which a sample reaches those tensors.

    Empty where the sample does not call each of them once.
    """
    names = list(names)
    calls: list[tuple[str, torch.Tensor, Place]] = []  # the tensors too, so that none takes another's place in memory

    def watch(name: str, value: torch.Tensor) -> None:
        calls.append((name, value, place_of(value)))

    with hooked(on_read(block.get_submodule(name), partial(watch, name)) for name in names):
        run(sample)
    if sorted(name for name, _, _ in calls) != sorted(names):
        return []
    readers: dict[Place, list[str]] = {}
    for name, _, place in calls:
        readers.setdefault(place, []).append(name)
    return [tuple(group) for group in readers.values()]


def run_in_step(
    block: nn.Module,
    order: Sequence[tuple[str, ...]],
    run: Run,
    samples: Iterable[torch.Tensor],
    reached: Callable[[tuple[str, ...], Iterator[torch.Tensor]], None],
    witness: torch.Tensor,
) -> list[torch.Tensor]:
    """Run `samples` through the block side by side; returns what comes out of each.

    order: from `reading_order`. reached: called once for each group of linears, with what each sample gives them to
    read; it must take all of that, and may then change their weights: the samples go on with the new ones. witness: a
    short sample that goes along unseen. Raises OutOfStepError where a sample does not keep to the order or fails on the
    way, and where the witness comes out otherwise than alone, as in a block that keeps something between its steps.
    Some linears are changed then.
    """
    group_of = {name: group for group in order for name in group}

    def watch(name: str, value: torch.Tensor) -> None:
        runner = getcurrent()
        if not isinstance(runner, _Runner):  # a thread of the model's own
            raise OutOfStepError(name)
        runner.reads(name, group_of[name], value)

    first, *runners = [_Runner(run, sample) for sample in (witness, *samples)]
    # Before all other hooks: those may hand each linear a tensor of its own.
    with hooked(on_read(block.get_submodule(n), partial(watch, n), first=True) for n in group_of):
        try:
            for group in order:
                first.until(group[0])
                reached(group, (runner.until(group[0]) for runner in runners))
            outputs = [runner.finish(len(group_of)) for runner in runners]
            among = first.finish(len(group_of))
        finally:
            for runner in (first, *runners):
                with suppress(Exception):  # of a model that does more than to end
                    runner.throw()
    if not torch.equal(among, run(witness)):
        raise OutOfStepError
    return outputs


class _Runner(greenlet):
    """One sample on its way: it runs only inside `until` and `finish`, and stands still in between."""

    def __init__(self, run: Run, sample: torch.Tensor) -> None:
        super().__init__(self._walk)
        self._run_block, self._sample = run, sample
        # By leader, what it read and where, until the last of its group has read it too.
        self._read: dict[str, tuple[torch.Tensor, Place]] = {}
        self._called: set[str] = set()
        self._broken = False  # a model may catch what it is told so
        # Whoever lets it run may compute in another precision.
        self._autocast = torch.is_autocast_enabled("cpu")

    def _walk(self) -> torch.Tensor:
        with torch.autocast("cpu", enabled=self._autocast):
            try:
                return self._run_block(self._sample)
            except Exception as error:  # if it is not the stopping that does it, two forwards will say so again
                raise OutOfStepError from error

    def until(self, name: str) -> torch.Tensor:
        """What the linear `name`, which is to be the next, is given."""
        came = _switch(self)
        if self._broken or self.dead or came[0] != name:
            raise OutOfStepError(name)
        value: torch.Tensor = came[1]
        return value

    def finish(self, linears: int) -> torch.Tensor:
        """What comes out of the block, which has called so many linears."""
        output: torch.Tensor = _switch(self)
        if self._broken or not self.dead or len(self._called) != linears:
            raise OutOfStepError
        return output

    def reads(self, name: str, group: tuple[str, ...], value: torch.Tensor) -> None:
        """Called where a linear is about to read; the first of a group waits until all of it are quantised."""
        leader = group[0]
        first = name == leader
        if name in self._called or not (first or self._same(leader, value)) or torch.is_inference_mode_enabled():
            self._broken = True
            raise OutOfStepError(name)
        self._called.add(name)
        if first:
            self._read[leader] = value, place_of(value)
        if self._called.issuperset(group):
            del self._read[leader]
        if first:
            assert self.parent is not None
            _switch(self.parent, (name, value))

    def _same(self, leader: str, value: torch.Tensor) -> bool:
        """Whether `value` is what the leader of a group has read, and holds what it held then."""
        _, place = self._read.get(leader, (None, None))
        return place == place_of(value)


def _switch(to: greenlet, *given: Any) -> Any:
    """Go on in another greenlet until it comes back here, where precision and gradients are as they were."""
    grad, autocast, dtype = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    try:
        return to.switch(*given)
    finally:
        torch.set_grad_enabled(grad)
        torch.set_autocast_enabled("cpu", autocast)
        torch.set_autocast_dtype("cpu", dtype)
