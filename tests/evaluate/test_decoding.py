"""Steps with packed kernels beside exact ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from quantkit.checkpoint import open_checkpoint
from quantkit.evaluate import kernels
from quantkit.evaluate.decoding import compared_steps, decoding_metrics, takes_kernels
from quantkit.evaluate.generation import forced_logits
from quantkit.evaluate.loader import exactly, fast_layers, load_artifact
from quantkit.evaluate.scoring import window_logits
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

Zoo = Callable[[str], Path]
WINDOWS = list(torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def artifact(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = load_recipe("rtn-g64-zp", ["weights.scale_dtype=bfloat16", "weights.group_size=32"])
    return convert(make_plan(open_checkpoint(str(zoo("llama"))), recipe), tmp_path_factory.mktemp("a") / "a").path


@pytest.fixture
def model(artifact: Path) -> PreTrainedModel:
    return load_artifact(artifact, dtype=torch.bfloat16, fast=True)


def next_logits(model: PreTrainedModel, window: torch.Tensor, length: int) -> torch.Tensor:
    """Of the token after the first `length`, from one forward of the whole prefix: the slow, plain way."""
    with torch.no_grad():
        return model(input_ids=window[:length].unsqueeze(0)).logits[0, -1]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that each product of a kernel had."""
    rows: list[int] = []
    original = kernels._int4

    def counted(*arguments: object) -> kernels.Kernel:
        kernel = original(*arguments)  # type: ignore[arg-type]
        return lambda inputs: rows.append(len(inputs)) or kernel(inputs)  # type: ignore[func-returns-value]

    monkeypatch.setattr(kernels, "_int4", counted)
    return rows


def test_only_single_steps_take_kernels(model: PreTrainedModel, used: list[int]) -> None:
    next_logits(model, WINDOWS[0], 12)
    assert used == []
    model.generate(torch.stack(WINDOWS)[:, :8], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert set(used) == {2}


def test_inside_exactly_no_layer_takes_a_kernel(model: PreTrainedModel, used: list[int]) -> None:
    layers = fast_layers(model)
    with exactly(model):
        assert fast_layers(model) == []
        model.generate(torch.stack(WINDOWS)[:, :8], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert used == []
    assert fast_layers(model) == layers != []


def test_scoring_takes_no_kernel_even_for_one_token(model: PreTrainedModel, used: list[int]) -> None:
    window_logits(model, WINDOWS[0][:1])
    assert used == []
    assert fast_layers(model)


def test_a_layer_takes_the_last_tokens_of_a_batch(model: PreTrainedModel, used: list[int]) -> None:
    """As a quantised head gets them: rows that do not lie behind one another."""
    layer = fast_layers(model)[0]
    inputs = torch.randn(3, 5, layer.in_features, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert torch.equal(layer(inputs[:, -1:]), layer(inputs[:, -1:].contiguous()))
    assert used == [3, 3]


def test_a_window_of_two_tokens_has_no_step_to_compare(model: PreTrainedModel) -> None:
    assert takes_kernels(model)
    assert compared_steps(model, [WINDOWS[0][:2]]) == 0
    assert decoding_metrics(model, [WINDOWS[0][:2], WINDOWS[1][:3]])["tokens"] == 1


def test_other_dtypes_and_plain_loading_are_exact(artifact: Path) -> None:
    assert fast_layers(load_artifact(artifact, dtype=torch.float32, fast=True)) == []
    assert fast_layers(load_artifact(artifact, dtype=torch.bfloat16)) == []
    assert compared_steps(load_artifact(artifact, dtype=torch.bfloat16), WINDOWS) == 0


def test_the_forced_steps_are_those_of_the_window(model: PreTrainedModel) -> None:
    with exactly(model):
        found = forced_logits(model, WINDOWS[0][:12].tolist(), WINDOWS[0][12:17].tolist())
    expected = torch.stack([next_logits(model, WINDOWS[0], length) for length in range(13, 18)])
    assert found.shape == expected.shape
    assert (found - expected.float()).abs().max() < 0.02 * expected.float().abs().max()


def test_the_metrics_are_those_of_both_ways(model: PreTrainedModel) -> None:
    ticks: list[int] = []
    found = decoding_metrics(model, WINDOWS, lambda: ticks.append(1))
    assert found["tokens"] == compared_steps(model, WINDOWS) == len(ticks) == 2 * 11
    assert 0 < found["largest_difference"] < 0.5
    assert 0 <= found["kl_mean"] < 1e-3
    assert 0.8 <= found["top1"] <= 1


def test_a_wrong_kernel_is_seen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoding_metrics(model, WINDOWS)
    original = kernels._int4
    monkeypatch.setattr(kernels, "_int4", lambda *a: lambda inputs: 1.5 * original(*a)(inputs))
    for layer in fast_layers(model):
        layer._sought = False
    assert decoding_metrics(model, WINDOWS)["kl_mean"] > 10 * right["kl_mean"]
