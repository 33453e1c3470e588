"""One forward that stops at every input: the order, what samples read behind changed linears, and what breaks step."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import nn

from quantkit.errors import NumericsError
from quantkit.sequential import OutOfStepError, reading_order, run_in_step

NAMES = ["k", "q", "o", "down"]


class _Block(nn.Module):
    """As attention and an MLP: q and k read one tensor, o what both make, down what o makes."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.q, self.o, self.down = (nn.Linear(6, 6, bias=False) for _ in range(4))
        self.route = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        value = hidden * 2
        mixed = torch.tanh(self.q(value)) * self.k(value)
        if self.route and hidden.sum() < 0:  # as a router that sends no token to an expert
            return mixed
        return hidden + self.down(torch.relu(self.o(mixed)))


@pytest.fixture
def block() -> _Block:
    torch.manual_seed(0)
    return _Block().requires_grad_(False)


@pytest.fixture
def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, 6, generator=generator) for _ in range(3)]


def _take(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:  # noqa: ARG001
    list(inputs)


def _hooks(block: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) for module in block.modules())


def test_linears_of_one_tensor_are_reached_together_in_the_order_of_calls(
    block: _Block, samples: list[torch.Tensor]
) -> None:
    assert reading_order(block, NAMES, block, samples[0]) == [("q", "k"), ("o",), ("down",)]
    assert reading_order(block, ["down", "k"], block, samples[0]) == [("k",), ("down",)]
    assert _hooks(block) == 0


def test_a_linear_that_is_called_twice_or_never_has_no_order(block: _Block, samples: list[torch.Tensor]) -> None:
    assert reading_order(block, NAMES, lambda value: block(block(value)), samples[0]) == []
    assert reading_order(block, NAMES, block.q, samples[0]) == []


def test_nothing_changed_gives_what_single_runs_give(block: _Block, samples: list[torch.Tensor]) -> None:
    order = reading_order(block, NAMES, block, samples[0])
    outputs = run_in_step(block, order, block, samples, _take, samples[0])
    assert all(torch.equal(found, block(sample)) for found, sample in zip(outputs, samples, strict=True))
    assert _hooks(block) == 0


def test_all_samples_go_on_behind_changed_linears(block: _Block, samples: list[torch.Tensor]) -> None:
    order = reading_order(block, NAMES, block, samples[0])
    seen: dict[tuple[str, ...], list[torch.Tensor]] = {}

    def reached(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:
        seen[parts] = [value.clone() for value in inputs]
        for part in parts:
            block.get_submodule(part).weight.mul_(0.5)

    outputs = run_in_step(block, order, block, samples, reached, samples[0])
    assert list(seen) == order
    # The weights are all changed now: a run of the changed block reads the same everywhere.
    for n, sample in enumerate(samples):
        value = sample * 2
        mixed = torch.tanh(block.q(value)) * block.k(value)
        for parts, expected in zip(order, (value, mixed, torch.relu(block.o(mixed))), strict=True):
            assert torch.equal(seen[parts][n], expected)
        assert torch.equal(outputs[n], block(sample))


def test_a_sample_that_goes_another_way_is_out_of_step(block: _Block, samples: list[torch.Tensor]) -> None:
    block.route = True
    samples = [samples[0].abs(), -samples[1].abs()]
    order = reading_order(block, NAMES, block, samples[0])
    with pytest.raises(OutOfStepError):
        run_in_step(block, order, block, samples, _take, samples[0])
    with pytest.raises(OutOfStepError):  # one that comes back to where all have been
        run_in_step(block, order, lambda value: block(block(value)), samples[:1], _take, samples[0])
    with pytest.raises(OutOfStepError):  # one that reads in another order
        run_in_step(block, order[::-1], block, samples[:1], _take, samples[0])
    assert _hooks(block) == 0


def test_an_error_at_a_stop_ends_all_samples(block: _Block, samples: list[torch.Tensor]) -> None:
    order = reading_order(block, NAMES, block, samples[0])
    ended: list[int] = []

    def run(value: torch.Tensor) -> torch.Tensor:
        try:
            return block(value)
        finally:
            ended.append(len(ended))

    def reached(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:
        list(inputs)
        if parts == ("o",):
            raise NumericsError("no", "none")

    with pytest.raises(NumericsError):
        run_in_step(block, order, run, samples, reached, samples[0])
    assert len(ended) == len(samples) + 1  # and the witness
    assert _hooks(block) == 0


def test_an_error_inside_the_block_is_left_to_two_forwards(block: _Block, samples: list[torch.Tensor]) -> None:
    order = reading_order(block, NAMES, block, samples[0])
    with pytest.raises(OutOfStepError) as raised:
        run_in_step(block, order, block, [samples[0], samples[1][..., :4]], _take, samples[0])
    assert "shapes cannot be multiplied" in str(raised.value.__cause__)


class _Odd(_Block):
    """A block that does what stopped samples do not bear."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.way == "keeps":
            self.kept = hidden
        if self.way == "threads":
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(super().forward, hidden).result()
        value = hidden * 2
        query = self.q(value)
        if self.way == "writes between readers" and len(hidden) > 1:
            value.mul_(3)
        other = hidden if self.way == "reads another tensor" and len(hidden) > 1 else value
        mixed = torch.tanh(query) * self.k(other)
        if self.way == "reads a weight first":
            mixed = mixed + self.o.weight.sum()
        made = self.o(mixed)
        if self.way == "catches" and len(hidden) > 1:
            with suppress(Exception):
                made = self.o(made)
        return (self.kept if self.way == "keeps" else hidden) + self.down(torch.relu(made))


@pytest.mark.parametrize(
    "way",
    ["keeps", "threads", "writes between readers", "reads another tensor", "reads a weight first", "catches"],
)
def test_a_block_that_does_not_bear_stops_is_out_of_step(way: str, samples: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    block = _Odd(way).requires_grad_(False)
    witness = samples[0][:1, :3]

    def reached(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:
        list(inputs)
        for part in parts:
            block.get_submodule(part).weight.mul_(0.5)

    order = reading_order(block, NAMES, block, witness)
    assert order == [("q", "k"), ("o",), ("down",)]
    with pytest.raises(OutOfStepError):
        run_in_step(block, order, block, samples, reached, witness)
    assert _hooks(block) == 0


def test_each_sample_keeps_its_precision_and_gradients_and_the_caller_its_own(
    block: _Block, samples: list[torch.Tensor]
) -> None:
    order = reading_order(block, NAMES, block, samples[0])
    states: list[tuple[bool, bool]] = []

    def run(value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            made = block.q(value * 2)
        made = torch.tanh(made) * block.k(value * 2)
        states.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return block.down(torch.relu(block.o(made)))

    def reached(parts: tuple[str, ...], inputs: Iterator[torch.Tensor]) -> None:  # noqa: ARG001
        with torch.autocast("cpu", enabled=False):
            for _ in inputs:
                assert torch.is_grad_enabled()
                assert not torch.is_autocast_enabled("cpu")

    order = [("q",), ("k",), *order[1:]]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = run_in_step(block, order, run, samples, reached, samples[0])
        assert torch.is_autocast_enabled("cpu")
    assert states == [(True, True)] * (len(samples) + 2)  # and the witness, here and alone
    assert all(output.dtype == torch.bfloat16 for output in outputs)
