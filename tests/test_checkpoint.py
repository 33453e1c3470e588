"""Opening checkpoints: every container that is taken, and every broken or hostile one that is not."""

import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import safetensors.torch
import torch
from transformers import AutoConfig, dynamic_module_utils
from transformers.utils import logging as transformers_logging

from quantkit.checkpoint import Checkpoint, cache_dir, config_values, open_checkpoint, quiet_transformers
from quantkit.errors import CheckpointError
from quantkit.tensorfile import read_tensor
from tests.zoo import CHAT_TEMPLATE

Zoo = Callable[[str], Path]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def model(zoo: Zoo, tmp_path: Path) -> Path:
    """A copy of the tiny tied model, to damage."""
    return Path(shutil.copytree(zoo("llama"), tmp_path / "tiny"))


@pytest.fixture
def sharded(model: Path) -> Path:
    """The same in two files with an index."""
    tensors = safetensors.torch.load_file(model / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:7], "model-00002-of-00002.safetensors": names[7:]}
    for shard, members in parts.items():
        safetensors.torch.save_file({n: tensors[n] for n in members}, model / shard, {"format": "pt"})
    (model / WEIGHTS).unlink()
    write_index(model, {n: shard for shard, members in parts.items() for n in members})
    return model


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def weight_map(directory: Path) -> dict[str, str]:
    values: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return values


def refused(directory: Path | str, *words: str, trust: bool = False) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(directory), trust_remote_code=trust)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_a_single_file_is_opened_without_reading_its_tensors(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    expected = safetensors.torch.load_file(model / WEIGHTS)
    assert checkpoint.name == "tiny"
    assert checkpoint.revision is None
    assert checkpoint.origin == str(model.resolve())
    assert checkpoint.dtype == torch.float32
    assert checkpoint.weight_files == [model / WEIGHTS]
    assert set(checkpoint.entries) == set(expected)
    assert all(torch.equal(read_tensor(checkpoint.entries[name]), expected[name]) for name in expected)


def test_shards_give_the_tensors_of_the_single_file(zoo: Zoo, sharded: Path) -> None:
    whole, parts = open_checkpoint(str(zoo("llama"))), open_checkpoint(str(sharded))
    assert len(parts.weight_files) == 2
    assert set(parts.entries) == set(whole.entries)
    for name, entry in whole.entries.items():
        assert torch.equal(read_tensor(parts.entries[name]), read_tensor(entry))


def test_the_order_of_the_index_does_not_matter(sharded: Path) -> None:
    before = list(open_checkpoint(str(sharded)).entries)
    write_index(sharded, dict(reversed(weight_map(sharded).items())))
    assert list(open_checkpoint(str(sharded)).entries) == before


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors is named in model.safetensors.index.json and is missing")


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 4)
    refused(sharded, str(shard), "truncated")


@pytest.mark.parametrize(
    "target",
    [
        "../tiny-outside.safetensors",
        "/etc/outside.safetensors",
        "sub/model.safetensors",
        "./model-00001-of-00002.safetensors",
        "..",
        "",
        "pytorch_model.bin",
        "config.json",
        7,
        None,
        ["model-00001-of-00002.safetensors"],
        {"file": "model-00001-of-00002.safetensors"},
    ],
    ids=str,
)
def test_an_index_that_points_anywhere_but_to_a_shard_beside_it_is_refused(sharded: Path, target: Any) -> None:
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded.parent / "tiny-outside.safetensors")
    (sharded / "sub").mkdir()
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / "sub" / "model.safetensors")
    entries: dict[str, Any] = {**weight_map(sharded), "model.norm.weight": target}
    write_index(sharded, entries)
    refused(sharded, INDEX, "tensor 'model.norm.weight' points to", "do not use this index")


@pytest.mark.parametrize("target", ["a\0b.safetensors", "x" * 300 + ".safetensors", "\ud800.safetensors"])
def test_a_shard_name_that_no_file_can_have_is_a_missing_shard(sharded: Path, target: str) -> None:
    write_index(sharded, dict.fromkeys(weight_map(sharded), target))
    refused(sharded, "is missing")


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(second)
    name, tensor = next(iter(safetensors.torch.load_file(first).items()))
    safetensors.torch.save_file({**tensors, name: tensor}, second)
    refused(sharded, second.name, f"tensor {name!r} is also in {first.name}")


def test_a_tensor_that_the_index_does_not_name_is_refused(sharded: Path) -> None:
    shard = min(sharded.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(shard)
    safetensors.torch.save_file({**tensors, "stray": torch.zeros(1)}, shard)
    refused(sharded, shard.name, "tensor 'stray' is not in model.safetensors.index.json for this shard")


def test_a_tensor_that_no_shard_holds_is_named_with_its_shard(sharded: Path) -> None:
    write_index(sharded, {**weight_map(sharded), "ghost": "model-00001-of-00002.safetensors"})
    refused(sharded, "model-00001-of-00002.safetensors: tensor 'ghost' is in", "not in the shard")


def test_a_tensor_that_the_index_looks_for_in_another_shard_is_refused(sharded: Path) -> None:
    changed = weight_map(sharded)
    first, second = sorted(set(changed.values()))
    name = next(name for name, shard in changed.items() if shard == first)
    write_index(sharded, {**changed, name: second})
    refused(sharded, first, f"tensor {name!r} is not in {INDEX} for this shard")


@pytest.mark.parametrize("value", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '"text"', "null"])
def test_an_index_without_a_map_is_refused(sharded: Path, value: str) -> None:
    (sharded / INDEX).write_text(value)
    refused(sharded, INDEX, "no weight_map")


@pytest.mark.parametrize("value", ["{", "", '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'])
def test_an_index_that_is_not_readable_json_is_refused(sharded: Path, value: str) -> None:
    (sharded / INDEX).write_text(value)
    refused(sharded, INDEX, "not readable JSON")


def test_a_single_file_beside_an_index_is_ambiguous(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / WEIGHTS)
    refused(sharded, "holds both", "remove the one that is stale")


def test_a_file_without_tensors_is_refused(model: Path) -> None:
    safetensors.torch.save_file({}, model / WEIGHTS)
    refused(model, WEIGHTS, "holds no tensor")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickle_weights_are_refused_with_the_command_that_converts_them(model: Path, name: str) -> None:
    (model / WEIGHTS).rename(model / name)
    error = refused(model, f"only pickle weights ({name})", "run code when read")
    assert "python -c" in error.action
    command = shlex.split(error.action.partition("trust them: ")[2])
    assert command[:2] == ["python", "-c"]
    assert f'save_pretrained("{model}-safetensors")' in command[2]
    compile(command[2], "command", "exec")


def test_a_pickle_beside_safetensors_is_neither_read_nor_copied(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"not a pickle")
    checkpoint = open_checkpoint(str(model))
    assert "pytorch_model.bin" in checkpoint.skipped
    assert "pytorch_model.bin" not in checkpoint.side_files


def test_a_directory_without_weights_is_refused(model: Path) -> None:
    (model / WEIGHTS).unlink()
    refused(model, "holds no model.safetensors and no model.safetensors.index.json")


def test_a_missing_config_is_refused(model: Path) -> None:
    (model / "config.json").unlink()
    refused(model, "config.json does not exist")


@pytest.mark.parametrize("text", ["[]", '"llama"', "3", "null"])
def test_a_config_that_is_not_an_object_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refused(model, "config.json does not hold a JSON object")


@pytest.mark.parametrize("text", ["{", "", "\x00", '{"model_type": "llama", "model_type": "gpt2"}'])
def test_a_config_that_is_not_json_is_refused(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refused(model, "config.json is not readable JSON")


@pytest.mark.parametrize("values", [{}, {"model_type": "no_such_model"}, {"model_type": 3}])
def test_a_config_that_names_no_known_model_is_refused(model: Path, values: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(values))
    refused(model, "config.json is not usable")


def test_config_values_are_those_of_the_file(model: Path) -> None:
    assert config_values(model) == json.loads((model / "config.json").read_text())


def test_a_config_without_a_dtype_takes_that_of_the_largest_tensor(model: Path) -> None:
    values = config_values(model)
    del values["dtype"]
    (model / "config.json").write_text(json.dumps(values))
    tensors = {name: t.bfloat16() for name, t in safetensors.torch.load_file(model / WEIGHTS).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    safetensors.torch.save_file(tensors, model / WEIGHTS)
    assert open_checkpoint(str(model)).dtype == torch.bfloat16


@pytest.fixture
def with_code(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A model of a type of its own, whose Python file leaves a marker where it is run."""
    marker = tmp_path / "marker"
    (model / "own_code.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        f"Path({str(marker)!r}).write_text('ran')\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_type'\n"
    )
    values = {**config_values(model), "model_type": "own_type", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield model
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_code_beside_the_weights_does_not_run_and_the_error_names_the_flag(with_code: Path, tmp_path: Path) -> None:
    error = refused(with_code, "config.json is not usable")
    assert "--trust-remote-code" in error.action
    assert not (tmp_path / "marker").exists()


def test_the_same_code_runs_where_it_is_trusted(with_code: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(with_code), trust_remote_code=True)
    assert (tmp_path / "marker").read_text() == "ran"
    assert checkpoint.trust_remote_code
    assert checkpoint.config.model_type == "own_type"
    assert "own_code.py" in checkpoint.side_files


def test_code_that_replaces_a_known_model_does_not_run(with_code: Path, tmp_path: Path) -> None:
    (with_code / "config.json").write_text(json.dumps({**config_values(with_code), "model_type": "llama"}))
    assert type(open_checkpoint(str(with_code)).config).__module__.startswith("transformers.models.")
    assert not (tmp_path / "marker").exists()


def test_code_of_a_tokenizer_does_not_run(with_code: Path, tmp_path: Path) -> None:
    (with_code / "config.json").write_text(json.dumps({**config_values(with_code), "model_type": "llama"}))
    path = with_code / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own_code.OwnTokenizer", None]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    checkpoint = open_checkpoint(str(with_code))
    with contextlib.suppress(CheckpointError):  # a library may also fall back to a class of its own
        checkpoint.tokenizer()
    assert not (tmp_path / "marker").exists()


def test_the_tokenizer_is_that_of_the_directory(model: Path) -> None:
    tokenizer = open_checkpoint(str(model)).tokenizer()
    text = "Größe 压力\n"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_a_missing_tokenizer_is_an_error_only_when_it_is_asked_for(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    checkpoint = open_checkpoint(str(model))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        checkpoint.tokenizer()


def test_side_files_are_what_is_neither_weights_nor_written_by_us(model: Path) -> None:
    for name in (
        "manifest.json",
        "run.json",
        ".gitattributes",
        "own.py",
        "notes.md",
        "model.gguf",
        "extra.safetensors",
    ):
        (model / name).write_text("x")
    for folder in ("additional_chat_templates", "onnx", "original"):
        (model / folder).mkdir()
        (model / folder / "tool.jinja").write_text("x")
    checkpoint = open_checkpoint(str(model))
    assert checkpoint.side_files == [
        "LICENSE",
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "notes.md",
        "own.py",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert checkpoint.skipped == {
        "extra.safetensors": "weights that the checkpoint's index does not name",
        "model.gguf": "weights that the checkpoint's index does not name",
        "onnx/": "a folder",
        "original/": "a folder",
    }


def test_links_of_the_hubs_cache_are_taken_and_broken_links_are_errors(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "snapshots" / "c0ffee"
    snapshot.parent.mkdir(parents=True)
    model.rename(snapshot)
    blob = tmp_path / "hub" / "blobs" / "abc"
    blob.parent.mkdir()
    (snapshot / "LICENSE").rename(blob)
    (snapshot / "LICENSE").symlink_to(blob)
    assert "LICENSE" in open_checkpoint(str(snapshot)).side_files
    blob.unlink()
    refused(snapshot, str(snapshot / "LICENSE"), "broken link")


def test_a_link_that_leads_out_of_the_checkpoint_is_not_copied(model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    checkpoint = open_checkpoint(str(model))
    assert "notes.txt" not in checkpoint.side_files
    assert "leads out" in checkpoint.skipped["notes.txt"]


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_a_file_that_is_read_may_not_be_a_link_that_leads_out(model: Path, tmp_path: Path, name: str) -> None:
    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    refused(model, f"{model / name} is a link that leads out of the checkpoint", "copy the file")


def test_a_shard_and_an_index_may_not_be_links_that_lead_out(sharded: Path, tmp_path: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    for path in (shard, sharded / INDEX):
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        refused(sharded, f"{path} is a link that leads out")
        path.unlink()
        (tmp_path / "elsewhere").rename(path)
    assert open_checkpoint(str(sharded)).entries


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads"])
def test_a_config_that_asks_for_more_than_any_model_has_is_refused_at_once(model: Path, key: str) -> None:
    values = config_values(model) | {key: 10**9}
    (model / "config.json").write_text(json.dumps(values))
    refused(model, "config.json", f"{key} is 1e+09")


def test_a_gguf_file_whose_model_would_be_larger_than_its_tensors_is_refused(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "x.gguf", open_checkpoint(str(zoo("llama"))))
    data = (tmp_path / "x.gguf").read_bytes()
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    place = data.index(key) + len(key)
    assert int.from_bytes(data[place : place + 4], "little") == 128
    (tmp_path / "x.gguf").write_bytes(data[:place] + (1 << 30).to_bytes(4, "little") + data[place + 4 :])
    refused(tmp_path / "x.gguf", "its config makes a model of", "its files hold at most")


def test_a_signature_of_the_source_is_not_copied(model: Path) -> None:
    (model / "model.sig").write_text("{}")
    checkpoint = open_checkpoint(str(model))
    assert "model.sig" not in checkpoint.side_files
    assert "signature" in checkpoint.skipped["model.sig"]


def test_a_pipe_in_the_directory_is_refused_instead_of_waited_for(model: Path) -> None:
    os.mkfifo(model / "README.md")
    refused(model, "README.md", "no regular file")


@pytest.mark.parametrize("name", ["./gone", "/gone/model", "~/gone", "gone", "a/b/c"])
def test_a_path_where_nothing_is_does_not_go_to_the_network(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the network was used"))
    refused(name, f"{name} does not exist")


def test_a_file_that_is_no_model_is_refused(model: Path) -> None:
    refused(model / "config.json", "config.json is a file", "give the model directory")


def test_a_hub_id_that_cannot_be_reached_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to host\nand a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    error = refused("org/name", "org/name is neither a local directory nor reachable on the hub", "no route to host")
    assert "second line" not in str(error)


def test_a_hub_id_is_downloaded_at_its_revision_without_pickles(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("org/name@v1.0")
    assert (asked["name"], asked["revision"]) == ("org/name", "v1.0")
    assert {"*.bin", "*.pt", "*.pkl"} <= set(asked["ignore_patterns"])
    assert (checkpoint.name, checkpoint.revision) == ("org/name", "tiny")
    open_checkpoint("org/name")
    assert asked["revision"] is None


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of GGUF files (interleaved rotary pairs)."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, checkpoint: Checkpoint) -> None:
    """The tiny model as a float32 GGUF file, with a byte-level tokenizer of its own."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = checkpoint.tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    tokens[3] = "Hi"  # in place of a byte that no text holds, so that there is something to merge
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["H i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, entry in checkpoint.entries.items():
        tensor = read_tensor(entry)
        if "q_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads)
        elif "k_proj" in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_tensors_and_the_tokenizer_that_went_into_it(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    source = open_checkpoint(str(zoo("llama")))
    write_gguf(tmp_path / "tiny.gguf", source)
    capfd.readouterr()
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert capfd.readouterr() == ("", "")
    assert checkpoint.name == "tiny.gguf"
    assert checkpoint.config.tie_word_embeddings
    assert checkpoint.dtype == torch.float32
    assert set(checkpoint.entries) == set(source.entries)
    for name, entry in source.entries.items():
        assert torch.equal(read_tensor(checkpoint.entries[name]), read_tensor(entry)), name
    assert checkpoint.tokenizer()("Hi!").input_ids[-2:] == [3, ord("!")]
    assert not list((tmp_path / "cache" / "gguf").glob(".partial-*"))


def test_a_gguf_file_is_decoded_once(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, open_checkpoint(str(zoo("llama"))))
    first = open_checkpoint(str(path))
    monkeypatch.setattr("quantkit.checkpoint.load_gguf", lambda _: pytest.fail("decoded again"))
    path.rename(tmp_path / "renamed.gguf")
    assert open_checkpoint(str(tmp_path / "renamed.gguf")).directory == first.directory


@pytest.mark.parametrize("data", [b"", b"GGUF", b"not a model" * 100])
def test_a_file_that_is_not_gguf_is_refused_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(data)
    refused(tmp_path / "x.gguf", "x.gguf is not a GGUF file that can be read")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_the_cache_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("QUANTKIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "quantkit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "quantkit"


def test_quieting_transformers_puts_its_state_back() -> None:
    def state() -> tuple[int, bool]:
        return transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()

    before = state()
    with contextlib.suppress(RuntimeError), quiet_transformers():
        assert state() == (transformers_logging.ERROR, False)
        raise RuntimeError
    assert state() == before


def test_the_config_is_the_one_that_transformers_reads(model: Path) -> None:
    assert open_checkpoint(str(model)).config.to_dict() == AutoConfig.from_pretrained(model).to_dict()
