"""Running a checkpoint block by block is running the model."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel

import quantkit.live
from quantkit.blocks import find_blocks
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError
from quantkit.live import LiveModel
from tests.zoo import ARCHITECTURES

IDS = torch.arange(1, 73).reshape(3, 24)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_in_turn_give_the_hidden_states_of_the_whole_model(
    name: str, zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantkit.live, "_BATCH_TOKENS", IDS.shape[1])  # so each sample is a batch
    live = LiveModel(open_checkpoint(str(zoo(name))))
    hidden = live.start(IDS)
    for index in range(len(live.blocks)):
        live.load(index)
        live.advance(index, hidden)
        live.free(index)
    model = AutoModelForCausalLM.from_pretrained(zoo(name)).eval()
    found: list[torch.Tensor] = []
    find_blocks(model)[1][-1].register_forward_hook(
        lambda module, given, output: found.append(output[0] if isinstance(output, tuple) else output)  # noqa: ARG005
    )
    with torch.no_grad():
        model(IDS)
    torch.testing.assert_close(hidden, found[0], rtol=1e-5, atol=1e-6)


@pytest.fixture
def odd_llama(zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LiveModel]:
    """A Llama that goes from its embeddings through its blocks by `walk`, with blocks that do `block`."""

    def made(walk: Callable[[Any, torch.Tensor], torch.Tensor], block: Callable[..., Any]) -> LiveModel:
        def forward(model: Any, input_ids: torch.Tensor, **_: object) -> Any:
            return SimpleNamespace(last_hidden_state=model.norm(walk(model.layers, model.embed_tokens(input_ids))))

        monkeypatch.setattr(LlamaModel, "forward", forward)
        monkeypatch.setattr(LlamaDecoderLayer, "forward", block)
        return LiveModel(open_checkpoint(str(zoo("llama"))))

    return made


@pytest.mark.parametrize(("count", "refused"), [(1, False), (2, False), (3, True)])
def test_a_model_whose_blocks_hand_on_more_than_hidden_states_is_refused(
    count: int, refused: bool, odd_llama: Callable[..., LiveModel]
) -> None:
    def walk(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
        state: Any = (hidden,)
        for block in blocks:
            state = block(*state[:count])
        found: torch.Tensor = state[0]
        return found

    live = odd_llama(walk, lambda block, hidden, *_: (block.mlp(hidden), None, hidden))
    with pytest.raises(CheckpointError, match="hand on more than hidden states") if refused else nullcontext():
        live.start(IDS)


def test_a_model_that_puts_places_before_its_tokens_is_refused(
    zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = nn.Embedding.forward
    monkeypatch.setattr(nn.Embedding, "forward", lambda table, ids: forward(table, ids).repeat(1, 2, 1))
    with pytest.raises(CheckpointError, match=r"of shape \[3, 48, 64\] for token ids of shape \[3, 24\]"):
        LiveModel(open_checkpoint(str(zoo("llama")))).start(IDS)


@pytest.mark.parametrize("of_text", [False, True])
def test_a_model_whose_blocks_are_given_something_else_of_the_text_is_refused(
    of_text: bool, odd_llama: Callable[..., LiveModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
        tables = [hidden.clone() if of_text else torch.ones_like(hidden)]
        beside = {"tables": tables, "kind": SimpleNamespace(name="llama")}
        for block in blocks:
            hidden = block(hidden, beside)
        return hidden

    monkeypatch.setattr(quantkit.live, "_BATCH_TOKENS", IDS.shape[1])  # so each sample is a batch
    live = odd_llama(walk, lambda _, hidden, beside: hidden + beside["tables"][0])
    with pytest.raises(CheckpointError, match="more that depends on the text") if of_text else nullcontext():
        live.start(IDS)


def test_a_model_that_works_between_its_blocks_is_refused(odd_llama: Callable[..., LiveModel]) -> None:
    def walk(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            hidden += block(hidden)
        return hidden

    with pytest.raises(CheckpointError, match="changes hidden states before its block 1, outside of blocks"):
        odd_llama(walk, lambda block, hidden: block.mlp(hidden)).start(IDS)


def test_a_model_whose_blocks_share_what_they_write_is_refused(odd_llama: Callable[..., LiveModel]) -> None:
    def walk(blocks: Any, hidden: torch.Tensor) -> torch.Tensor:
        shared: dict[str, torch.Tensor] = {}
        for block in blocks:
            hidden = block(hidden, shared=shared)
        return hidden

    def share(_: Any, hidden: torch.Tensor, *, shared: dict[str, torch.Tensor]) -> torch.Tensor:
        shared["keys"] = hidden
        return hidden

    live = odd_llama(walk, share)
    hidden = live.start(IDS)
    live.load(0)
    with pytest.raises(CheckpointError, match="hand on more than hidden states"):
        live.advance(0, hidden)


@pytest.mark.parametrize("part", [LlamaModel, LlamaDecoderLayer])
def test_a_model_that_fails_on_its_own_is_named_with_its_reason(
    part: type, zoo: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no language\nis set")

    monkeypatch.setattr(part, "forward", fail)
    with pytest.raises(CheckpointError, match="the model does not run: no language"):
        LiveModel(open_checkpoint(str(zoo("llama")))).start(IDS)


def test_only_one_block_has_weights(zoo: Callable[[str], Path]) -> None:
    live = LiveModel(open_checkpoint(str(zoo("llama"))))
    live.start(IDS)
    assert all(parameter.is_meta for parameter in live.model.parameters())
    live.load(1)
    assert not any(parameter.is_meta for parameter in live.blocks[1].parameters())
    assert all(parameter.is_meta for parameter in live.blocks[0].parameters())
    live.free(1)
    assert all(parameter.is_meta for parameter in live.model.parameters())


def test_buffers_that_are_not_on_disk_outlive_a_block(zoo: Callable[[str], Path]) -> None:
    live = LiveModel(open_checkpoint(str(zoo("llama"))))
    live.blocks[1].register_buffer("mask", torch.ones(3), persistent=False)
    live.start(IDS)
    live.load(1)
    live.free(1)
    assert torch.equal(live.load(1).get_buffer("mask"), torch.ones(3))


def test_a_short_sample_runs_with_masks_of_its_own_length(zoo: Callable[[str], Path]) -> None:
    live = LiveModel(open_checkpoint(str(zoo("gemma3"))))
    hidden = live.start(IDS, short=20)
    live.load(0)
    whole = live.run(0, hidden)
    torch.testing.assert_close(live.run(0, hidden[:1, :20]), whole[:1, :20], rtol=1e-5, atol=1e-6)


def test_a_stacked_expert_is_no_single_tensor_on_disk(zoo: Callable[[str], Path]) -> None:
    live = LiveModel(open_checkpoint(str(zoo("mixtral"))))
    assert live.entry_of("model.layers.0.mlp.experts.gate_up_proj") is None
    entry = live.entry_of("model.layers.0.self_attn.q_proj.weight")
    assert entry is not None
    assert entry.name == "model.layers.0.self_attn.q_proj.weight"
