"""What is felt block by block is what the gradient of the whole model says."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quantkit import sensitivity
from quantkit.blocks import find_blocks
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import NumericsError
from quantkit.live import LiveModel
from quantkit.sensitivity import Felt, feel
from quantkit.stats import linears_of
from tests.zoo import ARCHITECTURES

IDS = torch.arange(1, 73).reshape(3, 24)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_block_by_block_is_as_the_whole_model_at_once(name: str, zoo: Callable[[str], Path]) -> None:
    source = zoo(name)
    live = LiveModel(open_checkpoint(str(source)))
    hidden = live.start(IDS)
    with torch.no_grad():
        felt = feel(live, IDS, hidden, lambda _: nullcontext(), torch.Generator().manual_seed(1))
    assert all(parameter.is_meta for parameter in live.model.parameters())

    model = AutoModelForCausalLM.from_pretrained(source).eval().requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    blocks = find_blocks(model)[1]
    slopes: dict[tuple[int, str], list[torch.Tensor]] = {}
    for index, block in enumerate(blocks):
        for part, module in linears_of(block).items():
            kept = slopes.setdefault((index, part), [])
            module.register_full_backward_hook(lambda _, __, out, kept=kept: kept.append(out[0].flatten(0, -2)))
    generator = torch.Generator().manual_seed(1)
    for sample in IDS.split(1):
        logits = model(sample).logits.flatten(0, 1)
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    for index, parts in enumerate(felt):
        every = {part for (block, part), kept in slopes.items() if block == index and len(kept) == len(IDS)}
        assert set(parts) == {part for part in every if len(slopes[index, part][0]) == IDS.shape[1]}
        for part, found in parts.items():
            whole = torch.cat(slopes[index, part])
            torch.testing.assert_close(found.grams[0], whole.T @ whole / IDS.numel(), rtol=1e-3, atol=1e-7)
            torch.testing.assert_close(found.tokens, whole.square().sum(1), rtol=1e-3, atol=1e-7)


def test_outputs_of_wide_linears_are_looked_at_in_runs(
    zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> Felt:
        live = LiveModel(open_checkpoint(str(zoo("llama"))))
        with torch.no_grad():
            felt = feel(live, IDS, live.start(IDS), lambda _: nullcontext(), torch.Generator().manual_seed(1))
        return felt[1]["mlp.down_proj"]

    (whole,) = found().grams
    monkeypatch.setattr(sensitivity, "_TOGETHER", 24)
    runs = found().grams
    assert [len(run) for run in runs] == [24, 24, 16]
    for start, run in zip((0, 24, 48), runs, strict=True):
        torch.testing.assert_close(run, whole[start:, start:][: len(run), : len(run)])


def test_divided_outputs_are_felt_the_more() -> None:
    slopes, scales = torch.randn(50, 6), torch.rand(6) + 0.5
    felt = Felt((slopes[:, :4].T @ slopes[:, :4], slopes[:, 4:].T @ slopes[:, 4:]), slopes.square().sum(1))
    moved = (slopes * scales)[:, :4], (slopes * scales)[:, 4:]
    for gram, part in zip(felt.scaled(scales).grams, moved, strict=True):
        torch.testing.assert_close(gram, part.T @ part)


def test_tokens_count_within_bounds_and_with_mean_one() -> None:
    tokens = torch.tensor([0.0, 1.0, 2.0, 3.0, 1e9])
    counts = Felt((), tokens).weights()
    assert counts.mean().item() == pytest.approx(1)
    assert (counts / counts[2]).tolist() == pytest.approx([0.1, 0.5, 1, 1.5, 10])
    assert Felt((), torch.zeros(4)).weights().tolist() == [1, 1, 1, 1]


def test_a_head_that_is_not_finite_is_one_line(zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveModel(open_checkpoint(str(zoo("llama"))))
    hidden = live.start(IDS)
    monkeypatch.setattr(
        LlamaRMSNorm, "forward", lambda norm, x: x * float("inf") if norm is live.model.model.norm else x
    )
    with torch.no_grad(), pytest.raises(NumericsError, match="the logits of the source hold NaN or infinite values"):
        feel(live, IDS, hidden, lambda _: nullcontext(), torch.Generator())
