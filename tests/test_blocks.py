"""The model as structure: blocks, linears, routers, names on disk, and linears that share an input."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quantkit.blocks import (
    Target,
    block_linears,
    build_skeleton,
    find_blocks,
    map_names,
    router_names,
    shared_inputs,
    unquantisable_reason,
)
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError
from tests.zoo import ARCHITECTURES

Zoo = Callable[[str], Path]

SEPARATE = {
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
LINEARS = {
    "llama": ("model.layers", SEPARATE),
    "llama_untied": ("model.layers", SEPARATE),
    "qwen2": ("model.layers", SEPARATE),
    "gemma3": ("model.layers", SEPARATE),
    "gpt2": ("transformer.h", set()),
    "phi3": ("model.layers", {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
    "neox": (
        "gpt_neox.layers",
        {"attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"},
    ),
    "bloom": (
        "transformer.h",
        {"self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"},
    ),
    "mixtral": ("model.layers", {f"self_attn.{name}_proj" for name in "qkvo"}),
}


def skeleton(zoo: Zoo, name: str) -> nn.Module:
    return build_skeleton(open_checkpoint(str(zoo(name))))


class StackedExperts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(count, 8, 16))
        self.down = nn.Parameter(torch.zeros(count, 16, 8))


class ExpertBlock(nn.Module):
    """A block with attention-like linears and experts, as a list or stacked, beside their router."""

    def __init__(self, stacked: bool, count: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.narrow = nn.Linear(16, count)  # as wide as a router, but no experts stand beside it
        self.moe = nn.Module()
        self.moe.gate = nn.Linear(16, count, bias=False)
        self.moe.shared = nn.Linear(16, 16)
        self.moe.experts = StackedExperts(count) if stacked else nn.ModuleList(nn.Linear(16, 16) for _ in range(count))


def expert_model(stacked: bool, blocks: int = 2) -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(500, 16)
    model.layers = nn.ModuleList(ExpertBlock(stacked) for _ in range(blocks))
    model.head = nn.Linear(16, 500)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_and_their_linears_are_found_in_every_architecture(zoo: Zoo, name: str) -> None:
    model = skeleton(zoo, name)
    prefix, expected = LINEARS[name]
    found, blocks = find_blocks(model)
    assert (found, len(blocks)) == (prefix, model.config.num_hidden_layers)
    linears = block_linears(model)
    assert set(linears) == {f"{prefix}.{n}.{linear}" for n in range(len(blocks)) for linear in expected}
    assert all(linears[linear] is model.get_submodule(linear) for linear in linears)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_skeleton_has_no_weights_and_the_dtype_of_the_checkpoint(zoo: Zoo, name: str) -> None:
    model = skeleton(zoo, name)
    assert not model.training
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert build_skeleton(open_checkpoint(str(zoo(name))), torch.bfloat16).dtype == torch.bfloat16


def test_building_a_skeleton_in_another_dtype_leaves_the_checkpoint_as_it_was(zoo: Zoo) -> None:
    checkpoint = open_checkpoint(str(zoo("llama")))
    before = checkpoint.config.to_dict()
    build_skeleton(checkpoint, torch.bfloat16)
    build_skeleton(checkpoint, torch.bfloat16, real_buffers=True)
    assert checkpoint.config.to_dict() == before
    assert checkpoint.dtype == torch.float32


def test_real_buffers_are_computed_while_weights_stay_on_meta(zoo: Zoo) -> None:
    model = build_skeleton(open_checkpoint(str(zoo("llama"))), real_buffers=True)
    buffers = dict(model.named_buffers())
    assert buffers
    assert all(buffer.device.type == "cpu" and torch.isfinite(buffer).all() for buffer in buffers.values())
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_config_of_something_else_than_a_language_model_is_an_error(zoo: Zoo, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(zoo("llama"), tmp_path / "m"))
    (directory / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(CheckpointError, match="m: transformers cannot build a causal language model"):
        build_skeleton(open_checkpoint(str(directory)))


def test_a_model_without_a_list_of_blocks_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no list of decoder blocks"):
        find_blocks(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_lists_whose_members_hold_no_linear_are_not_blocks() -> None:
    model = nn.Module()
    model.norms = nn.ModuleList(nn.LayerNorm(1000) for _ in range(9))
    model.mixed = nn.ModuleList([nn.Linear(100, 100), nn.LayerNorm(8)])
    model.none = nn.ModuleList()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    assert find_blocks(model)[0] == "blocks"


@pytest.mark.parametrize("blocks", [1, 2])
def test_the_list_of_experts_inside_a_block_is_not_the_list_of_blocks(blocks: int) -> None:
    name, found = find_blocks(expert_model(stacked=False, blocks=blocks))
    assert (name, len(found)) == ("layers", blocks)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_a_linear_beside_as_many_experts_is_a_router(stacked: bool) -> None:
    assert router_names(expert_model(stacked)) == {"layers.0.moe.gate", "layers.1.moe.gate"}


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "list"])
def test_routers_are_not_among_the_linears(stacked: bool) -> None:
    linears = set(block_linears(expert_model(stacked)))
    assert {"layers.0.mix", "layers.0.narrow", "layers.1.moe.shared"} <= linears
    assert not any("gate" in name for name in linears)
    assert ("layers.0.moe.experts.3" in linears) is not stacked


def test_a_router_at_the_top_of_a_module_has_its_plain_name() -> None:
    assert router_names(ExpertBlock(stacked=True).moe) == {"gate"}


def test_models_without_experts_have_no_routers(zoo: Zoo) -> None:
    for name in set(ARCHITECTURES) - {"mixtral"}:
        assert router_names(skeleton(zoo, name)) == set(), name


def test_matrices_that_cannot_be_quantised_say_why(zoo: Zoo) -> None:
    conv, experts, plain = (skeleton(zoo, name) for name in ("gpt2", "mixtral", "llama"))
    assert isinstance(conv.get_submodule("transformer.h.0.mlp.c_fc"), Conv1D)
    assert "Conv1D" in (unquantisable_reason(conv, "transformer.h.0.mlp.c_fc.weight") or "")
    assert "experts" in (unquantisable_reason(experts, "model.layers.0.mlp.experts.down_proj") or "")
    assert unquantisable_reason(conv, "transformer.h.0.mlp.c_fc.bias") is None
    assert unquantisable_reason(plain, "model.layers.0.input_layernorm.weight") is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_name_on_disk_becomes_a_parameter_of_the_model(zoo: Zoo, name: str) -> None:
    checkpoint = open_checkpoint(str(zoo(name)))
    model = build_skeleton(checkpoint)
    targets = map_names(model, list(checkpoint.entries))
    assert set(targets) == set(checkpoint.entries)
    state = model.state_dict()
    for disk, target in targets.items():
        assert target.parameter in state, disk
        if target.direct:
            assert tuple(state[target.parameter].shape) == checkpoint.entries[disk].shape, disk


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"mixtral", "neox"}))
def test_names_without_a_mapping_are_their_own(zoo: Zoo, name: str) -> None:
    checkpoint = open_checkpoint(str(zoo(name)))
    targets = map_names(build_skeleton(checkpoint), list(checkpoint.entries))
    assert targets == {disk: Target(disk, True) for disk in checkpoint.entries}


def test_a_head_of_another_name_on_disk_is_renamed(zoo: Zoo) -> None:
    targets = map_names(skeleton(zoo, "neox"), ["embed_out.weight", "gpt_neox.final_layer_norm.weight"])
    assert targets["embed_out.weight"] == Target("lm_head.weight", True)
    assert targets["gpt_neox.final_layer_norm.weight"].parameter == "gpt_neox.final_layer_norm.weight"


def test_expert_tensors_are_parts_of_stacked_parameters_and_the_router_is_renamed(zoo: Zoo) -> None:
    checkpoint = open_checkpoint(str(zoo("mixtral")))
    targets = map_names(build_skeleton(checkpoint), list(checkpoint.entries))
    on_disk, in_model = "model.layers.1.block_sparse_moe", "model.layers.1.mlp"
    assert targets[f"{on_disk}.experts.3.w1.weight"] == Target(f"{in_model}.experts.gate_up_proj", False)
    assert targets[f"{on_disk}.experts.0.w3.weight"] == Target(f"{in_model}.experts.gate_up_proj", False)
    assert targets[f"{on_disk}.experts.2.w2.weight"] == Target(f"{in_model}.experts.down_proj", False)
    assert targets[f"{on_disk}.gate.weight"] == Target(f"{in_model}.gate.weight", True)
    attention = "model.layers.0.self_attn.q_proj.weight"
    assert targets[attention] == Target(attention, True)


def test_names_do_not_depend_on_the_order_in_which_they_come(zoo: Zoo) -> None:
    checkpoint = open_checkpoint(str(zoo("mixtral")))
    model, names = build_skeleton(checkpoint), list(checkpoint.entries)
    assert map_names(model, names[::-1]) == map_names(model, names)


def test_unknown_names_map_to_themselves(zoo: Zoo) -> None:
    model = skeleton(zoo, "llama")
    assert map_names(model, ["model.mtp.weight"]) == {"model.mtp.weight": Target("model.mtp.weight", True)}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_query_key_value_and_gate_up_read_the_same_tensor(zoo: Zoo, name: str) -> None:
    model = skeleton(zoo, name)
    groups, reason = shared_inputs(model, block_linears(model))
    assert reason is None
    attention, mlp = "model.layers.{}.self_attn.{}_proj", "model.layers.{}.mlp.{}_proj"
    assert sorted(map(sorted, groups)) == sorted(
        sorted(group)
        for n in range(2)
        for group in ([attention.format(n, x) for x in "qkv"], [mlp.format(n, x) for x in ("gate", "up")])
    )


@pytest.mark.parametrize("name", ["phi3", "neox", "gpt2"])
def test_fused_projections_share_their_input_with_nothing(zoo: Zoo, name: str) -> None:
    model = skeleton(zoo, name)
    assert shared_inputs(model, block_linears(model)) == ([], None)


def test_attention_of_a_model_with_experts_is_traced(zoo: Zoo) -> None:
    model = skeleton(zoo, "mixtral")
    groups, _ = shared_inputs(model, block_linears(model))
    assert sorted(groups[0]) == [f"model.layers.0.self_attn.{name}_proj" for name in "kqv"]


def test_a_run_that_ends_early_gives_what_it_saw_and_why(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model = skeleton(zoo, "llama")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("needs values\nsecond line")

    monkeypatch.setattr(model.model.layers[1], "forward", broken)
    groups, reason = shared_inputs(model, block_linears(model))
    assert reason == "RuntimeError: needs values"
    assert len(groups) == 2
    assert all(name.startswith("model.layers.0.") for group in groups for name in group)


def test_tracing_leaves_no_hooks_behind(zoo: Zoo) -> None:
    model = skeleton(zoo, "llama")
    linears = block_linears(model)
    shared_inputs(model, linears)
    assert not any(linear._forward_pre_hooks for linear in linears.values())
