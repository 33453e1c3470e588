"""diff: which components differ, in words; what the manifests record beside them does not make a difference."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint import open_checkpoint
from quantkit.diff import diff, named_manifest
from quantkit.errors import ArtifactError
from quantkit.manifest import COMPONENTS, Manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

Zoo = Callable[[str], Path]


def made(source: Path, output: Path, recipe: str = "rtn-g64", *settings: str) -> Manifest:
    return convert(make_plan(open_checkpoint(str(source)), load_recipe(recipe, list(settings))), output).manifest


@pytest.fixture(scope="module")
def first(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return made(zoo("llama"), tmp_path_factory.mktemp("diff") / "a")


def differing(a: Manifest, b: Manifest) -> dict[str, list[str]]:
    return {name: part.details for name, part in diff(a, b).components.items() if not part.same}


def test_an_artifact_is_the_same_as_itself(first: Manifest) -> None:
    found = diff(first, first)
    assert found.same
    assert found.record == {}
    assert set(found.components) == set(COMPONENTS)


def test_another_scheme_names_the_layers_and_leaves_the_rest_alone(first: Manifest, zoo: Zoo, tmp_path: Path) -> None:
    override = "overrides=[{match: 're:.*down_proj', weights: {bits: 8, granularity: channel}}]"
    found = differing(first, made(zoo("llama"), tmp_path / "b", "rtn-g64", override))
    assert found == {
        "weights": ["changed: model.safetensors"],
        "scheme": [
            "int4 g64 sym -> int8 channel sym: 2 layers "
            "(model.layers.0.mlp.down_proj, model.layers.1.mlp.down_proj)"
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("chat_template.jinja", "role'] }}: ", "role'] }}> ", {"chat_template", "system_prompt"}),
        ("chat_template.jinja", "\n{% endfor %}", "\n\n{% endfor %}", {"chat_template"}),
        ("generation_config.json", '"eos_token_id": 2', '"eos_token_id": 3', {"generation"}),
        ("LICENSE", "free", "not free", {"other"}),
    ],
)
def test_one_edited_file_of_the_source_is_one_component(
    name: str, old: str, new: str, expected: set[str], first: Manifest, zoo: Zoo, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "llama")
    text = (source / name).read_text()
    assert old in text
    (source / name).write_text(text.replace(old, new))
    found = differing(first, made(source, tmp_path / "b"))
    assert set(found) == expected
    assert f"changed: {name}" in found[min(expected)]


def test_files_of_only_one_side_are_named(first: Manifest, zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "llama")
    (source / "SYSTEM_PROMPT.txt").write_text("Be brief.")
    (source / "LICENSE").unlink()
    found = differing(first, made(source, tmp_path / "b"))
    assert found["other"] == ["only in A: LICENSE"]
    assert found["system_prompt"][0] == "only in B: SYSTEM_PROMPT.txt"


def test_another_record_of_the_same_components_is_no_difference(first: Manifest, zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "another-name")
    found = diff(first, made(source, tmp_path / "b"))
    assert found.same
    assert found.identities[0] != found.identities[1]
    assert found.record == {"source": "name llama -> another-name"}


def test_a_manifest_may_be_named_by_its_own_path(first: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(first.data)
    assert named_manifest(path) == first
    with pytest.raises(ArtifactError, match="is not a directory"):
        named_manifest(tmp_path / "nothing")
    path.write_bytes(json.dumps({"a": 1}).encode())
    with pytest.raises(ArtifactError, match=r"kept\.json"):
        named_manifest(path)
