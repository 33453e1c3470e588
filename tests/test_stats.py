"""Calibration statistics: exact sums, shared inputs, additivity, and scaling."""

import pytest
import torch
from torch import nn

from quantkit import stats
from quantkit.errors import NumericsError
from quantkit.stats import collect, merge, summed
from quantkit.types import CalibrationStats


class _Block(nn.Module):
    """Two linears that read one tensor, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.left(hidden)) * self.right(hidden))


@pytest.fixture
def block() -> _Block:
    torch.manual_seed(3)
    return _Block().requires_grad_(False)


def _samples(count: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(count, 1, 7, 6, generator=torch.Generator().manual_seed(seed)))


def _collect(block: _Block, samples: list[torch.Tensor]) -> dict[str, CalibrationStats]:
    return {name: s.stats for s in collect(block, ["left", "right", "out"], block, samples) for name in s.names}


def test_linears_that_read_one_tensor_share_one_set_of_sums(block: _Block) -> None:
    shared = collect(block, ["left", "right", "out"], block, _samples(2))
    assert [part.names for part in shared] == [("left", "right"), ("out",)]


def test_sums_are_those_of_all_tokens(block: _Block) -> None:
    samples = _samples(4)
    rows = torch.cat(samples).reshape(-1, 6).double()
    found = _collect(block, samples)["left"]
    torch.testing.assert_close(found.gram, rows.T @ rows, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.absmax.double(), rows.abs().amax(0))
    torch.testing.assert_close(found.act_mean.double(), rows.abs().mean(0), rtol=1e-5, atol=1e-7)
    assert found.tokens == 28


def test_sums_in_several_pieces_and_tiles_are_those_in_one(block: _Block, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = _samples(4)
    whole = _collect(block, samples)["left"]
    monkeypatch.setattr(stats, "_PRODUCT_ROWS", 5)  # a sample has 7 rows
    monkeypatch.setattr(stats, "_TILE", 4)  # of 6 columns
    pieces = _collect(block, samples)["left"]
    torch.testing.assert_close(pieces.gram, whole.gram, rtol=1e-5, atol=1e-6)
    assert pieces.tokens == whole.tokens


def test_tokens_count_in_the_gram_matrix_as_often_as_they_are_said_to(
    block: _Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats, "_PRODUCT_ROWS", 5)  # a sample has 7 rows
    samples, counts = _samples(4), torch.rand(28, generator=torch.Generator().manual_seed(1)) * 3
    rows = torch.cat(samples).reshape(-1, 6)
    shared = collect(block, ["left", "right", "out"], block, samples, {"left": counts, "right": counts})
    plain = _collect(block, samples)
    counted, other = (part.stats for part in shared)
    torch.testing.assert_close(counted.gram, (rows.T @ (rows * counts.unsqueeze(1))).double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(counted.abs_sum, plain["left"].abs_sum)
    assert torch.equal(counted.samples, plain["left"].samples)
    assert torch.equal(other.gram, plain["out"].gram)


def test_inputs_handed_over_one_by_one_have_the_sums_that_a_run_gathers(block: _Block) -> None:
    samples = _samples(4)
    found, gathered = summed("left", iter(samples)), _collect(block, samples)["left"]
    assert torch.equal(found.gram, gathered.gram)
    assert torch.equal(found.act_mean, gathered.act_mean)
    assert torch.equal(found.samples, gathered.samples)
    assert found.tokens == gathered.tokens
    samples[2][0, 3, 1] = float("nan")
    with pytest.raises(NumericsError, match="the input of left"):
        summed("left", iter(samples))


def test_statistics_of_two_halves_add_up_to_the_whole(block: _Block) -> None:
    samples = _samples(6)
    whole = _collect(block, samples)["out"]
    halves = merge(_collect(block, samples[:2])["out"], _collect(block, samples[2:])["out"])
    torch.testing.assert_close(halves.gram, whole.gram, rtol=1e-5, atol=1e-6)  # products are float32
    torch.testing.assert_close(halves.absmax, whole.absmax)
    assert halves.tokens == whole.tokens


def test_scaled_statistics_are_those_of_scaled_inputs(block: _Block) -> None:
    samples = _samples(3)
    scales = torch.rand(6, generator=torch.Generator().manual_seed(1)) + 0.5
    moved = _collect(block, samples)["left"].scaled(scales)
    again = _collect(block, [sample / scales for sample in samples])["left"]
    torch.testing.assert_close(moved.gram, again.gram, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moved.absmax, again.absmax)
    torch.testing.assert_close(moved.act_mean, again.act_mean)


def test_a_block_that_runs_in_bfloat16_has_statistics_in_float32(block: _Block) -> None:
    samples = _samples(4)
    rows = torch.cat(samples).reshape(-1, 6).double()
    with torch.autocast("cpu", torch.bfloat16):
        found = _collect(block, samples)["left"]
    torch.testing.assert_close(found.gram, rows.T @ rows, rtol=1e-5, atol=1e-6)


def test_a_linear_that_only_a_later_sample_reaches_is_counted() -> None:
    class Routed(nn.Module):
        """Positive samples take one expert, others the other."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(6, 6), nn.Linear(6, 6)
            self.other = nn.Linear(6, 6)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.gate(hidden) * self.up(hidden) if hidden.sum() > 0 else self.other(hidden)

    torch.manual_seed(5)
    block = Routed().requires_grad_(False)
    sample = torch.rand(1, 7, 6)
    shared = collect(block, ["gate", "up", "other"], block, [-sample, sample, sample])
    assert {part.names: part.stats.tokens for part in shared} == {("other",): 7, ("gate", "up"): 14}


def test_a_run_ends_where_all_linears_have_read(block: _Block) -> None:
    finished: list[bool] = []
    handle = block.out.register_forward_hook(lambda *_: finished.append(True))
    _collect(block, _samples(5))
    handle.remove()
    assert len(finished) == 1  # the first run shows that each linear is called once
    assert not block.out._forward_pre_hooks


def test_a_linear_that_is_called_twice_reads_twice(block: _Block) -> None:
    shared = collect(block, ["left", "right", "out"], lambda x: block(block(x)), _samples(3))
    assert {part.stats.tokens for part in shared} == {42}


def test_one_non_finite_sample_is_an_error_that_names_the_linear(block: _Block) -> None:
    samples = _samples(3)
    samples[1][0, 2, 3] = float("nan")
    with pytest.raises(NumericsError, match="the input of left holds NaN"):
        collect(block, ["left", "out"], block, samples)


def test_hooks_are_gone_afterwards(block: _Block) -> None:
    collect(block, ["left"], block, _samples(1))
    assert not block.left._forward_pre_hooks
