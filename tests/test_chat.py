"""Chat messages: rendered as the model sees them, and a row that cannot be is named."""

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from quantkit.canonical import sha256_bytes
from quantkit.chat import ask, opening, render, template_sha256
from quantkit.errors import CalibrationError, TextError
from quantkit.texts import Chat, load_source
from tests.zoo import CHAT_TEMPLATE, byte_tokenizer

ASK = {"role": "user", "content": "Which valve?"}
ANSWER = {"role": "assistant", "content": "PSV-318, 见 EV-0123."}


def chat(*rows: Any) -> Chat:
    return Chat("notes", "mul", list(rows))


def with_template(template: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def refused(source: Chat, tokenizer: PreTrainedTokenizerFast, *words: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        render(source, tokenizer)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_conversations_are_rendered_by_the_template_and_joined_with_nothing() -> None:
    text = render(chat([ASK, ANSWER], [ASK]), byte_tokenizer())
    assert text.documents == ["user: Which valve?\nassistant: PSV-318, 见 EV-0123.\n", "user: Which valve?\n"]
    assert text.joined == "".join(text.documents)
    assert (text.name, text.language, text.blank) == ("notes", "mul", 0)


def test_the_ends_of_rendered_turns_are_not_stripped() -> None:
    assert render(chat([ASK]), with_template("  {{ messages[0]['content'] + '\n\n' }}")).joined == "  Which valve?\n\n"


def test_further_keys_reach_the_template_and_null_ones_do_not() -> None:
    template = "{% for m in messages %}{{ m['content'] }}[{{ m['name'] if 'name' in m else '-' }}]{% endfor %}"
    rows = [{**ASK, "name": "Liu"}, {**ANSWER, "name": None}]
    assert render(chat(rows), with_template(template)).joined == "Which valve?[Liu]PSV-318, 见 EV-0123.[-]"


def test_empty_conversations_and_empty_renderings_are_counted() -> None:
    only_users = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    text = render(chat([], [ANSWER], [ASK]), with_template(only_users))
    assert (text.documents, text.blank) == (["Which valve?"], 2)


@pytest.mark.parametrize("rows", [[[]], [[ANSWER]]])
def test_a_chat_of_which_nothing_is_left_is_refused(rows: list[Any]) -> None:
    refused(chat(*rows), with_template("{{ '' }}"), "notes holds no messages")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("hello", "it holds str, not a list of messages"),
        (None, "it holds NoneType, not a list of messages"),
        ({"role": ["user"], "content": ["a"]}, "it holds dict, not a list of messages"),
        ([ASK, "hello"], "message 2 is str, not an object"),
        ([[ASK]], "message 1 is list, not an object"),
        ([{"content": "a"}], "message 1 has no role"),
        ([ASK, {"role": "assistant"}], "message 2 has no content"),
        ([{"role": "assistant", "content": None}], "message 1 has no content"),
        ([{"role": 1, "content": "a"}], "role of message 1 is int, not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content of message 1 is list, not text"),
    ],
    ids=str,
)
def test_a_row_that_holds_no_messages_is_named(row: Any, problem: str) -> None:
    refused(chat([ASK], row), byte_tokenizer(), "notes, row 2", problem, "correct that row")


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system\n role') }}{% endif %}a",
        "{% for m in messages %}{{ m['content'] + m['missing'] }}{% endfor %}",
        "{{ messages[0]['content'].__class__.__mro__[1].__subclasses__() }}",
        "{% for %}",
        "{{ '\\ud800' }}",
    ],
    ids=["raises", "undefined", "sandbox", "syntax", "half of a pair"],
)
def test_a_row_that_the_template_refuses_is_named(template: str) -> None:
    refused(chat([{"role": "system", "content": "Be brief."}, ASK]), with_template(template), "row 1", "refuses it")


def test_the_row_that_the_template_refuses_is_the_one_that_is_named() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}a"
    rows = [[ASK], [ASK], [{"role": "system", "content": "Be brief."}, ASK]]
    refused(chat(*rows), with_template(template), "notes, row 3: the chat template refuses it (no system role)")


@pytest.mark.parametrize("template", [None, {"tool_use": "a", "rag": "b"}])
def test_a_tokenizer_without_a_template_is_refused_with_the_next_action(template: Any) -> None:
    refused(chat([ASK]), with_template(template), "no chat template", "plain text")


def test_the_default_of_several_templates_is_taken_and_hashed() -> None:
    tokenizer = with_template({"tool_use": "a", "default": "{{ messages[0]['content'] }}"})
    assert render(chat([ASK]), tokenizer).joined == "Which valve?"
    assert template_sha256(tokenizer) == sha256_bytes(b"{{ messages[0]['content'] }}")
    assert template_sha256(byte_tokenizer()) == sha256_bytes(CHAT_TEMPLATE.encode())


@pytest.mark.parametrize(
    ("template", "joined"),
    [
        ("{{ strftime_now('%d %b %Y') }} {{ strftime_now('%Y-%m-%d') }}", "01 Jan 2025 2025-01-01"),
        ("{% if strftime_now is defined %}{% set day = strftime_now('%B') %}{% endif %}{{ day }}", "January"),
        ("{% macro head() %}{{ strftime_now('%A') }}{% endmacro %}{{ head() }}", "Wednesday"),
        ("\n  {% if true %}\n{{ strftime_now('%y') }}{% endif %}", "\n25"),
        ("  {{ strftime_now('%m') }}", "  01"),
    ],
)
def test_a_template_that_asks_for_the_date_gets_the_same_every_day(template: str, joined: str) -> None:
    tokenizer = with_template(template)
    assert render(chat([ASK]), tokenizer).joined == joined
    assert template_sha256(tokenizer) == sha256_bytes(template.encode())


def test_the_shipped_conversations_are_sound_and_in_two_languages() -> None:
    source = load_source("engineering-chat")
    assert isinstance(source, Chat)
    text = render(source, byte_tokenizer())
    assert (len(text.documents), text.blank) == (len(source.rows), 0)
    assert len(source.rows) >= 40
    assert sum("\u4e00" <= character <= "\u9fff" for character in text.joined) > 4000
    assert "EV-0123" in text.joined
    answers = [m["content"] for row in source.rows for m in row if m["role"] == "assistant"]
    entries = [answer for answer in answers if answer.startswith(("{", "["))]
    assert len(entries) >= 10
    assert all(json.loads(entry) for entry in entries)
    for row in source.rows:
        roles = [message["role"] for message in row if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


# Questions


def test_a_question_is_a_users_message_up_to_the_answer_on_a_fixed_day() -> None:
    template = (
        "{{ strftime_now('%Y') }} {{ messages[0]['role'] }}: {{ messages[0]['content'] }}"
        "{% if add_generation_prompt %} assistant:{% endif %}"
    )
    assert ask("Which valve?", with_template(template)) == "2025 user: Which valve? assistant:"


def test_without_a_template_there_is_no_rendered_question() -> None:
    assert ask("Which valve?", with_template(None)) is None


def test_a_template_that_refuses_a_question_is_one_line() -> None:
    with pytest.raises(TextError, match="refuses a question") as caught:
        ask("Which valve?", with_template("{{ raise_exception('only\nsystem') }}"))
    assert "\n" not in str(caught.value)


# Templates that do not end

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_question_to_a_template_without_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.chat._SECONDS", 1)
    with pytest.raises(TextError, match="takes more than 1 s"):
        ask("Which valve?", with_template(ENDLESS))


def test_a_template_without_end_opens_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.chat._SECONDS", 1)
    assert opening(ENDLESS, {}) is None


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{% for a in range(99999) %}{% for b in range(9999) %}x"
        "{% endfor %}{% endfor %}",
    ],
    ids=["loops", "loops that write"],
)
def test_a_template_without_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.chat._SECONDS", 1)
    refused(chat([ASK]), with_template(template), "takes more than 1 s", "plain text")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 100000000000 }}",
        "{% set n = namespace(t='xxxxxxxx') %}{% for a in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
        "{{ '%099999999999d' % 1 }}",
    ],
    ids=["product", "doubling", "padding"],
)
def test_a_template_that_writes_without_bound_is_refused(template: str) -> None:
    refused(chat([ASK]), with_template(template), "notes")


def test_what_a_template_does_stays_in_its_child() -> None:
    tokenizer = with_template("{{ messages.clear() if false else messages[0]['content'] }}")
    rows = [[dict(ASK)]]
    assert render(chat(*rows), tokenizer).joined == "Which valve?"
    assert rows == [[ASK]]
