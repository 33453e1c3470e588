"""Components: each moves with its own content and with nothing else, wherever that content stands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import record_components
from quantkit.canonical import sha256_json
from quantkit.components import chat_templates, component_hashes
from quantkit.manifest import COMPONENTS

SYSTEM = "You answer in one sentence."
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<s>" + SYSTEM + "</s>{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
)
CONFIG = {"hidden_size": 8, "quantization_config": {"bits": 4}}
TOKENIZER = {"eos_token": "<end>", "model_max_length": 64}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of an artifact that are not weights in more than name."""
    values = {
        "config.json": json.dumps(CONFIG),
        "tokenizer_config.json": json.dumps(TOKENIZER),
        "tokenizer.json": "{}",
        "chat_template.jinja": TEMPLATE,
        "generation_config.json": '{"temperature": 0.7}',
        "model.safetensors": "weights",
        "LICENSE": "free",
    }
    for name, text in values.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def hashes(directory: Path) -> dict[str, str | None]:
    return dict(component_hashes(directory, record_components(directory)))


def moved(directory: Path, change: Callable[[], Any]) -> set[str]:
    """The components whose hash a change moves."""
    before = hashes(directory)
    change()
    after = hashes(directory)
    return {name for name in before if before[name] != after[name]}


def writes(path: Path, values: Any) -> Callable[[], Any]:
    return lambda: path.write_text(values if isinstance(values, str) else json.dumps(values))


def test_every_component_has_a_hash_or_none(model: Path) -> None:
    found = hashes(model)
    assert set(found) == set(COMPONENTS)
    assert all(value is not None and len(value) == 64 for value in found.values())
    for name in ("chat_template.jinja", "generation_config.json", "LICENSE"):
        (model / name).unlink()
    (model / "config.json").write_text('{"hidden_size": 8}')
    absent = {name for name, value in hashes(model).items() if value is None}
    assert absent == {"chat_template", "system_prompt", "generation", "other", "scheme"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("model.safetensors", "other weights", {"weights"}),
        ("tokenizer.json", '{"a": 1}', {"tokenizer"}),
        ("generation_config.json", '{"temperature": 0.8}', {"generation"}),
        ("LICENSE", "not free", {"other"}),
        ("modeling_own.py", "pass", {"other"}),
        ("SYSTEM_PROMPT.txt", "Be brief.", {"system_prompt"}),
        ("config.json", CONFIG | {"hidden_size": 9}, {"config"}),
        ("config.json", CONFIG | {"quantization_config": {"bits": 8}}, {"scheme"}),
        ("tokenizer_config.json", TOKENIZER | {"model_max_length": 65}, {"tokenizer"}),
        ("chat_template.jinja", TEMPLATE.replace(SYSTEM, "You are terse."), {"chat_template", "system_prompt"}),
        ("chat_template.jinja", TEMPLATE + "{# no other output #}", {"chat_template"}),
        ("chat_template.jinja", TEMPLATE.replace("eos_token", "bos_token"), {"chat_template"}),
        ("additional_chat_templates/tool.jinja", "{{ tools }}", {"chat_template"}),
    ],
)
def test_a_change_moves_its_own_component_and_no_other(
    name: str, content: Any, expected: set[str], model: Path
) -> None:
    (model / "additional_chat_templates").mkdir()
    assert moved(model, writes(model / name, content)) == expected


def test_another_way_of_writing_the_same_values_moves_nothing(model: Path) -> None:
    assert moved(model, writes(model / "config.json", json.dumps(CONFIG, indent=4, sort_keys=True))) == set()
    assert moved(model, writes(model / "tokenizer_config.json", json.dumps(TOKENIZER, indent=1))) == set()


def test_a_template_is_the_same_in_its_own_file_and_inside_the_tokenizers(model: Path) -> None:
    def move_inside() -> None:
        (model / "chat_template.jinja").unlink()
        (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER | {"chat_template": TEMPLATE}))

    assert moved(model, move_inside) == set()


def test_a_template_inside_the_tokenizers_is_no_part_of_the_tokenizer(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    inline = model / "tokenizer_config.json"
    inline.write_text(json.dumps(TOKENIZER | {"chat_template": TEMPLATE}))
    changed = TOKENIZER | {"chat_template": TEMPLATE.replace("[", "(")}
    assert moved(model, writes(inline, changed)) == {"chat_template", "system_prompt"}


def test_templates_are_found_wherever_they_may_stand_and_a_file_goes_first(model: Path) -> None:
    named = [{"name": "default", "template": "inline"}, {"name": "rag", "template": "r"}, {"name": 1}, "x"]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool.jinja").write_text("t")
    assert chat_templates(model) == {"default": TEMPLATE, "rag": "r", "tool": "t"}
    (model / "chat_template.jinja").unlink()
    assert chat_templates(model)["default"] == "inline"
    (model / "chat_template.json").write_text('{"chat_template": "legacy"}')
    assert chat_templates(model)["default"] == "legacy"


def test_the_system_prompt_is_what_the_template_writes_before_the_users_first_word(model: Path) -> None:
    assert hashes(model)["system_prompt"] == sha256_json({"": f"<s>{SYSTEM}</s>[user]"})


def test_special_tokens_are_what_the_template_sees(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    token = {"content": "<start>", "lstrip": False}
    expected = {"tokenizer", "system_prompt"}
    assert moved(model, writes(model / "tokenizer_config.json", TOKENIZER | {"bos_token": token})) == expected
    assert hashes(model)["system_prompt"] == sha256_json({"": "<start>"})


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{% if %}", "nothing of the message", "{% for m in messages %}{{ m.content[9] }}"],
)
def test_a_template_that_writes_no_user_message_has_no_system_prompt(template: str, model: Path) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert hashes(model)["system_prompt"] is None
    assert hashes(model)["chat_template"] is not None


def test_a_template_for_contents_in_parts_is_rendered_with_parts(model: Path) -> None:
    (model / "chat_template.jinja").write_text("<i>{{ messages[0]['content'][0]['text'] }}")
    assert hashes(model)["system_prompt"] == sha256_json({"": "<i>"})


def test_a_template_that_writes_todays_date_gives_one_hash_on_every_day(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}|{{ messages[0]['content'] }}")
    assert hashes(model)["system_prompt"] == sha256_json({"": "2025-01-01|"})


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', "\xff"])
def test_a_file_that_is_no_object_is_known_by_its_bytes(content: str, model: Path) -> None:
    for name, component in (("config.json", "config"), ("tokenizer_config.json", "tokenizer")):
        (model / name).write_bytes(content.encode("latin-1"))
        before = hashes(model)
        assert before[component] is not None
        assert component in moved(model, writes(model / name, content.encode().decode() + " "))


def test_half_a_character_pair_that_a_template_writes_is_no_error(model: Path) -> None:
    (model / "chat_template.jinja").write_text('{{ "\\ud800" }}{{ messages[0]["content"] }}')
    assert hashes(model)["system_prompt"] == sha256_json({"": "?"})


def test_an_unchanged_template_is_not_rendered_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = record_components(model)
    recorded = component_hashes(model, records)
    monkeypatch.setattr("quantkit.components.opening", lambda *_: "as a later library may render it")
    assert component_hashes(model, records, recorded) == recorded
    (model / "chat_template.jinja").write_text(TEMPLATE + "!")
    assert component_hashes(model, records, recorded)["system_prompt"] != recorded["system_prompt"]
