"""Verification: each missing, changed and extra file is named, and one flipped byte anywhere is found or refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.artifact import (
    CARD_FILE,
    WeightsWriter,
    harmed_artifact,
    record_components,
    seal_run,
    shard,
    tensor_sha256,
    verify,
    weight_layouts,
)
from quantkit.canonical import canonical_json, sha256_bytes
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import ArtifactError
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.tensorfile import TensorSpec, read_header

# One file of each component.
FILES = {
    "model-00002-of-00004.safetensors": "weights",
    "model.safetensors.index.json": "weights",
    "config.json": "config",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "chat_template.jinja": "chat_template",
    "generation_config.json": "generation",
    "LICENSE": "other",
}


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = make_plan(open_checkpoint(str(zoo("llama_untied"))), load_recipe("rtn-g64"))
    output = tmp_path_factory.mktemp("pristine") / "llama-rtn-g64"
    return convert(plan, output, shard_bytes=40_000).path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    """An artifact that a test may damage."""
    return shutil.copytree(pristine, tmp_path / "llama-rtn-g64")


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_an_untouched_copy_verifies(artifact: Path) -> None:
    assert verify(artifact) == []
    assert set(FILES) <= {path.name for path in artifact.iterdir()}


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_with_its_component(name: str, artifact: Path) -> None:
    (artifact / name).unlink()
    assert verify(artifact) == [f"missing: {name} ({FILES[name]})"]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_wherever_it_is(name: str, place: float, artifact: Path) -> None:
    path = artifact / name
    flip(path, int(path.stat().st_size * place))
    assert verify(artifact) == [f"changed: {name} ({FILES[name]})"]


def test_every_single_file_of_the_artifact_is_covered(pristine: Path, artifact: Path) -> None:
    for path in sorted(pristine.iterdir()):
        if path.name == CARD_FILE:  # people may write in it
            continue
        flip(artifact / path.name, 5)
        try:
            found = verify(artifact)
        except ArtifactError as error:
            found = [error.problem]
        assert len(found) == 1, path.name
        assert path.name in found[0]
        shutil.copyfile(path, artifact / path.name)


def test_a_longer_and_a_shorter_file_are_changed_files(artifact: Path) -> None:
    with (artifact / "LICENSE").open("ab") as stream:
        stream.write(b" ")
    (artifact / "config.json").write_bytes((artifact / "config.json").read_bytes()[:-1])
    assert verify(artifact) == ["changed: LICENSE (other)", "changed: config.json (config)"]


@pytest.mark.parametrize(
    "name", ["notes.txt", "model-00005-of-00005.safetensors", "evals/run.sh", "deep/er/file", ".x"]
)
def test_an_extra_file_is_named(name: str, artifact: Path) -> None:
    (artifact / name).parent.mkdir(parents=True, exist_ok=True)
    (artifact / name).write_text("x")
    assert verify(artifact) == [f"extra: {name}"]


def test_several_problems_are_all_named(artifact: Path) -> None:
    (artifact / "LICENSE").unlink()
    flip(artifact / "tokenizer.json", 40)
    (artifact / "new").write_text("")
    assert verify(artifact) == ["missing: LICENSE (other)", "changed: tokenizer.json (tokenizer)", "extra: new"]


@pytest.mark.parametrize(
    "name", ["manifest.json", "README.md", "new/report.json", "evals/gate.xml", "evals/a/../../b.json"]
)
def test_a_place_where_a_new_file_would_harm_an_artifact_is_known(name: str, artifact: Path) -> None:
    assert harmed_artifact(artifact / name) == artifact.resolve()


def test_a_report_harms_no_artifact_and_the_manifest_of_another_program_is_no_artifact(
    artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    for place in (artifact / "evals" / "new" / "a.json", artifact / "evals" / "a.html", tmp_path / "a.json"):
        assert harmed_artifact(place) is None


def test_reports_may_stand_under_evals(artifact: Path) -> None:
    (artifact / "evals").mkdir()
    for name in ("quick.json", "quick.html"):
        (artifact / "evals" / name).write_text("{}")
    assert verify(artifact) == []


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00004.safetensors"])
def test_a_link_in_the_place_of_a_file_is_refused(name: str, artifact: Path, tmp_path: Path) -> None:
    target = (artifact / name).rename(tmp_path / "elsewhere")
    (artifact / name).symlink_to(target)
    assert f"missing: {name} ({FILES[name]})" in verify(artifact)


@pytest.mark.parametrize("name", ["extra", "evals/quick.json"])
def test_an_extra_link_is_named(name: str, artifact: Path) -> None:
    (artifact / "evals").mkdir()
    (artifact / name).symlink_to(artifact / "LICENSE")
    assert verify(artifact) == [f"extra: {name}"]


@pytest.mark.parametrize("name", ["README.md", "model.sig", "run.json", "evals/quick.json"])
def test_what_stands_outside_the_identity_is_no_link_and_no_folder(name: str, artifact: Path, tmp_path: Path) -> None:
    path = artifact / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    (tmp_path / "elsewhere").write_text("{}")
    path.symlink_to(tmp_path / "elsewhere")
    assert f"extra: {name}" in verify(artifact)
    path.unlink()
    os.mkfifo(path)
    assert verify(artifact) == [f"extra: {name}"]


def test_a_linked_folder_is_an_extra_file(artifact: Path, tmp_path: Path) -> None:
    (artifact / "linked").symlink_to(tmp_path)
    assert verify(artifact) == ["extra: linked"]


# The manifest itself


def test_a_manifest_that_is_not_canonical_is_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=2))
    with pytest.raises(ArtifactError, match="not in canonical form"):
        verify(artifact)


@pytest.mark.parametrize("value", [float("nan"), "\ud800"], ids=["nan", "half a pair"])
def test_a_manifest_with_what_canonical_json_cannot_hold_is_refused(value: object, artifact: Path) -> None:
    values = json.loads((artifact / "manifest.json").read_bytes())
    values["recipe"]["description"] = value
    (artifact / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        verify(artifact)


def test_a_manifest_whose_scheme_does_not_fit_its_layer_is_refused(artifact: Path) -> None:
    values = json.loads((artifact / "manifest.json").read_bytes())
    values["layers"][0]["scheme"]["group_size"] = 1 << 40
    (artifact / "manifest.json").write_bytes(canonical_json(values))
    with pytest.raises(ArtifactError, match=r"layers\.0: group size 1099511627776 does not divide"):
        verify(artifact)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../b", "a\0b", ""])
def test_a_manifest_that_names_a_file_outside_is_refused(name: str, artifact: Path) -> None:
    values = json.loads((artifact / "manifest.json").read_bytes())
    values["components"]["other"][0]["name"] = name
    (artifact / "manifest.json").write_bytes(canonical_json(values))
    with pytest.raises(ArtifactError, match=r"components\.other\.0\.name"):
        verify(artifact)


def test_a_manifest_without_its_last_newline_is_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="not in canonical form"):
        verify(artifact)


def test_a_canonical_manifest_with_another_value_is_found_through_the_run_record(artifact: Path) -> None:
    path = artifact / "manifest.json"
    values = json.loads(path.read_bytes())
    values["totals"]["parameters"] += 1
    path.write_bytes(canonical_json(values))
    (problem,) = verify(artifact)
    assert problem.startswith("changed: manifest.json (the run made ")
    assert sha256_bytes(canonical_json(values)) in problem


def test_every_flipped_byte_of_the_manifest_is_found_or_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    original = path.read_bytes()
    for position in range(0, len(original), 97):
        flip(path, position)
        try:
            assert verify(artifact), f"byte {position} was flipped and nothing was said"
        except ArtifactError as error:
            assert str(path) in error.problem  # noqa: PT017 - either outcome is right
        path.write_bytes(original)
    assert verify(artifact) == []


def test_a_run_record_of_another_run_is_found(artifact: Path) -> None:
    run = json.loads((artifact / "run.json").read_bytes())
    run["identity"] = "0" * 64
    del run["sha256"]
    (artifact / "run.json").write_bytes(seal_run(run))
    assert verify(artifact)[0].startswith("changed: manifest.json (the run made 0000")


def test_a_run_record_with_another_value_is_found(artifact: Path) -> None:
    text = (artifact / "run.json").read_text()
    for old, new in (('"threads": ', '"threads": 1'), ('"host"', '"hosT"'), ("\n}", "\n} ")):
        (artifact / "run.json").write_text(text.replace(old, new))
        assert verify(artifact) == ["changed: run.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", "{}"])
def test_an_unreadable_run_record_is_found(content: str, artifact: Path) -> None:
    (artifact / "run.json").write_text(content)
    assert len(verify(artifact)) == 1


def test_an_artifact_without_run_record_still_verifies(artifact: Path) -> None:
    (artifact / "run.json").unlink()
    assert verify(artifact) == []


@pytest.mark.parametrize("content", [None, "", "[1]", "{}", '{"schema_version":1,"schema_version":1}'])
def test_a_directory_without_a_usable_manifest_is_refused(content: str | None, artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        verify(artifact)


def test_a_manifest_of_another_schema_version_is_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    values = json.loads(path.read_bytes())
    for version in (1, 3):
        path.write_bytes(canonical_json(values | {"schema_version": version}))
        with pytest.raises(ArtifactError, match=f"schema_version {version}, this quantkit reads 2; convert the source"):
            verify(artifact)


@pytest.mark.parametrize("component", ["weights", "scheme", "chat_template", "other"])
def test_a_component_hash_that_is_not_that_of_its_files_is_found_without_a_run_record(
    component: str, artifact: Path
) -> None:
    (artifact / "run.json").unlink()
    path = artifact / "manifest.json"
    values = json.loads(path.read_bytes())
    values["component_sha256"][component] = "0" * 64
    path.write_bytes(canonical_json(values))
    assert verify(artifact) == [
        f"changed: manifest.json (its hash of the component {component} is not that of the files)"
    ]


def test_a_manifest_that_lacks_a_component_is_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    values = json.loads(path.read_bytes())
    for key in ("components", "component_sha256"):
        kept = {name: value for name, value in values[key].items() if name != "generation"}
        path.write_bytes(canonical_json(values | {key: kept}))
        with pytest.raises(ArtifactError, match=f"{key}: no generation"):
            verify(artifact)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a directory"):
        verify(tmp_path / "nothing")


def test_the_identity_is_the_hash_of_the_manifest_file(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    assert manifest.identity == sha256_bytes((artifact / "manifest.json").read_bytes())
    assert manifest.identity == json.loads((artifact / "run.json").read_bytes())["identity"]


def test_the_manifest_holds_no_time_host_or_path(artifact: Path, pristine: Path) -> None:
    run = json.loads((artifact / "run.json").read_bytes())
    text = (artifact / "manifest.json").read_text()
    for name in ("started", "host", "source_path", "platform"):
        assert f'"{name}"' not in text
    for value in (run["started"], run["source_path"], str(pristine)):
        assert value not in text


def test_components_list_each_file_once_and_empty_ones_are_there(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("model.safetensors", "additional_chat_templates/tool.jinja", "modeling_own.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "SYSTEM_PROMPT.txt").write_text("Be brief.")
    found = {component: [r.name for r in records] for component, records in record_components(tmp_path).items()}
    assert found == {
        "weights": ["model.safetensors"], "config": [], "tokenizer": [], "generation": [], "scheme": [],
        "system_prompt": ["SYSTEM_PROMPT.txt"],
        "chat_template": ["additional_chat_templates/tool.jinja"], "other": ["modeling_own.py"],
    }  # fmt: skip


# Weight files


def test_shards_keep_the_order_and_the_limit_and_give_large_tensors_a_file_of_their_own() -> None:
    sizes = [3, 3, 10, 1, 1, 1, 9]
    specs = [TensorSpec(str(n), torch.uint8, (size,)) for n, size in enumerate(sizes)]
    assert [[spec.nbytes for spec in part] for part in shard(specs, 6)] == [[3, 3], [10], [1, 1, 1], [9]]


def test_weight_files_can_be_gone_on_with_and_are_those_of_one_go(tmp_path: Path) -> None:
    tensors = {str(n): torch.arange(3 + n, dtype=torch.int32) for n in range(5)}
    specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for folder, split in (("whole", 5), ("parts", 2)):
        (tmp_path / folder).mkdir()
        done: list[str] = []
        for names in (list(tensors)[:split], list(tensors)[split:]):
            writer = WeightsWriter(tmp_path / folder, specs, 32, done)
            for name in names:
                writer.write(name, tensors[name])
            done += names
            if len(done) == len(tensors):
                writer.close()
                break
            writer.flush()
            writer.abort()
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(files) == 5, "four shards and their index"
    assert all((tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes() for name in files)


def test_written_tensors_are_read_back_and_known_by_their_hash(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2, 3)), TensorSpec("b", torch.uint8, (5,))]
    writer = WeightsWriter(tmp_path, specs, 99)
    tensor = torch.randn(2, 3)
    found = writer.write("a", tensor)
    other = writer.write_chunks("b", iter([torch.zeros(2, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)]))
    writer.close()
    assert torch.equal(writer.read("a"), tensor)
    entries = weight_layouts(tmp_path, specs, 99)["model.safetensors"].entries
    assert [tensor_sha256(entries[name]) for name in "ab"] == [found, other]
    assert found == sha256_bytes(tensor.numpy().tobytes())
    flip(tmp_path / "model.safetensors", entries["a"].start + 9)
    assert tensor_sha256(entries["a"]) != found
    (tmp_path / "model.safetensors").unlink()
    assert tensor_sha256(entries["b"]) is None


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-packed"])
def test_a_flipped_bit_of_a_quantised_embedding_is_found(
    format: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    override = "overrides=[{match: model.embed_tokens, weights: {bits: 8, granularity: channel}}]"
    plan = make_plan(open_checkpoint(str(zoo("llama_untied"))), load_recipe("rtn-g64", [override, f"format={format}"]))
    path = convert(plan, tmp_path / "out").path
    assert verify(path) == []
    entries = read_header(path / "model.safetensors")
    codes = next(
        entry for name, entry in entries.items() if name.startswith("model.embed_tokens") and entry.numel > 999
    )
    flip(path / "model.safetensors", codes.start + 5)
    assert verify(path) == ["changed: model.safetensors (weights)"]
