"""The packed loader: the logits of the reference reader, the weights of an independent decoder, packed in memory."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compressed_tensors.compressors as reference
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from quantkit.affine import dequantize
from quantkit.canonical import canonical_json
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError, CheckpointError, QuantkitError
from quantkit.evaluate.loader import PackedEmbedding, PackedLinear, is_artifact, load_artifact, load_checkpoint
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from tests import zoo as architectures
from tests.oracles import decoder
from tests.zoo import ARCHITECTURES

Zoo = Callable[[str], Path]
Artifact = Callable[..., Path]
IDS = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))


def make(source: Path, output: Path, recipe: str, *settings: str) -> Path:
    return convert(make_plan(open_checkpoint(str(source)), load_recipe(recipe, list(settings))), output).path


@pytest.fixture(scope="module")
def artifact(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The artifact of an architecture under a recipe, converted once. Tests must not change it."""
    root = tmp_path_factory.mktemp("artifacts")
    made: dict[tuple[str, ...], Path] = {}

    def path(name: str, recipe: str, *settings: str) -> Path:
        key = (name, recipe, *settings)
        if key not in made:
            made[key] = make(zoo(name), root / str(len(made)), recipe, *settings)
        return made[key]

    return path


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def load_reference(path: Path) -> torch.nn.Module:
    """The artifact through transformers, which must find every tensor and nothing else."""
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    # GPT-2's loader always lists the head that it ties.
    problems = {key: set(values) - {"lm_head.weight"} for key, values in report.items() if values}
    assert not any(problems.values()), problems
    return model.eval()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# The same logits as the reference reader


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_symmetric_logits_are_those_of_transformers(name: str, artifact: Artifact, zoo: Zoo) -> None:
    path = artifact(name, "rtn-g64")
    found = logits(load_artifact(path))
    assert found.dtype == torch.float32
    assert difference(found, logits(load_reference(path))) < 1e-4
    # The comparison would be empty if quantisation had moved nothing.
    moved = difference(found, logits(AutoModelForCausalLM.from_pretrained(zoo(name))))
    assert (moved > 1e-2) == bool(read_manifest(path).layers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_zero_point_logits_are_those_of_transformers_in_the_stored_arithmetic(name: str, artifact: Artifact) -> None:
    path = artifact(name, "rtn-g64-zp")
    expected = logits(load_reference(path))
    assert difference(logits(load_artifact(path, arithmetic="stored")), expected) < 1e-4


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_other_widths_load_in_transformers_with_the_same_logits(bits: int, symmetric: str, artifact: Artifact) -> None:
    path = artifact("qwen2", "rtn-g64", f"weights.bits={bits}", f"weights.symmetric={symmetric}")
    arithmetic = "exact" if symmetric == "true" else "stored"
    assert difference(logits(load_artifact(path, arithmetic=arithmetic)), logits(load_reference(path))) < 1e-4


@pytest.mark.parametrize("recipe", ["rtn-int8", "rtn-int8-tensor", "rtn-int4", "rtn-int4-tensor"])
def test_channel_and_tensor_scales_load_in_transformers_with_the_same_logits(recipe: str, artifact: Artifact) -> None:
    path = artifact("llama", recipe)
    assert difference(logits(load_artifact(path)), logits(load_reference(path))) < 1e-4


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden width 96, which 64 does not divide, and feed-forward width 192, which it does."""
    directory = tmp_path_factory.mktemp("narrow") / "narrow"
    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    architectures.byte_tokenizer().save_pretrained(directory)
    return directory


def test_mixed_group_sizes_load_in_transformers_with_the_same_logits(narrow: Path, tmp_path: Path) -> None:
    path = make(narrow, tmp_path / "out", "rtn-g64")
    manifest = read_manifest(path)
    sizes = {layer.name.rpartition(".")[2]: layer.scheme.group_size for layer in manifest.layers}
    assert sizes == dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"], 32) | {
        "down_proj": 64
    }
    assert len(manifest.fallbacks) == 12
    assert difference(logits(load_artifact(path)), logits(load_reference(path))) < 1e-4


def test_overridden_and_kept_layers_load_in_transformers_with_the_same_logits(zoo: Zoo, tmp_path: Path) -> None:
    overrides = (
        'overrides=[{match: "re:.*down_proj$", weights: {bits: 8, granularity: channel}}, '
        '{match: "re:model.layers.1.self_attn", weights: null}]'
    )
    path = make(zoo("llama_untied"), tmp_path / "out", "rtn-g64", overrides)
    schemes = {layer.scheme.scheme.describe() for layer in read_manifest(path).layers}
    assert schemes == {"int4 g64 sym", "int8 channel sym"}
    model = load_artifact(path)
    assert isinstance(model.get_submodule("model.layers.1.self_attn.q_proj"), torch.nn.Linear)
    assert difference(logits(model), logits(load_reference(path))) < 1e-4


TABLES = {
    "llama_untied": "model.embed_tokens", "qwen2": "model.embed_tokens", "phi3": "model.embed_tokens",
    "neox": "gpt_neox.embed_in", "mixtral": "model.embed_tokens", "gpt2": "transformer.wpe",
}  # fmt: skip


def tabled(name: str, weights: str = "{bits: 8, granularity: group, group_size: 32}", head: bool = False) -> list[str]:
    """Settings that quantise the embedding of an untied architecture, and its head."""
    matches = [TABLES[name], *(['"re:(lm_head|embed_out)$"'] if head else [])]
    overrides = ", ".join(f"{{match: {match}, weights: {weights}}}" for match in matches)
    return [f"overrides=[{overrides}]", "ignore=[]"]


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_an_embedding_and_head_of_8_bits_load_in_transformers_with_the_same_logits(
    name: str, head: bool, artifact: Artifact
) -> None:
    path = artifact(name, "rtn-g64", *tabled(name, head=head and name != "gpt2"))
    found = logits(load_artifact(path))
    assert difference(found, logits(load_reference(path))) < 1e-4
    assert difference(found, logits(load_artifact(artifact(name, "rtn-g64")))) > 1e-3


@pytest.mark.parametrize("weights", ["{bits: 8, granularity: channel}", "{bits: 8, granularity: tensor}"])
def test_an_embedding_with_one_scale_a_row_loads_in_transformers_with_the_same_logits(
    weights: str, artifact: Artifact
) -> None:
    path = artifact("llama_untied", "rtn-g64", *tabled("llama_untied", weights))
    assert difference(logits(load_artifact(path)), logits(load_reference(path))) < 1e-4


@pytest.mark.parametrize(("bits", "symmetric"), [(4, "true"), (4, "false"), (3, "false"), (8, "false")])
def test_a_packed_embedding_of_the_only_scheme_loads_in_transformers_decoded(
    bits: int, symmetric: str, artifact: Artifact
) -> None:
    weights = f"{{bits: {bits}, granularity: group, group_size: 64, symmetric: {symmetric}}}"
    widths = (f"weights.bits={bits}", f"weights.symmetric={symmetric}")
    path = artifact("llama_untied", "rtn-g64", *tabled("llama_untied", weights, head=True), *widths)
    assert read_manifest(path).readers["transformers"] == "yes, decoded on load in the scale dtype"
    assert difference(logits(load_artifact(path, arithmetic="stored")), logits(load_reference(path))) < 1e-4


def test_a_packed_embedding_under_several_schemes_waits_for_one_line_of_transformers(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = artifact("llama_untied", "rtn-g64", *tabled("llama_untied", head=True), "format=compressed-tensors-packed")
    assert read_manifest(path).readers["transformers"].startswith("no: transformers up to 5.24")
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
        load_reference(path)
    initialise = PreTrainedModel._init_weights

    def guarded(self: Any, module: torch.nn.Module) -> None:
        if getattr(module, "weight", None) is not None or not isinstance(module, torch.nn.Embedding):
            initialise(self, module)

    monkeypatch.setattr(PreTrainedModel, "_init_weights", guarded)
    found = logits(load_artifact(path))
    assert difference(found, logits(load_reference(path))) < 1e-4
    int8 = artifact("llama_untied", "rtn-g64", *tabled("llama_untied", head=True))
    assert torch.equal(found, logits(load_artifact(int8)))


def test_an_embedding_of_a_bfloat16_checkpoint_gives_the_rows_of_transformers(zoo: Zoo, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(zoo("llama_untied"), dtype=torch.bfloat16).save_pretrained(source)
    path = make(source, tmp_path / "out", "rtn-g64", *tabled("llama_untied"))
    model, reference = load_artifact(path), load_reference(path)
    logits(reference)  # its first forward decodes
    assert torch.equal(model.model.embed_tokens(IDS), reference.model.embed_tokens(IDS))
    assert model.model.embed_tokens(IDS).dtype == torch.bfloat16


def test_activations_in_bfloat16_are_computed_in_bfloat16(artifact: Artifact) -> None:
    model = load_artifact(artifact("llama", "rtn-g64"), dtype=torch.bfloat16)
    assert logits(model).dtype == torch.bfloat16
    assert model.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    exact = logits(load_artifact(artifact("llama", "rtn-g64")))
    assert 0 < difference(logits(model).float(), exact) < 0.1 * exact.abs().max().item()


def test_a_bfloat16_checkpoint_gives_the_logits_of_transformers(zoo: Zoo, tmp_path: Path) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(zoo("qwen2"), dtype=torch.bfloat16).save_pretrained(source)
    path = make(source, tmp_path / "out", "rtn-g64")
    found, expected = logits(load_artifact(path)), logits(load_reference(path))
    assert found.dtype == expected.dtype == torch.bfloat16
    # Both round at each layer; they may differ by a last bit of a logit, of which bfloat16 has eight.
    assert difference(found.float(), expected.float()) <= expected.float().abs().max().item() / 64


# The same weights as an independent decoder


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", ["true", "false"])
def test_dequantised_weights_equal_an_independent_decoder_to_the_bit(
    bits: int, symmetric: str, artifact: Artifact
) -> None:
    path = artifact("qwen2", "rtn-g64", f"weights.bits={bits}", f"weights.symmetric={symmetric}")
    tensors, model, layers = (
        decoder.read_file(path / "model.safetensors"),
        load_artifact(path),
        read_manifest(path).layers,
    )
    assert len(layers) == 14
    for layer in layers[:7]:
        found = model.get_submodule(layer.module).weight.numpy()
        expected = decoder.decode(tensors, layer.name, bits, symmetric == "true")
        assert np.array_equal(found, expected), layer.name


@pytest.mark.parametrize("recipe", ["rtn-g64", "rtn-g64-zp"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "gpt2"])
def test_every_architectures_weights_equal_an_independent_decoder_to_the_bit(
    name: str, recipe: str, artifact: Artifact
) -> None:
    path = artifact(name, recipe)
    tensors, model = decoder.read_file(path / "model.safetensors"), load_artifact(path)
    for layer in read_manifest(path).layers:
        found = model.get_submodule(layer.module).weight.numpy()
        expected = decoder.decode(tensors, layer.name, 4, recipe == "rtn-g64")
        assert np.array_equal(found, expected), layer.name


@pytest.mark.parametrize("symmetric", ["true", "false"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_looked_up_rows_equal_an_independent_decoder_to_the_bit(bits: int, symmetric: str, artifact: Artifact) -> None:
    weights = f"{{bits: {bits}, granularity: group, group_size: 32, symmetric: {symmetric}}}"
    settings = (*tabled("qwen2", weights), "format=compressed-tensors-packed")
    path = artifact("qwen2", "rtn-g64", *settings)
    table = load_artifact(path).get_submodule("model.embed_tokens")
    expected = decoder.decode(
        decoder.read_file(path / "model.safetensors"), "model.embed_tokens", bits, symmetric == "true"
    )
    assert np.array_equal(table(IDS).numpy(), expected[IDS.numpy()])
    assert np.array_equal(table.weight.numpy(), expected)


# Packed in memory


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-packed"])
def test_an_embedding_stays_packed_and_only_the_rows_that_are_looked_up_are_decoded(
    format: str, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = artifact("llama_untied", "rtn-g64", *tabled("llama_untied"), f"format={format}")
    table = load_artifact(path).get_submodule("model.embed_tokens")
    record = next(layer for layer in read_manifest(path).layers if layer.module == "model.embed_tokens")
    assert isinstance(table, PackedEmbedding)
    assert (table.num_embeddings, table.embedding_dim) == tuple(record.shape)
    assert not list(table.parameters())
    assert sum(tensor.nbytes for tensor in table.buffers()) == record.bytes
    whole, decoded = table.weight, []
    monkeypatch.setattr(
        "quantkit.evaluate.loader.dequantize",
        lambda tensor, *arguments: decoded.append(tensor.shape) or dequantize(tensor, *arguments),
    )
    for ids in (torch.tensor([[7, 255, 7]]), torch.tensor(3), torch.empty(2, 0, dtype=torch.int64)):
        decoded.clear()
        assert torch.equal(table(ids), torch.nn.functional.embedding(ids, whole))
        assert decoded == [(ids.numel(), 64)]
    for outside in (-1, 256):
        with pytest.raises(IndexError):
            table(torch.tensor([outside]))


@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral"])
def test_quantised_weights_stay_packed_before_and_after_a_forward(name: str, artifact: Artifact) -> None:
    path = artifact(name, "rtn-g64-zp")
    manifest, model = read_manifest(path), load_artifact(path)
    modules = {layer.module: layer for layer in manifest.layers}
    for _ in range(2):
        packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}
        assert packed.keys() == modules.keys()
        for module_name, module in packed.items():
            assert "weight" not in dict(module.named_parameters()) | dict(module.named_buffers())
            held = sum(tensor.nbytes for tensor in module.buffers())
            assert held == modules[module_name].bytes
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == manifest.totals.parameters - manifest.totals.quantised_parameters
        logits(model)


@pytest.fixture
def no_reference_decoder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every entry point of the format's own library raises, and says that it was called."""
    import compressed_tensors

    called: list[str] = []

    def forbid(owner: Any, name: str) -> None:
        def raising(*_: Any, **__: Any) -> None:
            called.append(name)
            raise AssertionError(f"{name} was called")

        monkeypatch.setattr(owner, name, raising)

    for compressor in [v for v in vars(reference).values() if isinstance(v, type)]:
        for name in [n for n in vars(compressor) if n.startswith(("compress", "decompress", "unpack", "from_pre"))]:
            forbid(compressor, name)
    for name in ("from_pretrained_model", "from_compression_config", "decompress_model", "decompress"):
        if hasattr(compressed_tensors.ModelCompressor, name):
            forbid(compressed_tensors.ModelCompressor, name)
    return called


def test_the_reference_decoder_is_never_called(artifact: Artifact, no_reference_decoder: list[str]) -> None:
    path = artifact("llama", "rtn-g64")
    assert torch.isfinite(logits(load_artifact(path))).all()
    assert no_reference_decoder == []
    with pytest.raises(AssertionError, match="was called"):  # the trap works: transformers does call it
        logits(AutoModelForCausalLM.from_pretrained(path))


def test_the_artifact_loads_where_the_reference_library_cannot_be_imported(artifact: Artifact) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['compressed_tensors'] = None\n"
        "import torch\nfrom quantkit.evaluate.loader import load_artifact\n"
        "print(bool(torch.isfinite(load_artifact(sys.argv[1])(torch.arange(3, 9)[None]).logits).all()))"
    )
    command = [sys.executable, "-c", code, str(artifact("llama", "rtn-g64"))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.stdout.strip() == "True", found.stderr


# Use of the model


@pytest.mark.parametrize("name", ["llama", "gemma3", "neox"])
def test_generate_works_and_is_that_of_transformers(name: str, artifact: Artifact) -> None:
    path = artifact(name, "rtn-g64")
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    found = load_artifact(path).generate(IDS, **settings)
    assert found.shape == (2, 32)
    assert torch.equal(found, load_reference(path).generate(IDS, **settings))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_checkpoints_give_exactly_the_logits_of_transformers(name: str, zoo: Zoo) -> None:
    found = logits(load_checkpoint(open_checkpoint(str(zoo(name)))))
    assert torch.equal(found, logits(AutoModelForCausalLM.from_pretrained(zoo(name))))


def test_tied_embeddings_are_one_tensor_and_untied_ones_are_two(artifact: Artifact) -> None:
    tied, untied = (load_artifact(artifact(name, "rtn-g64")) for name in ("llama", "llama_untied"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


def test_no_parameter_asks_for_gradients_and_the_model_is_in_eval_mode(artifact: Artifact) -> None:
    model = load_artifact(artifact("llama", "rtn-g64"))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not any(module.training for module in model.modules())


def test_the_loader_leaves_the_callers_random_state_and_default_dtype_alone(artifact: Artifact) -> None:
    before = torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.is_grad_enabled()
    load_artifact(artifact("llama", "rtn-g64"), dtype=torch.bfloat16)
    assert (torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.is_grad_enabled()) == before


def test_an_artifact_is_told_from_a_checkpoint_by_its_manifest(artifact: Artifact, zoo: Zoo) -> None:
    assert is_artifact(artifact("llama", "rtn-g64"))
    assert not is_artifact(zoo("llama"))
    assert not is_artifact("org/name")


# What is refused


def tampered(path: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(path, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


LAYER = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("part", ["weight", "weight_scale"])
@pytest.mark.parametrize("how", ["shorter", "missing"])
def test_a_tensor_of_an_embedding_that_does_not_fit_is_refused_by_name(
    part: str, how: str, artifact: Artifact, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(f"model.embed_tokens.{part}")
        if how == "shorter":
            tensors[f"model.embed_tokens.{part}"] = tensor[:-1].clone()

    path = tampered(artifact("llama_untied", "rtn-g64", *tabled("llama_untied")), tmp_path / "out", change)
    with pytest.raises(ArtifactError, match=f"model.embed_tokens.{part}"):
        load_artifact(path)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_zero_point", "weight_shape"])
@pytest.mark.parametrize("how", ["shorter", "missing", "dtype"])
def test_a_packed_tensor_that_does_not_fit_is_refused_by_name(
    part: str, how: str, artifact: Artifact, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop(f"{LAYER}.{part}")
        if how == "shorter":
            tensors[f"{LAYER}.{part}"] = tensor[:-1].clone()
        elif how == "dtype":
            tensors[f"{LAYER}.{part}"] = tensor.to(torch.float32)

    path = tampered(artifact("llama", "rtn-g64-zp"), tmp_path / "out", change)
    with pytest.raises(ArtifactError, match=f"{LAYER}.{part}"):
        load_artifact(path)


def test_a_shape_record_of_another_shape_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{LAYER}.weight_shape"] = torch.tensor([64, 128])

    path = tampered(artifact("llama", "rtn-g64"), tmp_path / "out", change)
    with pytest.raises(ArtifactError):
        logits(load_artifact(path))


@pytest.mark.parametrize("how", ["shorter", "missing"])
def test_a_kept_tensor_that_does_not_fit_is_refused_by_name(how: str, artifact: Artifact, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors.pop("model.norm.weight")
        if how == "shorter":
            tensors["model.norm.weight"] = tensor[:-1].clone()

    path = tampered(artifact("llama", "rtn-g64"), tmp_path / "out", change)
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        load_artifact(path)


def test_a_truncated_weight_file_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    path = shutil.copytree(artifact("llama", "rtn-g64"), tmp_path / "out")
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        load_artifact(path)


def test_a_directory_without_manifest_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json does not exist"):
        load_artifact(zoo("llama"))


def test_an_unknown_arithmetic_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ValueError, match="exact"):
        load_artifact(artifact("llama", "rtn-g64"), arithmetic="fast")


def test_a_config_of_another_model_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    path = shutil.copytree(artifact("llama", "rtn-g64"), tmp_path / "out")
    config = json.loads((path / "config.json").read_bytes())
    config["vocab_size"] = 128
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantkitError, match="embed_tokens"):
        load_artifact(path)


def test_weights_that_are_kept_change_nothing_and_stay_within_their_room(artifact: Artifact) -> None:
    path = artifact("llama", "rtn-g64")
    expected = logits(load_artifact(path))
    for keep in (0, 20_000, 1 << 30):
        model = load_artifact(path, keep=keep)
        assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), expected)
        layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
        kept = [layer._unpacked.nbytes for layer in layers if layer._unpacked is not None]
        assert sum(kept) <= keep
        assert bool(kept) == (keep > 0)
    assert len(kept) == len(layers)


@pytest.mark.parametrize("module", ["os.system", "..", "a/../../b", "model.layers.99.mlp.up_proj", "forward", ""])
def test_a_manifest_that_names_no_layer_of_the_model_is_refused(
    module: str, artifact: Artifact, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(artifact("llama", "rtn-g64"), tmp_path / "changed"))
    values = json.loads((path / "manifest.json").read_bytes())
    values["layers"][0]["module"] = module
    (path / "manifest.json").write_bytes(canonical_json(values))
    with pytest.raises(ArtifactError, match="is no such layer"):
        load_artifact(path)
