"""Token tables: full windows, and a BOS by a stated rule that never doubles one."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quantkit.texts import Text
from quantkit.tokens import prefix_rule, token_table
from tests.zoo import byte_tokenizer

BOS = 1  # of the byte tokenizer
WRITTEN = byte_tokenizer().bos_token  # the text that is read as one token


def windows(text: str, rule: str, length: int = 4) -> tuple[list[list[int]], int]:
    table, rest = token_table(Text("t", "en", [text], ""), byte_tokenizer(), length, rule)
    assert table.shape == (len(table), length)
    return table.tolist(), rest


def test_a_special_token_that_the_text_writes_is_one_token() -> None:
    assert windows(f"ab{WRITTEN}c", "none") == ([[97, 98, BOS, 99]], 0)


def test_once_is_the_rule_window_where_the_text_writes_no_bos() -> None:
    for text in ("", "ab", "abc", "abcdefgh"):
        assert windows(text, "once") == windows(text, "window")


def test_a_window_that_opens_with_the_bos_of_the_text_gets_no_second() -> None:
    # the first and third window open with a conversation, the second inside one
    rows, rest = windows(f"{WRITTEN}abcdef{WRITTEN}ghij", "once")
    assert rows == [[BOS, 97, 98, 99], [BOS, 100, 101, 102], [BOS, 103, 104, 105]]
    assert rest == 1


def test_a_bos_that_the_text_writes_inside_a_window_stays() -> None:
    assert windows(f"{WRITTEN}a{WRITTEN}b", "once") == ([[BOS, 97, BOS, 98]], 0)


@pytest.mark.parametrize(("text", "rest"), [("", 0), (WRITTEN, 1), (f"{WRITTEN}ab", 3), ("ab", 2)])
def test_too_little_text_fills_no_window(text: str, rest: int) -> None:
    assert windows(text, "once") == ([], rest)


@pytest.mark.parametrize("rule", ["none", "window", "once"])
def test_windows_longer_than_any_text_are_not_filled(rule: str) -> None:
    table, rest = token_table(Text("t", "en", ["abc"], ""), byte_tokenizer(), 10**30, rule)
    assert len(table) == 0
    assert rest == 3


def test_a_tokenizer_that_spells_nothing_of_a_text_puts_no_bos_before_it() -> None:
    letters = Tokenizer(models.BPE(vocab={"<s>": 0, "v": 1}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>")  # noqa: S106
    assert tokenizer("a")["input_ids"] == []
    assert prefix_rule(tokenizer, "auto") == "none"
