"""Prompts: strict, hashed sets of questions, put to a model as its own template puts them."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quantkit.data import data_dir, shipped_names
from quantkit.errors import SchemaError, TextError
from quantkit.evaluate.prompts import PromptSet, load_prompts
from quantkit.schema import read_yaml
from tests.test_task_data import calibration_texts, runs
from tests.zoo import byte_tokenizer

BODY = """
name: mine
prompts:
  - {id: a, language: en, text: "Which valve?"}
  - {id: b, language: zh, text: 哪只阀门？}
"""


def write(directory: Path, text: str = BODY) -> str:
    path = directory / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def with_template(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_question_is_put_as_the_template_has_it_up_to_the_answer(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    template = turns + "{% if add_generation_prompt %}=>{% endif %}"
    first, second = load_prompts(write(tmp_path), with_template(template)).items
    assert bytes(first.ids).decode() == "<user>Which valve?=>"
    assert bytes(second.ids).decode() == "<user>哪只阀门？=>"
    assert (first.id, first.language, first.question) == ("a", "en", "Which valve?")


def test_without_a_template_a_question_is_plain_text(tmp_path: Path) -> None:
    prompts = load_prompts(write(tmp_path), with_template(None))
    assert bytes(prompts.items[0].ids).decode() == "Which valve?"
    assert prompts.rules["template_sha256"] is None


def test_only_the_template_writes_special_tokens_where_there_is_one(tmp_path: Path) -> None:
    class Opening(PreTrainedTokenizerFast):
        def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> Any:
            return {"input_ids": [1] * add_special_tokens + list(text.encode())}

    tokenizer = Opening(tokenizer_object=byte_tokenizer().backend_tokenizer)
    assert load_prompts(write(tmp_path), tokenizer).items[0].ids[:2] == [1, ord("W")]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    assert load_prompts(write(tmp_path), tokenizer).items[0].ids[:1] == [ord("W")]


def test_the_rules_change_with_the_words_the_template_and_how_many_are_asked(tmp_path: Path) -> None:
    tokenizer, path = byte_tokenizer(), write(tmp_path)
    whole = load_prompts(path, tokenizer).rules
    assert whole == load_prompts(path, tokenizer, 9).rules
    assert (whole["prompts"], whole["count"]) == ("mine", 2)
    changed = [
        load_prompts(path, tokenizer, 1).rules,
        load_prompts(path, with_template("{{ messages[0]['content'] }}")).rules,
        load_prompts(write(tmp_path, BODY.replace("Which", "What")), tokenizer).rules,
    ]
    assert all(rules != whole for rules in changed)


def test_a_template_that_writes_the_day_asks_the_same_every_day(tmp_path: Path) -> None:
    tokenizer = with_template("{{ strftime_now('%d %B %Y') }}: {{ messages[0]['content'] }}")
    assert bytes(load_prompts(write(tmp_path), tokenizer).items[0].ids).decode() == "01 January 2025: Which valve?"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no users') }}", "{{ '\\ud800' }}", {"tools": "a", "other": "b"}]
)
def test_a_template_that_refuses_a_question_is_an_error(template: Any, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="the chat template refuses a question") as caught:
        load_prompts(write(tmp_path), with_template(template))
    assert "\n" not in str(caught.value)


def test_a_question_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="prompt a of mine becomes no token"):
        load_prompts(write(tmp_path), with_template("{# nothing #}"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (BODY.replace("id: b", "id: a"), "the id 'a' stands twice"),
        (BODY.replace("language", "langauge"), "did you mean 'language'"),
        ("name: mine\nprompts: []\n", "prompts"),
        (BODY.replace("Which valve?", ""), "prompts.0.text"),
        (BODY.replace('"Which valve?"', "7"), "prompts.0.text"),
        ("prompts: {", "not readable YAML"),
    ],
)
def test_a_set_that_makes_no_sense_is_an_error_naming_the_file(body: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"mine\.yaml") as caught:
        load_prompts(write(tmp_path, body), byte_tokenizer())
    assert words in str(caught.value)


def test_a_name_that_is_not_shipped_lists_those_that_are() -> None:
    with pytest.raises(SchemaError, match="case-study"):
        load_prompts("case-studies", byte_tokenizer())


# The shipped set


def shipped(name: str) -> PromptSet:
    return PromptSet.model_validate(read_yaml(data_dir("evals") / "prompts" / f"{name}.yaml"))


@pytest.mark.parametrize("name", shipped_names("evals/prompts"))
def test_the_shipped_prompts_alternate_between_two_languages_of_unequal_length(name: str) -> None:
    found = shipped(name)
    assert found.name == name
    assert found.license == "Apache-2.0"
    languages = [prompt.language for prompt in found.prompts]
    assert languages == ["en", "zh"] * (len(languages) // 2), "so that the first so many are balanced"
    assert [bool(re.search("[\u4e00-\u9fff]", prompt.text)) for prompt in found.prompts] == [
        language == "zh" for language in languages
    ]
    lengths = [len(prompt.text.encode()) for prompt in found.prompts]
    assert max(lengths) > 4 * min(lengths), "so that a batch needs padding"


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", shipped_names("evals/prompts"))
def test_no_long_run_of_words_of_a_shipped_prompt_stands_in_the_calibration_texts(name: str, language: str) -> None:
    own = {run for prompt in shipped(name).prompts for run in runs(prompt.text, language)}
    assert own
    assert own & runs(calibration_texts(), language) == set()
