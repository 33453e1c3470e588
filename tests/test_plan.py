"""Plans: what happens to every tensor, decided from headers and structure, and what is refused before any work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from quantkit.checkpoint import config_values, open_checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats import FORMATS
from quantkit.pipeline import convert
from quantkit.plan import Plan, make_plan
from quantkit.recipe import Recipe
from tests.zoo import ARCHITECTURES

Zoo = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
G32 = {"bits": 4, "granularity": "group", "group_size": 32}
INT8 = {"bits": 8, "granularity": "channel"}


def recipe(**changes: Any) -> Recipe:
    values = {"name": "own", "description": "", "weights": G32, "ignore": ["lm_head"], "passes": ["rtn"], **changes}
    return Recipe.model_validate(values)


def plan_of(directory: Path, **changes: Any) -> Plan:
    return make_plan(open_checkpoint(str(directory)), recipe(**changes))


@pytest.fixture
def edited(zoo: Zoo, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model with some tensors or config values changed."""

    def edit(name: str, tensors: Callable[[Tensors], None] | None = None, **config: Any) -> Path:
        directory = Path(shutil.copytree(zoo(name), tmp_path / name))
        values = safetensors.torch.load_file(directory / WEIGHTS)
        if tensors is not None:
            tensors(values)
        safetensors.torch.save_file({n: t.contiguous() for n, t in values.items()}, directory / WEIGHTS)
        (directory / "config.json").write_text(json.dumps({**config_values(directory), **config}))
        return directory

    return edit


def without(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def names(plan: Plan) -> dict[str, list[str]]:
    return {
        "quantised": [layer.entry.name for layer in plan.quantised],
        "kept": [kept.entry.name for kept in plan.kept],
        "dropped": [dropped.entry.name for dropped in plan.dropped],
    }


def refused(kind: type[Exception], directory: Path, *words: str, **changes: Any) -> None:
    with pytest.raises(kind) as caught:
        plan_of(directory, **changes)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_is_decided_exactly_once(zoo: Zoo, name: str) -> None:
    plan = plan_of(zoo(name))
    decided = [tensor for group in names(plan).values() for tensor in group]
    assert sorted(decided) == sorted(plan.checkpoint.entries)
    assert all(kept.reason for kept in plan.kept)
    assert plan.parameters == sum(entry.numel for entry in plan.checkpoint.entries.values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_output_is_the_packed_tensors_of_what_is_quantised_and_the_rest_as_it_is(zoo: Zoo, name: str) -> None:
    plan = plan_of(zoo(name))
    packed = {
        spec
        for layer in plan.quantised
        for spec in FORMATS["compressed-tensors"].spec(layer.name, layer.shape, layer.scheme)
    }
    kept = {(kept.entry.name, kept.entry.dtype, kept.entry.shape) for kept in plan.kept}
    assert {(s.name, s.dtype, s.shape) for s in plan.specs} == kept | {(s.name, s.dtype, s.shape) for s in packed}
    assert len({spec.name for spec in plan.specs}) == len(plan.specs)
    assert plan.output_bytes == sum(spec.nbytes for spec in plan.specs)


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 14), ("llama_untied", 14), ("qwen2", 14), ("gemma3", 14), ("phi3", 8), ("neox", 8), ("mixtral", 8)],
)
def test_the_linears_of_the_blocks_are_quantised_and_nothing_else(zoo: Zoo, name: str, count: int) -> None:
    plan = plan_of(zoo(name))
    assert len(plan.quantised) == count
    assert all(layer.entry.name == f"{layer.name}.weight" for layer in plan.quantised)
    assert all(layer.fallback is None for layer in plan.quantised)
    others = ("norm", "embed", "lm_head", "bias", "gate.weight")
    assert not any(part in name for name in names(plan)["quantised"] for part in others)


def test_transposed_matrices_are_kept_and_counted(zoo: Zoo) -> None:
    plan = plan_of(zoo("gpt2"))
    assert plan.quantised == []
    assert {f.layer for f in plan.fallbacks} == {
        f"transformer.h.{n}.{m}" for n in range(2) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert {fallback.kind for fallback in plan.fallbacks} == {"kept"}


def test_experts_are_kept_and_counted_and_routers_are_kept(zoo: Zoo) -> None:
    plan = plan_of(zoo("mixtral"))
    reasons = {kept.entry.name: kept.reason for kept in plan.kept}
    experts = [name for name in reasons if ".experts." in name]
    assert len(experts) == len(plan.fallbacks) == 2 * 4 * 3
    assert all("stacked experts" in reasons[name] for name in experts)
    assert [name for name in reasons if name.endswith("gate.weight")] == [
        f"model.layers.{n}.block_sparse_moe.gate.weight" for n in range(2)
    ]
    assert plan.dense_experts == [f"model.layers.{n}.block_sparse_moe.experts" for n in range(2)]


def test_a_group_that_does_not_divide_falls_back_in_order_and_is_counted(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama"), weights={**G32, "group_size": 128}, group_fallback=[96, 64, 32])
    sizes = {layer.name.rpartition(".")[2]: layer.scheme.group_size for layer in plan.quantised}
    assert sizes == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 64),
        "down_proj": 128,
    }
    assert len(plan.fallbacks) == 12
    assert {(f.kind, f.detail) for f in plan.fallbacks} == {("group_size", "group 64 instead of 128: width 64")}
    assert {layer.fallback for layer in plan.quantised} == {"group 64 instead of 128: width 64", None}


def test_a_group_that_does_not_divide_without_fallback_names_layer_and_width(zoo: Zoo) -> None:
    wide = {**G32, "group_size": 128}
    words = ("model.layers.0.", "group size 128 does not divide the input width 64", "group_fallback")
    refused(RecipeError, zoo("llama"), *words, weights=wide)
    refused(RecipeError, zoo("llama"), *words, "[48, 96]", weights=wide, group_fallback=[48, 96])


def test_ignore_keeps_a_layer_by_its_name_or_by_pattern(zoo: Zoo) -> None:
    exact = plan_of(zoo("llama"), ignore=["model.layers.1.self_attn.o_proj"])
    assert set(names(plan_of(zoo("llama")))["quantised"]) - set(names(exact)["quantised"]) == {
        "model.layers.1.self_attn.o_proj.weight"
    }
    assert "model.layers.1.self_attn.o_proj" in exact.dense_linears
    pattern = plan_of(zoo("llama"), ignore=["re:.*self_attn"])
    assert {layer.name.split(".")[3] for layer in pattern.quantised} == {"mlp"}
    assert [k.reason for k in pattern.kept if "self_attn" in k.entry.name] == ["ignored by the recipe"] * 8


def test_ignoring_what_is_not_there_is_a_note(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama"), ignore=["lm_head", "visual"])
    assert plan.notes == ["ignore 'visual' matches nothing in this model"]


def test_overrides_change_the_format_by_name_or_pattern_and_the_last_one_wins(zoo: Zoo) -> None:
    plan = plan_of(
        zoo("llama"),
        overrides=[
            {"match": "re:.*down_proj$", "weights": INT8},
            {"match": "model.layers.1.mlp.down_proj", "weights": {**G32, "group_size": 64}},
            {"match": "re:.*o_proj", "weights": None},
        ],
    )
    schemes = {layer.name: layer.scheme for layer in plan.quantised}
    assert schemes["model.layers.0.mlp.down_proj"].bits == 8
    assert schemes["model.layers.0.mlp.down_proj"].granularity == "channel"
    assert schemes["model.layers.1.mlp.down_proj"].group_size == 64
    assert schemes["model.layers.1.mlp.up_proj"].group_size == 32
    assert not any("o_proj" in name for name in schemes)


def test_ignore_is_stronger_than_an_override(zoo: Zoo) -> None:
    name = "model.layers.0.mlp.down_proj"
    plan = plan_of(zoo("llama"), ignore=[name], overrides=[{"match": name, "weights": INT8}])
    assert name not in {layer.name for layer in plan.quantised}


def test_an_override_that_matches_nothing_names_a_layer_that_would(zoo: Zoo) -> None:
    words = ("override 're:.*donw_proj' matches no linear", "model.layers.0.mlp.down_proj")
    refused(RecipeError, zoo("llama"), *words, overrides=[{"match": "re:.*donw_proj", "weights": INT8}])


@pytest.mark.parametrize(
    ("layer", "spelled"),
    [("self_attn.k_proj", "k_proj: int8 channel sym"), ("mlp.up_proj", "up_proj: int8 channel sym")],
)
def test_siblings_that_servers_fuse_need_one_scheme(zoo: Zoo, layer: str, spelled: str) -> None:
    overrides = [{"match": f"re:.*{layer}", "weights": INT8}]
    parent = layer.partition(".")[0]
    refused(
        RecipeError, zoo("llama"), f"model.layers.0.{parent}: linears that servers fuse", spelled, overrides=overrides
    )
    refused(RecipeError, zoo("qwen2"), "servers fuse", spelled, overrides=overrides)


def test_ignoring_one_fused_sibling_is_refused_and_all_of_them_is_not(zoo: Zoo) -> None:
    refused(RecipeError, zoo("llama"), "q_proj: int4 g32 sym", "v_proj: kept", ignore=["re:.*v_proj"])
    assert len(plan_of(zoo("llama"), ignore=["re:.*[qkv]_proj"]).quantised) == 8


def copy_head(change: float = 0.0) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 5] += change

    return edit


def test_a_copy_of_a_tied_tensor_is_dropped_and_named(edited: Callable[..., Path], tmp_path: Path) -> None:
    plan = plan_of(edited("llama", copy_head()))
    assert names(plan)["dropped"] == ["lm_head.weight"]
    assert plan.dropped[0].same_as.name == "model.embed_tokens.weight"
    assert "model.embed_tokens.weight" in plan.dropped[0].reason
    assert "lm_head" in plan.dense_linears
    converted = convert(plan, tmp_path / "out")
    written = safetensors.torch.load_file(tmp_path / "out" / WEIGHTS)
    assert "lm_head.weight" not in written
    assert "model.embed_tokens.weight" in written
    assert [record.name for record in converted.manifest.dropped] == ["lm_head.weight"]


def test_a_tied_tensor_that_differs_is_refused_when_its_bytes_are_read(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    plan = plan_of(edited("llama", copy_head(0.5)))
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_model_does_not_know_is_refused_and_may_be_ignored(edited: Callable[..., Path]) -> None:
    directory = edited("llama", lambda tensors: tensors.update({"model.mtp.weight": torch.ones(4, 4)}))
    refused(CheckpointError, directory, WEIGHTS, "'model.mtp.weight' belongs to nothing in the model")
    plan = plan_of(directory, ignore=["lm_head", "model.mtp.weight"])
    assert [k.reason for k in plan.kept if k.entry.name == "model.mtp.weight"] == ["the model does not read it"]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(edited: Callable[..., Path], name: str) -> None:
    directory = edited("llama", without(name))
    refused(CheckpointError, directory, f"no tensor on disk becomes {name!r} (1 missing)")


def test_a_tied_tensor_of_which_no_copy_is_there_is_missing(edited: Callable[..., Path]) -> None:
    refused(CheckpointError, edited("llama", without("model.embed_tokens.weight")), "no tensor on disk becomes")


def test_a_missing_bias_is_named(edited: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    refused(CheckpointError, edited("qwen2", without(name)), f"becomes {name!r}")


def test_a_missing_head_of_an_untied_model_is_named(edited: Callable[..., Path]) -> None:
    directory = edited("llama_untied", without("lm_head.weight"))
    refused(CheckpointError, directory, "no tensor on disk becomes 'lm_head.weight'")


def test_a_tensor_of_another_shape_names_both_shapes(edited: Callable[..., Path]) -> None:
    def edit(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 63)

    words = (WEIGHTS, "'model.layers.0.mlp.up_proj.weight' is [128, 63]", "has [128, 64]")
    refused(CheckpointError, edited("llama", edit), *words)


def test_a_config_of_another_size_is_refused(edited: Callable[..., Path]) -> None:
    refused(CheckpointError, edited("llama", num_hidden_layers=3), "no tensor on disk becomes 'model.layers.2.")


def test_a_checkpoint_that_says_it_is_quantised_is_refused(edited: Callable[..., Path]) -> None:
    directory = edited("llama", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(CheckpointError, directory, "is quantised already", "quantization_config")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_a_quantised_dtype_are_refused(edited: Callable[..., Path], dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    directory = edited("llama", lambda tensors: tensors.update({name: torch.zeros(128, 64).to(dtype)}))
    refused(CheckpointError, directory, f"tensor {name!r} is {dtype}, which is quantised already")


def test_an_artifact_of_ours_cannot_be_quantised_again(zoo: Zoo, tmp_path: Path) -> None:
    convert(plan_of(zoo("llama")), tmp_path / "out")
    refused(CheckpointError, tmp_path / "out", "is quantised already")


def test_an_untied_head_is_quantised_where_an_override_asks_for_it(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama_untied"), ignore=[], overrides=[{"match": "lm_head", "weights": INT8}])
    head = [layer for layer in plan.quantised if layer.name == "lm_head"]
    assert [layer.scheme.bits for layer in head] == [8]
    assert "lm_head" not in plan.dense_linears
    assert "lm_head" in plan_of(zoo("llama_untied"), ignore=[]).dense_linears


def test_a_tied_head_cannot_be_quantised_by_an_override(zoo: Zoo) -> None:
    overrides = [{"match": "lm_head", "weights": INT8}]
    words = ("override 'lm_head' asks for lm_head", "tied to model.embed_tokens", "untie")
    refused(RecipeError, zoo("llama"), *words, ignore=[], overrides=overrides)
    ignored = ("override 'lm_head' matches no linear or embedding", "ignored ones do not count")
    refused(RecipeError, zoo("llama"), *ignored, overrides=overrides)


def test_an_untied_embedding_is_quantised_where_an_override_names_it(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama_untied"), overrides=[{"match": "model.embed_tokens", "weights": {**G32, "bits": 8}}])
    tables = [layer for layer in plan.quantised if layer.embedding]
    assert [(t.name, t.module, t.shape, t.scheme.describe()) for t in tables] == [
        ("model.embed_tokens", "model.embed_tokens", (256, 64), "int8 g32 sym")
    ]
    assert tables[0].outside
    assert "model.embed_tokens.weight" not in names(plan)["kept"]
    assert not any(layer.outside or layer.embedding for layer in plan.quantised if layer.name != "model.embed_tokens")
    assert plan.fallbacks == []


@pytest.mark.parametrize(("name", "table"), [("neox", "gpt_neox.embed_in"), ("gpt2", "transformer.wpe")])
def test_overrides_match_embeddings_and_heads_by_their_names_on_disk(zoo: Zoo, name: str, table: str) -> None:
    overrides = [{"match": f"re:{table}$", "weights": INT8}]
    if name == "neox":
        overrides.append({"match": "embed_out", "weights": INT8})
    plan = plan_of(zoo(name), overrides=overrides)
    outside = {layer.name: layer.module for layer in plan.quantised if layer.outside}
    assert outside == {table: table, **({"embed_out": "lm_head"} if name == "neox" else {})}


def test_the_formats_of_a_recipe_reach_no_embedding_without_an_override(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama_untied"), ignore=[], overrides=[{"match": "re:model.layers", "weights": INT8}])
    assert not any(layer.outside for layer in plan.quantised)
    assert plan.dense_embeddings == []


def test_dense_embeddings_are_listed_where_another_one_is_quantised(zoo: Zoo) -> None:
    plan = plan_of(zoo("gpt2"), overrides=[{"match": "transformer.wpe", "weights": INT8}])
    assert plan.dense_embeddings == ["transformer.wte"]


def test_ignore_and_a_later_null_keep_an_embedding(zoo: Zoo) -> None:
    override = {"match": "re:model", "weights": INT8}
    table = "model.embed_tokens"
    for changes in (
        {"ignore": ["lm_head", table], "overrides": [override]},
        {"overrides": [override, {"match": table, "weights": None}]},
    ):
        plan = plan_of(zoo("llama_untied"), **changes)
        assert not any(layer.embedding for layer in plan.quantised)
        assert [k.reason for k in plan.kept if k.entry.name == f"{table}.weight"] == ["ignored by the recipe"]


def test_a_group_that_does_not_divide_the_width_of_an_embedding_falls_back_and_is_counted(zoo: Zoo) -> None:
    wide = {"bits": 8, "granularity": "group", "group_size": 128}
    plan = plan_of(
        zoo("llama_untied"), group_fallback=[64], overrides=[{"match": "model.embed_tokens", "weights": wide}]
    )
    assert [(f.layer, f.kind, f.detail) for f in plan.fallbacks] == [
        ("model.embed_tokens", "group_size", "group 64 instead of 128: width 64")
    ]


@pytest.mark.parametrize("match", ["model.embed_tokens", "re:.*embed_tokens$", "re:model"])
def test_a_tied_embedding_is_refused_in_one_line_that_says_why(zoo: Zoo, match: str) -> None:
    overrides = [{"match": match, "weights": INT8}]
    words = (f"override {match!r} asks for model.embed_tokens", "tied to lm_head", "take it out of the overrides")
    refused(RecipeError, zoo("llama"), *words, overrides=overrides)


def test_a_wide_override_passes_over_a_tied_embedding_that_is_ignored(zoo: Zoo) -> None:
    table = "model.embed_tokens"
    plan = plan_of(zoo("llama"), ignore=["lm_head", table], overrides=[{"match": "re:model", "weights": INT8}])
    assert len(plan.quantised) == 14
    assert {layer.scheme.bits for layer in plan.quantised} == {8}


def test_an_embedding_is_refused_where_activations_are_rounded(zoo: Zoo) -> None:
    changes = {"weights": INT8, "activations": {}, "overrides": [{"match": "re:.*embed_tokens", "weights": INT8}]}
    words = ("asks for model.embed_tokens", "no activations to round", "take it out of the overrides")
    refused(RecipeError, zoo("llama_untied"), *words, **changes)


def test_an_embedding_whose_class_does_more_than_look_up_is_refused(edited: Callable[..., Path]) -> None:
    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = edited("gemma3", untie, tie_word_embeddings=False)
    words = ("asks for model.embed_tokens", "ScaledWordEmbedding does more than look rows up")
    refused(RecipeError, source, *words, overrides=[{"match": "model.embed_tokens", "weights": INT8}])


def test_the_peak_of_a_calibrated_run_counts_a_table_that_is_rounded_after_the_blocks(zoo: Zoo) -> None:
    calibrated = {"passes": ["gptq"], "calibration": {"set": "x", "samples": 1, "sequence_length": 8}}
    overrides = [{"match": "model.embed_tokens", "weights": INT8}]
    with_table = plan_of(zoo("llama_untied"), overrides=overrides, **calibrated)
    entry = with_table.checkpoint.entries["model.embed_tokens.weight"]
    assert with_table.peak_bytes >= entry.nbytes + 2 * entry.numel
    # The table is no block: it adds no Gram matrix and no float32 copy of its own.
    assert with_table.peak_bytes == plan_of(zoo("llama_untied"), **calibrated).peak_bytes
    alone = plan_of(zoo("llama_untied"), ignore=["re:model.layers", "lm_head"], overrides=overrides, **calibrated)
    assert alone.peak_bytes >= entry.nbytes + 2 * entry.numel


def test_scales_follow_the_dtype_of_the_checkpoint(edited: Callable[..., Path], zoo: Zoo) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    assert {layer.scheme.scale_dtype for layer in plan_of(zoo("llama")).quantised} == {"float16"}
    narrow_plan = plan_of(edited("llama", narrow, dtype="bfloat16"))
    assert {layer.scheme.scale_dtype for layer in narrow_plan.quantised} == {"bfloat16"}


def test_planning_reads_no_weights(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(zoo("llama")))
    monkeypatch.setattr("quantkit.tensorfile._read_into", lambda *_: pytest.fail("weights were read"))
    assert make_plan(checkpoint, recipe()).quantised


def test_the_peak_is_at_least_the_largest_tensor_and_its_codes(zoo: Zoo) -> None:
    plan = plan_of(zoo("llama"))
    largest = max(layer.entry.nbytes for layer in plan.quantised)
    assert plan.peak_bytes >= largest + largest // 4
    assert plan_of(zoo("gpt2")).peak_bytes == 0


def test_a_head_that_holds_the_tied_table_is_not_packed(zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "head_only")
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    safetensors.torch.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    overrides = [{"match": "lm_head", "weights": INT8}]
    refused(RecipeError, source, "override 'lm_head' asks for lm_head", "tied", ignore=[], overrides=overrides)
