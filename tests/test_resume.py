"""Conversions that crash anywhere and are resumed: the same bytes, and never half an artifact."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from quantkit import blockwise, pipeline
from quantkit.artifact import verify
from quantkit.calibration import Calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError, NumericsError
from quantkit.journal import JournalWriter
from quantkit.pipeline import Converted, convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.tensorfile import TensorFileWriter, read_header
from quantkit.workspace import Workspace
from tests.crashes import watched

IDS = torch.randint(3, 256, (6, 40), generator=torch.Generator().manual_seed(0))
CALIBRATION = Calibration(IDS, {"set": "random"})
# Every kind of pass: data-free, a quantiser alone, transforms, activations, a refiner with its random numbers.
RECIPES = {
    "rtn-g64-zp": [],
    "gptq-g64": [],
    "awq-gptq-g64": [],
    "smoothquant-w8a8": [],
    "awq-gptq-signround-g64": ["passes=[awq, gptq, {signround: {steps: 4}}]", "weights.bits=3"],
}
Zoo = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _every_step_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are hashed and converted in no time: saving waits for the hash, and for no other reason."""
    monkeypatch.setattr("quantkit.saving._WORTH", 0)
    monkeypatch.setattr(pipeline._Digests, "done", property(lambda self: self.result() is not None))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four blocks: what a block hands to the next has some way to go."""
    directory = tmp_path_factory.mktemp("deep") / "deep"
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def make(source: Path, output: Path, recipe: str, settings: list[str] | None = None, **options: Any) -> Converted:
    plan = make_plan(open_checkpoint(str(source)), load_recipe(recipe, settings or RECIPES.get(recipe)))
    return convert(plan, output, **{"calibration": CALIBRATION if plan.recipe.calibrated else None} | options)


@dataclass(frozen=True)
class Begun:
    """A conversion that was stopped with three of four blocks done, and the identity that it has when it is not."""

    output: Path
    identity: str

    recipe = "awq-gptq-signround-g64"
    shard_bytes = 30_000

    def resume(
        self, source: Path, recipe: str = recipe, settings: list[str] | None = None, **options: Any
    ) -> Converted:
        options = {"shard_bytes": self.shard_bytes, "resume": True} | options
        return make(source, self.output, recipe, [*RECIPES.get(recipe, []), *(settings or [])], **options)


@pytest.fixture(scope="module")
def stopped(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("stopped")
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline._Digests, "done", property(lambda self: self.result() is not None))
        whole = make(deep, folder / "whole", Begun.recipe, shard_bytes=Begun.shard_bytes)
        stopped_after(3, deep, folder / "a", Begun.recipe, patch, shard_bytes=Begun.shard_bytes)
    return Begun(folder / "a", whole.manifest.identity)


@pytest.fixture
def begun(stopped: Begun, tmp_path: Path) -> Begun:
    """A copy that a test may go on with."""
    shutil.copytree(Workspace(stopped.output).root, Workspace(tmp_path / "a").root)
    return Begun(tmp_path / "a", stopped.identity)


def stopped_after(
    blocks: int, source: Path, output: Path, recipe: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """A conversion that an interrupt ends when so many blocks are saved."""
    real = blockwise._statistics
    count = iter(range(blocks + 1))

    def statistics(*arguments: Any) -> Any:
        if next(count) == blocks:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(blockwise, "_statistics", statistics)
    with pytest.raises(KeyboardInterrupt):
        make(source, output, recipe, **options)
    monkeypatch.setattr(blockwise, "_statistics", real)


# Crashes


@pytest.mark.parametrize("recipe", ["rtn-g64-zp", "gptq-g64", "smoothquant-w8a8", "awq-gptq-signround-g64"])
def test_a_crash_at_any_flush_resumes_to_the_same_identity(
    recipe: str, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copies = tmp_path / "disk", tmp_path / "copies"
    folder.mkdir()
    # Nothing is saved before the source is hashed, which on a busy machine may take as long as the conversion.
    monkeypatch.setattr("quantkit.pipeline._Digests.done", property(lambda self: self.result() is not None))
    with watched(folder, copies, monkeypatch) as disk:
        expected = make(deep, folder / "artifact", recipe).manifest.identity
    assert disk.flushes > 15
    blocks = set()
    # Every third of them here, in the order in which they were made; benchmarks/kill_loop.py does more.
    for crash in sorted(copies.iterdir(), key=lambda path: int(path.name.partition("-")[2]))[::3]:
        output = crash / "artifact"
        if output.exists():  # the rename had been made
            assert verify(output) == []
            continue
        journal = Workspace(output).unfinished()
        blocks.add(journal.steps[-1].blocks if journal else None)
        made = make(deep, output, recipe, resume=True)
        assert made.manifest.identity == expected, crash.name
        assert verify(output) == []
        assert os.listdir(crash) == ["artifact"]
    assert blocks == {None, 0} if recipe.startswith("rtn") else len(blocks) >= 3


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "neox", "gpt2"])
def test_other_architectures_resume_to_the_same_identity(
    name: str, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(zoo(name), tmp_path / "whole", "awq-gptq-g64").manifest
    stopped_after(1, zoo(name), tmp_path / "a", "awq-gptq-g64", monkeypatch)
    assert make(zoo(name), tmp_path / "a", "awq-gptq-g64", resume=True).manifest == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_folded_norms_of_narrow_checkpoints_are_read_back_as_they_were(
    dtype: torch.dtype, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "narrow"
    AutoModelForCausalLM.from_pretrained(deep, dtype=dtype).save_pretrained(source)
    expected = make(source, tmp_path / "whole", "awq-gptq-g64").manifest.identity
    stopped_after(3, source, tmp_path / "a", "awq-gptq-g64", monkeypatch)
    assert make(source, tmp_path / "a", "awq-gptq-g64", resume=True).manifest.identity == expected


def test_fold_sites_are_those_of_the_first_block_also_where_it_was_done_before(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a shape that was seen takes over the sites found then: a resumed run must not look elsewhere."""
    real, first = blockwise.discover_fold_sites, []

    def discover(block: Any, run: Any, sample: torch.Tensor) -> Any:
        first.append(sample.clone())
        return real(block, run, sample) if torch.equal(sample, first[0]) else []

    monkeypatch.setattr(blockwise, "discover_fold_sites", discover)
    expected = make(deep, tmp_path / "whole", "awq-gptq-g64").manifest
    stopped_after(2, deep, tmp_path / "a", "awq-gptq-g64", monkeypatch)
    assert make(deep, tmp_path / "a", "awq-gptq-g64", resume=True).manifest == expected
    assert len(first) == 3
    assert len(expected.fold_sites) % 4 == 0


def test_finished_blocks_are_not_quantised_again(deep: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    quantised: list[str] = []
    real = blockwise._quantise
    monkeypatch.setattr(
        blockwise, "_quantise", lambda plan, work, parts: quantised.append(work.name) or real(plan, work, parts)
    )
    made = begun.resume(deep, progress=lambda name, _: told.append(name))
    assert quantised == ["model.layers.3"]
    assert sorted(told) == sorted(set(told)), "a tensor was told twice"
    assert len(told) == len(open_checkpoint(str(deep)).entries)
    assert json.loads((made.path / "run.json").read_bytes())["resumed_after_tensors"] == 27, (
        "7 linears and 2 norms each"
    )


def test_interrupted_again_and_again_it_still_arrives(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(deep, tmp_path / "whole", "awq-gptq-signround-g64").manifest.identity
    real = TensorFileWriter.write
    identity = None
    for _ in range(30):
        count = iter(range(99))

        def write(self: TensorFileWriter, name: str, tensor: torch.Tensor, count: Any = count) -> str:
            if next(count) > 30:
                raise KeyboardInterrupt
            return real(self, name, tensor)

        with monkeypatch.context() as patch:
            patch.setattr(TensorFileWriter, "write", write)
            try:
                identity = make(deep, tmp_path / "a", "awq-gptq-signround-g64", resume=True).manifest.identity
                break
            except KeyboardInterrupt:
                assert not (tmp_path / "a").exists()
    assert identity == expected


# Refusals


def changed_source(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    data = bytearray((target / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (target / "model.safetensors").write_bytes(data)
    return target


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("setting", "recipe.weights.bits was 3 and is 4"),
        ("recipe", "recipe.name was awq-gptq-signround-g64 and is awq-gptq-g64"),
        ("source", "source.files.model.safetensors was "),
        ("source name", "source.name was deep and is moved"),
        ("calibration", "calibration.tokens_sha256 was "),
        ("quantkit", "version.quantkit was "),
        ("torch", "version.torch was "),
        ("threads", "machine.threads was 1 and is 2"),
        ("shard size", "shard_size was 30000 and is 40000"),
    ],
)
def test_another_run_is_refused_by_what_differs_and_what_is_kept_is_not_touched(
    change: str, named: str, deep: Path, begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, options = deep, {}
    if change == "setting":
        options["settings"] = ["weights.bits=4"]
    elif change == "recipe":
        options["recipe"] = "awq-gptq-g64"
    elif change == "source":
        source = changed_source(deep, tmp_path / "other" / "deep")
    elif change == "source name":
        source = shutil.copytree(deep, tmp_path / "moved")
    elif change == "calibration":
        options["calibration"] = Calibration(IDS.flip(0), {"set": "random"})
    elif change == "threads":
        torch.set_num_threads(2)  # the autouse fixture puts the number back
    elif change == "shard size":
        options["shard_bytes"] = 40_000
    else:
        real = pipeline.version
        monkeypatch.setattr(pipeline, "version", lambda name: "9.9" if name == change else real(name))
    root = Workspace(begun.output).root
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ArtifactError, match=r"is another one: ") as caught:
        begun.resume(source, **options)
    assert str(root) in caught.value.problem
    assert named in caught.value.problem
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert not begun.output.exists()


def test_steps_of_another_version_are_refused_by_the_version_and_not_thrown_away(deep: Path, tmp_path: Path) -> None:
    work = Workspace(tmp_path / "a")
    work.directory.mkdir(parents=True)
    writer = JournalWriter.create(work.journal_path, {"version": {"quantkit": "0.0.7"}})
    writer._append("step", {"chapters": 3})
    writer.close()
    assert work.progress == f"0 tensors are done and kept in {work.root}"
    with pytest.raises(ArtifactError, match=r"version\.quantkit was 0\.0\.7 and is"):
        make(deep, tmp_path / "a", "rtn-g64", resume=True)
    assert work.unfinished() is not None


def test_threads_do_not_matter_to_a_recipe_without_data(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(deep, tmp_path / "whole", "rtn-g64").manifest.identity
    stop_at_tensor(20, deep, tmp_path / "a", monkeypatch)
    torch.set_num_threads(2)
    assert make(deep, tmp_path / "a", "rtn-g64", resume=True).manifest.identity == expected


def stop_at_tensor(number: int, source: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-free conversion that an interrupt ends after so many tensors."""
    real, count = TensorFileWriter.write, iter(range(99))

    def write(self: TensorFileWriter, name: str, tensor: torch.Tensor) -> str:
        if next(count) == number:
            raise KeyboardInterrupt
        return real(self, name, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        make(source, output, "rtn-g64")
    monkeypatch.setattr(TensorFileWriter, "write", real)


def test_without_resume_what_is_kept_is_in_the_way_and_not_touched(deep: Path, begun: Begun) -> None:
    with pytest.raises(ArtifactError, match=r"unfinished conversion .*; pass --resume"):
        begun.resume(deep, resume=False)
    assert Workspace(begun.output).unfinished() is not None


def test_resume_with_nothing_to_resume_is_a_conversion(deep: Path, tmp_path: Path) -> None:
    expected = make(deep, tmp_path / "whole", "rtn-g64").manifest.identity
    assert make(deep, tmp_path / "a", "rtn-g64", resume=True).manifest.identity == expected
    with pytest.raises(ArtifactError, match="exists"):
        make(deep, tmp_path / "a", "rtn-g64", resume=True)


def test_a_run_that_cannot_end_well_keeps_nothing(tmp_path: Path, zoo: Zoo) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 3] = torch.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    folder = tmp_path / "outputs"
    folder.mkdir()
    with pytest.raises(NumericsError, match="down_proj"):
        make(source, folder / "a", "gptq-g64")
    assert list(folder.iterdir()) == []


# Damage


@pytest.mark.parametrize("damage", ["flipped bit", "shorter file", "no file", "torn journal", "stray files"])
def test_what_is_not_as_it_was_saved_is_done_again(
    damage: str, deep: Path, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workspace(begun.output)
    journal = work.unfinished()
    assert journal is not None
    entries = {
        name: entry for path in work.directory.glob("*.safetensors") for name, entry in read_header(path).items()
    }
    place = entries["model.layers.1.mlp.up_proj.weight_packed"]
    if damage == "flipped bit":
        with place.path.open("r+b") as stream:
            stream.seek(place.start)
            byte = stream.read(1)
            stream.seek(place.start)
            stream.write(bytes([byte[0] ^ 4]))
    elif damage == "shorter file":
        os.truncate(place.path, place.stop - 1)
    elif damage == "no file":
        place.path.unlink()
    elif damage == "torn journal":
        os.truncate(work.journal_path, journal.marks[0].end + 99)
    else:
        (work.directory / "manifest.json").write_text("{}")
        (work.directory / "evals").mkdir()
    quantised: list[str] = []
    choose = blockwise._quantise
    monkeypatch.setattr(
        blockwise, "_quantise", lambda plan, work, parts: quantised.append(work.name) or choose(plan, work, parts)
    )
    made = begun.resume(deep)
    assert made.manifest.identity == begun.identity
    assert verify(made.path) == []
    first = {"stray files": 3, "flipped bit": 1, "torn journal": 1}.get(damage)
    assert first is None or quantised == [f"model.layers.{n}" for n in range(first, 4)]


# The disk


def test_a_limit_of_the_system_on_files_is_one_error_and_leaves_other_artifacts_alone(
    deep: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "outputs"
    earlier = make(deep, folder / "earlier", "rtn-g64")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ArtifactError, match=r"a cannot be written: File too large"):
            make(deep, folder / "a", "rtn-g64")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(folder) == ["earlier"]
    assert verify(earlier.path) == []


@pytest.mark.parametrize("recipe", ["rtn-g64-zp", "awq-gptq-g64"])
def test_a_disk_that_is_full_anywhere_is_one_error_and_can_be_resumed_from(
    recipe: str, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(deep, tmp_path / "whole", recipe).manifest.identity
    real = os.fsync
    for room in (1, 9, 16):
        count = iter(range(999))

        def full(descriptor: int, room: int = room, count: Any = count) -> None:
            if next(count) >= room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        output = tmp_path / f"outputs-{room}" / "a"
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ArtifactError, match="the disk is full") as caught:
            make(deep, output, recipe)
        monkeypatch.setattr(os, "fsync", real)
        assert not output.exists()
        assert ("--resume" in caught.value.action) == (Workspace(output).unfinished() is not None)
        assert make(deep, output, recipe, resume=True).manifest.identity == expected
        assert os.listdir(output.parent) == ["a"]
