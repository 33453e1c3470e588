"""The conversion as a whole: every tensor accounted for, the same bytes again, and no half artifact for any reason."""

import errno
import fcntl
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from quantkit import pipeline
from quantkit.affine import dequantize
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.artifact import verify
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError, CheckpointError, NumericsError, QuantkitError
from quantkit.pipeline import Converted, convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.sink import rounding_error
from quantkit.tensorfile import read_header
from quantkit.types import QuantScheme
from quantkit.workspace import Workspace
from tests.zoo import ARCHITECTURES

RECIPES = ["rtn-g64", "rtn-g64-zp"]
# Linears in all blocks of each tiny model: fused projections count once, Conv1D and fused experts are kept.
_SEPARATE = dict.fromkeys(("llama", "llama_untied", "qwen2", "gemma3"), 14)
LINEARS = {**_SEPARATE, "gpt2": 0, "phi3": 8, "neox": 8, "bloom": 16, "mixtral": 8}
# Relative error of a number that is rounded to six digits, at worst, and of float32 differences.
SIX_DIGITS = 6e-6
QUANTISED, KEPT = "model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"

Zoo = Callable[[str], Path]


def make(
    source: Path, output: Path, recipe: str = "rtn-g64", settings: tuple[str, ...] = (), **options: Any
) -> Converted:
    plan = make_plan(open_checkpoint(str(source)), load_recipe(recipe, list(settings)))
    return convert(plan, output, **options)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(directory.glob("*.safetensors")) for name, t in load_file(path).items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def edited(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def artifact(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Converted]:
    """The artifact of an architecture under a recipe, converted once. Tests must not change it."""
    root = tmp_path_factory.mktemp("artifacts")
    made: dict[tuple[str, str], Converted] = {}

    def converted(name: str, recipe: str) -> Converted:
        if (name, recipe) not in made:
            made[name, recipe] = make(zoo(name), root / f"{name}-{recipe}", recipe)
        return made[name, recipe]

    return converted


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block whose matrices are large enough that kernels split them over threads, in groups of 128 too."""
    directory = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where to write, in a folder in which nothing else stands."""
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder / "artifact"


# Every architecture


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_source_tensor_is_quantised_kept_or_dropped_and_nothing_is_invented(
    name: str, recipe: str, zoo: Zoo, artifact: Callable[[str, str], Converted]
) -> None:
    made = artifact(name, recipe)
    source, manifest = tensors_of(zoo(name)), made.manifest
    accounted = [f"{layer.name}.weight" for layer in manifest.layers]
    accounted += [record.name for record in [*manifest.kept, *manifest.dropped]]
    assert sorted(accounted) == sorted(source)
    assert len(manifest.layers) == LINEARS[name]
    parts = ["weight_packed", "weight_scale", "weight_shape"] + ["weight_zero_point"] * recipe.endswith("-zp")
    expected = {record.name for record in manifest.kept}
    expected |= {f"{layer.name}.{part}" for layer in manifest.layers for part in parts}
    assert set(tensors_of(made.path)) == expected


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_artifact_verifies_and_kept_tensors_are_the_source_bytes(
    name: str, recipe: str, zoo: Zoo, artifact: Callable[[str, str], Converted]
) -> None:
    made = artifact(name, recipe)
    assert verify(made.path) == []
    source, stored = tensors_of(zoo(name)), tensors_of(made.path)
    assert made.manifest.kept
    for record in made.manifest.kept:
        assert raw(stored[record.name]) == raw(source[record.name]), record.name
        assert list(stored[record.name].shape) == record.shape
        assert str(stored[record.name].dtype) == f"torch.{record.dtype}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_side_files_are_copied_byte_for_byte_and_config_gains_only_the_quantisation(
    name: str, zoo: Zoo, artifact: Callable[[str, str], Converted]
) -> None:
    made = artifact(name, "rtn-g64").path
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"}
    for file in copied:
        assert (made / file).read_bytes() == (zoo(name) / file).read_bytes(), file
    ours = {"model.safetensors", "config.json", "manifest.json", "run.json", "README.md"}
    assert {path.name for path in made.iterdir()} == copied | ours
    config, source = (json.loads((place / "config.json").read_bytes()) for place in (made, zoo(name)))
    assert ("quantization_config" in config) == (LINEARS[name] > 0)
    config.pop("quantization_config", None)
    assert config == source


def test_everything_the_recipe_could_not_do_is_a_fallback(artifact: Callable[[str, str], Converted]) -> None:
    kinds = {name: [f.kind for f in artifact(name, "rtn-g64").manifest.fallbacks] for name in ARCHITECTURES}
    assert kinds["gpt2"] == ["kept"] * 8, "four Conv1D weights in each of two blocks"
    assert kinds["mixtral"] == ["kept"] * 24, "three matrices of four experts in each of two blocks"
    assert not any(kinds[name] for name in ARCHITECTURES if name not in {"gpt2", "mixtral"})


# The same bytes


def test_two_runs_have_one_identity_whatever_the_output_is_called(wide: Path, tmp_path: Path) -> None:
    first, second = make(wide, tmp_path / "a"), make(wide, tmp_path / "elsewhere" / "b")
    assert first.manifest.identity == second.manifest.identity
    assert (first.path / "model.safetensors").read_bytes() == (second.path / "model.safetensors").read_bytes()
    assert (first.path / "manifest.json").read_bytes() == (second.path / "manifest.json").read_bytes()


@pytest.mark.parametrize("recipe", RECIPES)
def test_identity_does_not_depend_on_the_number_of_threads(recipe: str, wide: Path, tmp_path: Path) -> None:
    identities = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)  # the autouse fixture puts the number back
        identities.add(make(wide, tmp_path / str(threads), recipe).manifest.identity)
    assert len(identities) == 1


def test_identity_changes_with_the_recipe_and_with_one_weight(zoo: Zoo, tmp_path: Path) -> None:
    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUANTISED][0, 0] += 0.5

    other = edited(zoo("llama"), tmp_path / "llama", nudge)
    made = [
        make(zoo("llama"), tmp_path / "a"),
        make(zoo("llama"), tmp_path / "b", settings=("weights.group_size=32",)),
        make(other, tmp_path / "c"),
    ]
    assert len({converted.manifest.identity for converted in made}) == 3


def test_shards_hold_the_tensors_of_the_single_file_and_transformers_loads_them(zoo: Zoo, tmp_path: Path) -> None:
    single, sharded = make(zoo("llama"), tmp_path / "a"), make(zoo("llama"), tmp_path / "b", shard_bytes=40_000)
    shards = sorted(sharded.path.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)
    ]
    assert len(shards) > 2
    index = json.loads((sharded.path / "model.safetensors.index.json").read_bytes())
    for path in shards:
        sizes = [entry.nbytes for entry in read_header(path).values()]
        assert len(sizes) == 1 or sum(sizes) <= 40_000
        assert {index["weight_map"][name] for name in read_header(path)} == {path.name}
    expected, found = tensors_of(single.path), tensors_of(sharded.path)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: raw(t) for name, t in expected.items()}
    assert verify(sharded.path) == []
    ids = torch.arange(12).reshape(1, 12)
    models = [AutoModelForCausalLM.from_pretrained(made.path) for made in (single, sharded)]
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_a_sharded_source_gives_the_tensors_of_the_single_file_source(zoo: Zoo, tmp_path: Path) -> None:
    source = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(zoo("qwen2")).save_pretrained(source, max_shard_size="100KB")
    assert (source / "model.safetensors.index.json").is_file()
    found = tensors_of(make(source, tmp_path / "a").path)
    expected = tensors_of(make(zoo("qwen2"), tmp_path / "b").path)
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: raw(t) for name, t in expected.items()}


# Sizes, from the bytes on disk


@pytest.mark.parametrize(("group", "nominal"), [(128, 4.125), (64, 4.25), (32, 4.5)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bits_per_weight_on_disk_are_the_book_value_and_one_shape_record_a_layer(
    group: int, nominal: float, symmetric: bool, wide: Path, tmp_path: Path
) -> None:
    settings = (f"weights.group_size={group}", f"weights.symmetric={str(symmetric).lower()}")
    made = make(wide, tmp_path / "out", "rtn-g64", settings)
    entries = read_header(made.path / "model.safetensors")
    nominal += 0 if symmetric else 4 / group
    weights = stored = 0
    for layer in made.manifest.layers:
        size = sum(entry.nbytes for name, entry in entries.items() if name.startswith(f"{layer.name}.weight"))
        numel = layer.shape[0] * layer.shape[1]
        assert 8 * size == nominal * numel + 128, layer.name
        assert layer.bytes == size
        weights, stored = weights + numel, stored + size
    totals = made.manifest.totals
    assert totals.bits_per_weight == pytest.approx(8 * stored / weights, abs=1e-6)
    assert totals.bits_per_weight_nominal == nominal
    assert totals.quantised_parameters == weights
    assert totals.weight_bytes == sum(path.stat().st_size for path in made.path.glob("*.safetensors"))
    assert totals.parameters == sum(tensor.numel() for tensor in tensors_of(wide).values())


# Source dtypes


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float64, torch.float16),
        (torch.float32, torch.float16),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_scales_follow_the_source_dtype_and_kept_tensors_keep_theirs(
    dtype: torch.dtype, scales: torch.dtype, zoo: Zoo, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(zoo("llama"), dtype=dtype).save_pretrained(source)
    made = make(source, tmp_path / "out", "rtn-g64-zp")
    assert verify(made.path) == []
    weights, stored = tensors_of(source), tensors_of(made.path)
    assert stored[KEPT].dtype == weights[KEPT].dtype == dtype
    module = QUANTISED.removesuffix(".weight")
    assert stored[f"{module}.weight_scale"].dtype == scales
    # The largest error that is possible is half a step, plus what rounding the scale moved the ends.
    steps = stored[f"{module}.weight_scale"].double().repeat_interleave(64, dim=1)
    layer = next(layer for layer in made.manifest.layers if layer.name == module)
    assert 0 < layer.error.max_abs <= steps.max().item() * (0.5 + 16 * torch.finfo(scales).eps)


def test_a_second_copy_of_tied_embeddings_is_dropped_where_its_bytes_agree(zoo: Zoo, tmp_path: Path) -> None:
    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    made = make(edited(zoo("llama"), tmp_path / "llama", repeat), tmp_path / "out")
    assert [record.name for record in made.manifest.dropped] == ["lm_head.weight"]
    assert "lm_head.weight" not in tensors_of(made.path)
    plain = make(zoo("llama"), tmp_path / "plain")
    assert (made.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()


def test_tied_embeddings_that_differ_are_an_error_naming_both(zoo: Zoo, tmp_path: Path, output: Path) -> None:
    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][7, 7] += 1

    source = edited(zoo("llama"), tmp_path / "llama", differ)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight'"):
        make(source, output)
    assert list(output.parent.iterdir()) == []


# What goes wrong leaves nothing


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", [QUANTISED, KEPT])
def test_a_weight_that_is_not_finite_is_an_error_naming_file_and_tensor(
    tensor: str, value: float, zoo: Zoo, tmp_path: Path, output: Path
) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors[tensor].view(-1)[-1] = value

    source = edited(zoo("llama"), tmp_path / "llama", poison)
    with pytest.raises(NumericsError) as caught:
        make(source, output)
    assert str(source / "model.safetensors") in caught.value.problem
    assert tensor in caught.value.problem
    assert list(output.parent.iterdir()) == []


def test_a_scale_that_overflows_names_the_tensor_and_the_setting(zoo: Zoo, tmp_path: Path, output: Path) -> None:
    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[QUANTISED][0, 0] = 1e30

    source = edited(zoo("llama"), tmp_path / "llama", enlarge)
    with pytest.raises(NumericsError, match=QUANTISED) as caught:
        make(source, output, settings=("weights.scale_dtype=float16",))
    assert "scale_dtype" in caught.value.action
    assert list(output.parent.iterdir()) == []
    assert verify(make(source, output, settings=("weights.scale_dtype=bfloat16",)).path) == []


def test_a_truncated_shard_is_an_error_before_anything_is_written(zoo: Zoo, tmp_path: Path, output: Path) -> None:
    source = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(zoo("llama")).save_pretrained(source, max_shard_size="100KB")
    last = sorted(source.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=last.name):
        make(source, output)
    assert list(output.parent.iterdir()) == []


def test_a_source_that_shrinks_during_the_run_is_an_error_naming_the_tensor(
    zoo: Zoo, tmp_path: Path, output: Path
) -> None:
    source = tmp_path / "llama"
    shutil.copytree(zoo("llama"), source)
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64"))
    os.truncate(source / "model.safetensors", 100_000)
    with pytest.raises(CheckpointError, match="is cut off"):
        convert(plan, output)
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_is_one_error_and_no_artifact_and_can_be_resumed_from(
    code: int, zoo: Zoo, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, pwrite = 0, os.pwrite

    def failing(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        if written > 60_000:
            raise OSError(code, os.strerror(code))
        written += len(data)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(ArtifactError, match=str(output)) as caught:
        make(zoo("llama"), output)
    assert ("the disk is full" in str(caught.value)) == (code != errno.EIO)
    assert written > 60_000
    assert not output.exists()
    assert ("--resume" in caught.value.action) == (Workspace(output).unfinished() is not None)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert verify(make(zoo("llama"), output, resume=True).path) == []
    assert list(output.parent.iterdir()) == [output]


def test_short_writes_are_continued(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, pwrite = make(zoo("llama"), tmp_path / "a").manifest.identity, os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:4999], offset))
    assert make(zoo("llama"), tmp_path / "b").manifest.identity == expected


def test_a_failure_in_the_last_step_keeps_all_that_was_done(
    zoo: Zoo, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pipeline._Digests, "done", property(lambda self: self.result() is not None))
    record = pipeline._run_record
    monkeypatch.setattr(pipeline, "_run_record", refuse)
    with pytest.raises(ArtifactError, match=r"the disk is full.*--resume"):
        make(zoo("llama"), output)
    assert not output.exists()
    monkeypatch.setattr(pipeline, "_run_record", record)
    monkeypatch.setattr("quantkit.pipeline.rtn_quantize", lambda *_: pytest.fail("a layer was quantised again"))
    assert verify(make(zoo("llama"), output, resume=True).path) == []
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_an_existing_output_is_refused_and_left_alone(kind: str, zoo: Zoo, output: Path) -> None:
    if kind == "directory":
        output.mkdir()
    elif kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to(output.parent / "nowhere")
    with pytest.raises(ArtifactError, match="exists"):
        make(zoo("llama"), output)
    assert list(output.parent.iterdir()) == [output]
    assert kind != "file" or output.read_text() == "mine"


def test_too_little_space_is_refused_before_anything_is_written(
    zoo: Zoo, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    usage = shutil.disk_usage(output.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=plan.output_bytes - 1))
    with pytest.raises(ArtifactError, match=r"needs .* GB and .* has .* GB free"):
        convert(plan, output)
    assert list(output.parent.iterdir()) == []


def test_a_second_writer_of_one_output_is_refused(zoo: Zoo, output: Path) -> None:
    lock = output.parent / f".{output.name}.lock"
    with lock.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(ArtifactError, match="another process is writing"):
            make(zoo("llama"), output)
        assert list(output.parent.iterdir()) == [lock]
    make(zoo("llama"), output)
    assert list(output.parent.iterdir()) == [output]


def test_what_a_killed_run_left_is_cleared_away(zoo: Zoo, output: Path) -> None:
    partial = output.parent / f".{output.name}.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray.txt").write_text("old")
    made = make(zoo("llama"), output)
    assert verify(made.path) == []
    assert not (made.path / "stray.txt").exists()
    assert list(output.parent.iterdir()) == [output]


# Errors of rounding, against float64


def textbook_error(weight: torch.Tensor, dequantised: torch.Tensor) -> tuple[float, float]:
    exact, found = weight.double().numpy(), dequantised.double().numpy()
    norm = np.linalg.norm(exact)
    return float(np.linalg.norm(exact - found) / norm) if norm else 0.0, float(np.abs(exact - found).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 96), (1, 32), (301, 1056)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_error_equals_the_float64_definition(
    shape: tuple[int, int], symmetric: bool, dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    quantised = rtn_quantize(weight, QuantScheme(4, "group", 32, symmetric))
    relative, largest = textbook_error(weight, dequantize(quantised))
    found = rounding_error(weight, quantised)
    assert found.relative == pytest.approx(relative, rel=SIX_DIGITS)
    assert found.max_abs == pytest.approx(largest, rel=SIX_DIGITS)
    assert 0.01 < found.relative < 0.5


def test_rounding_error_of_a_zero_weight_is_zero() -> None:
    weight = torch.zeros(3, 64)
    found = rounding_error(weight, rtn_quantize(weight, QuantScheme(4, "group", 32)))
    assert (found.relative, found.max_abs) == (0.0, 0.0)


def test_recorded_errors_are_those_of_the_bytes_on_disk(zoo: Zoo, artifact: Callable[[str, str], Converted]) -> None:
    made = artifact("qwen2", "rtn-g64-zp")
    source, stored = tensors_of(zoo("qwen2")), tensors_of(made.path)
    for layer in made.manifest.layers:
        rows, columns = layer.shape
        nibbles = stored[f"{layer.name}.weight_packed"].numpy().view(np.uint32)[..., None] >> np.arange(0, 32, 4)
        codes = (nibbles & 15).reshape(rows, columns).astype(np.float64)
        zeros = stored[f"{layer.name}.weight_zero_point"].numpy().view(np.uint32)[:, None, :]
        zeros = ((zeros >> np.arange(0, 32, 4)[None, :, None]) & 15).reshape(rows, -1).astype(np.float64)
        scales = stored[f"{layer.name}.weight_scale"].double().numpy()
        width = columns // scales.shape[1]
        decoded = (codes - zeros.repeat(width, 1)) * scales.repeat(width, 1)
        relative, largest = textbook_error(source[f"{layer.name}.weight"], torch.from_numpy(decoded))
        assert layer.error.relative == pytest.approx(relative, rel=SIX_DIGITS)
        assert layer.error.max_abs == pytest.approx(largest, rel=SIX_DIGITS)


# The caller's state


@pytest.fixture
def unusual_settings() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


def global_state() -> list[Any]:
    numbers = np.random.get_state()
    return [
        torch.get_rng_state().tolist(), random.getstate(), numbers[1].tolist(), numbers[2],
        torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), os.getcwd(), dict(os.environ),
    ]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_global_state_is_unchanged(fails: bool, zoo: Zoo, output: Path) -> None:
    if fails:
        output.mkdir()
    before = global_state()
    try:
        make(zoo("llama"), output)
        assert not fails
    except QuantkitError:
        assert fails
    assert global_state() == before


@pytest.mark.usefixtures("unusual_settings")
def test_the_identity_does_not_depend_on_the_callers_default_dtype_or_random_state(
    zoo: Zoo, output: Path, artifact: Callable[[str, str], Converted]
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        found = make(zoo("llama"), output).manifest.identity
    torch.set_default_dtype(torch.float32)
    assert found == artifact("llama", "rtn-g64").manifest.identity


def test_progress_is_told_every_tensor_once_with_its_source_bytes(zoo: Zoo, output: Path) -> None:
    told: list[tuple[str, int]] = []
    make(zoo("llama"), output, progress=lambda name, size: told.append((name, size)))
    assert sorted(told) == sorted((name, tensor.nbytes) for name, tensor in tensors_of(zoo("llama")).items())


def test_the_identity_does_not_depend_on_files_that_the_artifact_does_not(
    zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    first = convert(make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64")), source / "inside").manifest
    second = convert(make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64")), tmp_path / "outside").manifest
    assert first.identity == second.identity


def test_an_unreadable_source_file_is_named(
    zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64"))

    def denied(name: Path, target: Path) -> None:  # noqa: ARG001
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr("quantkit.pipeline.copy_file", denied)
    with pytest.raises(ArtifactError, match=r"Permission denied \(.*source/"):
        convert(plan, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-packed"])
def test_a_quantised_embedding_counts_in_layers_totals_and_specs_and_is_rounded_to_nearest(
    format: str, zoo: Zoo, tmp_path: Path
) -> None:
    weights = "{bits: 8, granularity: group, group_size: 32}"
    settings = (f"overrides=[{{match: model.embed_tokens, weights: {weights}}}]", f"format={format}")
    made = make(zoo("llama_untied"), tmp_path / "out", settings=settings)
    plain = make(zoo("llama_untied"), tmp_path / "plain").manifest
    record = next(layer for layer in made.manifest.layers if layer.name == "model.embed_tokens")
    source, stored = tensors_of(zoo("llama_untied"))["model.embed_tokens.weight"], tensors_of(made.path)
    assert "model.embed_tokens.weight" not in {kept.name for kept in made.manifest.kept}
    assert (record.shape, record.passes, record.scheme.group_size) == (tuple(source.shape), ["rtn"], 32)
    assert record.error == rounding_error(source, rtn_quantize(source, record.scheme.scheme))
    parts = {name: tensor for name, tensor in stored.items() if name.startswith("model.embed_tokens.")}
    assert record.bytes == sum(tensor.nbytes for tensor in parts.values())
    assert made.manifest.totals.quantised_parameters == plain.totals.quantised_parameters + source.numel()
    blocks = plain.totals.bits_per_weight * plain.totals.quantised_parameters
    expected = (blocks + 8 * record.bytes) / made.manifest.totals.quantised_parameters
    assert made.manifest.totals.bits_per_weight == pytest.approx(expected, abs=2e-6)
    assert made.manifest.fallbacks == []
