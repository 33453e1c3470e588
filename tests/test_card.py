"""The model card: what it says, that hostile text stays text, and that nothing of the source's own card is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from quantkit.artifact import verify
from quantkit.canonical import sha256_file
from quantkit.card import (
    NOT_MEASURED,
    QUALITY_END,
    QUALITY_START,
    carried_facts,
    escape_markdown,
    model_card,
    place_of,
    with_quality,
)
from quantkit.checkpoint import open_checkpoint
from quantkit.manifest import Manifest, read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe

SOURCE_CARD = """---
license: other
license_name: tiny-1.0
license_link: https://example.org/tiny
language: [en, zh]
base_model: someone/else
tags: [their-own]
---
# Tiny <b>model</b>
"""
NASTY = "<script>x()</script> | [a](javascript:b) `c` **d** https://e.example <!-- /quantkit:quality -->\n# f"


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(shutil.copytree(zoo("llama"), tmp_path_factory.mktemp("source") / "tiny"))
    (source / "README.md").write_text(SOURCE_CARD)
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64-zp"))
    return convert(plan, tmp_path_factory.mktemp("card") / "artifact").path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


@pytest.fixture
def manifest(artifact: Path) -> Manifest:
    return read_manifest(artifact)


def head(card: str) -> dict[str, Any]:
    value = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(value, dict)
    return value


def test_convert_leaves_a_card_outside_the_identity(artifact: Path, manifest: Manifest) -> None:
    assert "README.md" not in manifest.files
    assert verify(artifact) == []
    (artifact / "README.md").write_text("# mine now\n")
    assert verify(artifact) == []
    (artifact / "README.md").unlink()
    assert verify(artifact) == []
    (artifact / "README.md").symlink_to(artifact / "LICENSE")
    assert verify(artifact) == ["extra: README.md"]


def test_the_card_of_the_source_is_kept_inside_the_identity(artifact: Path, manifest: Manifest) -> None:
    assert (artifact / "source" / "README.md").read_text() == SOURCE_CARD
    assert manifest.files["source/README.md"].sha256 == sha256_file(artifact / "source" / "README.md")
    assert {"README.md"} <= {record.name for record in manifest.source.files}


def test_two_conversions_give_the_same_card(pristine: Path, zoo: Callable[[str], Path], tmp_path: Path) -> None:
    source = Path(shutil.copytree(zoo("llama"), tmp_path / "tiny"))
    (source / "README.md").write_text(SOURCE_CARD)
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64-zp"))
    again = convert(plan, tmp_path / "again").path
    assert (again / "README.md").read_bytes() == (pristine / "README.md").read_bytes()


def test_the_head_is_what_model_hubs_read(artifact: Path) -> None:
    """Parsed by the library of the hub itself."""
    data = ModelCard.load(artifact / "README.md").data.to_dict()
    assert data["base_model"] == "tiny"
    assert data["base_model_relation"] == "quantized"
    assert data["library_name"] == "transformers"
    assert data["tags"] == ["quantkit", "compressed-tensors", "quantized", "4-bit"]
    assert (data["license"], data["license_name"]) == ("other", "tiny-1.0")
    assert data["license_link"] == "https://example.org/tiny"
    assert data["language"] == ["en", "zh"]


def test_the_card_says_what_the_manifest_says(artifact: Path, manifest: Manifest) -> None:
    card = (artifact / "README.md").read_text()
    for words in (
        manifest.identity,
        manifest.source_identity,
        "| int4 g64 zp | 14 layers |",
        f"{manifest.totals.bits_per_weight:.4f} in the quantised layers",
        "AutoModelForCausalLM.from_pretrained(path)",
        "vllm serve .",
        f"- transformers: {manifest.readers['transformers']}",
        NOT_MEASURED,
        "The source states: other.",
        "Its terms: LICENSE.",
        "kept as source/README.md",
    ):
        assert words in card, words


def test_only_readers_that_take_the_artifact_are_recommended(artifact: Path, manifest: Manifest) -> None:
    refused = {"quantkit": "yes", "transformers": "no: several schemes", "vllm": "no: no kernel"}
    card = model_card(manifest.model_copy(update={"readers": refused}), artifact)
    assert "- vllm: no: no kernel" in card
    assert "vllm serve" not in card
    assert "from_pretrained" not in card
    assert "load_artifact" in card
    assert "load_artifact" not in model_card(manifest, artifact)


def test_a_hub_id_and_its_revision_are_named(artifact: Path, manifest: Manifest) -> None:
    source = manifest.source.model_copy(update={"name": "org/tiny-1.5B", "revision": "abc123"})
    card = model_card(manifest.model_copy(update={"source": source}), artifact)
    assert head(card)["base_model"] == "org/tiny-1.5B"
    assert "revision abc123" in card


@pytest.mark.parametrize("name", ["a b", "../x", "a/b/c", NASTY, "-x", "层", ""])
def test_a_name_that_no_repository_can_have_is_no_base_model(name: str, artifact: Path, manifest: Manifest) -> None:
    source = manifest.source.model_copy(update={"name": name})
    assert "base_model" not in head(model_card(manifest.model_copy(update={"source": source}), artifact))


def test_hostile_text_stays_text(artifact: Path, manifest: Manifest) -> None:
    from markdown_it import MarkdownIt

    hostile = manifest.model_copy(
        update={
            "source": manifest.source.model_copy(update={"name": NASTY, "revision": NASTY}),
            "recipe": manifest.recipe | {"name": NASTY, "description": NASTY, "passes": [NASTY, {NASTY: None}]},
            "readers": {NASTY: NASTY},
            "versions": {"quantkit": NASTY},
            "calibration": {"set": NASTY, "tokens_used": NASTY},
        }
    )
    card = model_card(hostile, artifact)
    html = MarkdownIt("commonmark").enable("table").render(card.split("---\n", 2)[2])
    assert "<script" not in html
    assert "<a " not in html
    assert "<strong>" not in html
    assert html.count("<h1>") == 1
    assert card.count(QUALITY_END) == card.count(QUALITY_START) == 1
    assert "x()" in html  # it is shown


def test_escaped_text_shows_as_it_was() -> None:
    from markdown_it import MarkdownIt

    text = "re:.*down_proj$ [x] *y* `z` <t> a|b #1 ~~s~~ & \\n!"
    shown = MarkdownIt("commonmark").renderInline(escape_markdown(text))
    assert shown == text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert escape_markdown("a\n\u202eb\x00 c") == "a b c"


def test_a_recipe_and_calibration_of_another_version_still_make_a_card(artifact: Path, manifest: Manifest) -> None:
    bare = manifest.model_copy(update={"recipe": {"name": "r", "passes": 7}, "calibration": {"x": 1}, "versions": {}})
    assert "## Quality" in model_card(bare, artifact)


def write_source_card(artifact: Path, text: str | bytes) -> None:
    (artifact / "source" / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("license: mit", {"license": "mit"}),
        ("license: [mit, apache-2.0]", {"license": ["mit", "apache-2.0"]}),
        ("license: [mit, 7, '<x>']", {"license": ["mit"]}),
        ("license: 'a\nb'", {"license": "a b"}),  # YAML folds it
        ("license: mit\r\nlanguage: en\r", {"license": "mit", "language": "en"}),
        ("license: 5", {}),
        ("license: {a: b}", {}),
        ("license_link: javascript:alert(1)", {}),
        ("license_link: LICENSE", {"license_link": "LICENSE"}),
        ("language: no", {}),  # YAML reads it as false
        ("language: [en, zh-Hans, '../x']", {"language": ["en", "zh-Hans"]}),
        ("license: !!python/object/apply:os.system ['true']", {}),
        ("a: &a [x]\nlicense: *a", {}),
        ("- license", {}),
        ("license: [", {}),
    ],
)
def test_only_plain_licences_and_languages_are_carried(
    lines: str, expected: dict[str, Any], artifact: Path, manifest: Manifest
) -> None:
    write_source_card(artifact, f"---\n{lines}\n---\n# x\n")
    assert carried_facts(manifest, artifact) == expected


@pytest.mark.parametrize("text", ["# no head\n", "", b"\xff\xfe", "---\nlicense: mit\n", "x\n---\nlicense: mit\n---\n"])
def test_a_source_card_without_a_head_states_no_licence(text: str | bytes, artifact: Path, manifest: Manifest) -> None:
    write_source_card(artifact, text)
    card = model_card(manifest, artifact)
    assert "license" not in head(card)
    assert "states none that could be read" in card


def test_a_source_without_a_card_has_nothing_to_move_aside(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    done = convert(plan, tmp_path / "plain")
    assert not (done.path / "source").exists()
    assert "source/README.md" not in (done.path / "README.md").read_text()


def test_any_spelling_of_the_readme_moves_aside_and_no_other_file_does() -> None:
    assert place_of("Readme.MD") == "source/Readme.MD"
    assert [place_of(name) for name in ("README", "README.txt", "LICENSE")] == ["README", "README.txt", "LICENSE"]


def test_figures_go_between_the_markers_and_nothing_else_changes() -> None:
    card = f"mine\n{QUALITY_START}\nold\n{QUALITY_END}\nmine too {QUALITY_END}"
    assert with_quality(card, "new") == f"mine\n{QUALITY_START}\nnew\n{QUALITY_END}\nmine too {QUALITY_END}"
    assert with_quality(f"{QUALITY_END} {QUALITY_START}", "new") is None
    assert with_quality("no markers", "new") is None
