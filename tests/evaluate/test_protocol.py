"""Windows are consecutive, BOS follows a stated rule, and the hash changes with everything that changes a number."""

from typing import Any

import pytest
import torch
from tokenizers.normalizers import Lowercase
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from quantkit.errors import TextError
from quantkit.evaluate.protocol import Windows, cut_windows, load_windows, protocol_hash, protocol_record
from quantkit.texts import Text, load_text
from tests.zoo import byte_tokenizer

BOS = 1  # of the byte tokenizer
TEXT = Text("letters", "und", ["abcdefghij", "klmnopqrst", "uvwxyz"], "\n\n")
BOOTSTRAP = {"resamples": 1000, "seed": 20240}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def bos_tokenizer() -> PreTrainedTokenizerFast:
    """As the tokenizers of Llama and Gemma: it puts a BOS before every text."""
    made = byte_tokenizer()
    made._tokenizer.post_processor = TemplateProcessing(
        single=f"{made.bos_token} $A", special_tokens=[(made.bos_token, BOS)]
    )
    return made


def record(windows: Windows, dtype: torch.dtype = torch.float32, bootstrap: dict[str, int] = BOOTSTRAP) -> str:
    return protocol_hash(protocol_record({windows.rules["text"]: windows}, dtype, bootstrap))


def test_windows_are_consecutive_pieces_of_the_joined_text(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = cut_windows(TEXT, tokenizer, 3, 8)
    assert [bytes(row) for row in windows.ids.tolist()] == [b"abcdefgh", b"ij\n\nklmn", b"opqrst\n\n"]
    assert windows.ids.dtype == torch.int64
    assert windows.count == 3 * 7


def test_the_last_incomplete_window_is_not_scored(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(TEXT.joined) == 30
    assert cut_windows(TEXT, tokenizer, 3, 9).ids.shape == (3, 9)
    with pytest.raises(TextError):
        cut_windows(TEXT, tokenizer, 4, 9)


def test_a_text_that_is_too_short_is_an_error_naming_both_counts(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TextError) as caught:
        cut_windows(TEXT, tokenizer, 5, 8)
    assert caught.value.problem == "text letters gives 3 windows of 8 tokens, 5 are asked"
    assert "at most 3 windows" in caught.value.action


def test_a_bos_in_each_window_takes_the_place_of_one_token(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    windows = cut_windows(TEXT, bos_tokenizer, 3, 8, "window")
    assert windows.ids.shape == (3, 8)
    assert windows.ids[:, 0].tolist() == [BOS] * 3
    assert [bytes(row[1:]) for row in windows.ids.tolist()] == [b"abcdefg", b"hij\n\nkl", b"mnopqrs"]
    assert windows.count == 3 * 7


def test_no_bos_means_none_even_where_the_tokenizer_would_add_one(bos_tokenizer: PreTrainedTokenizerFast) -> None:
    windows = cut_windows(TEXT, bos_tokenizer, 3, 8, "none")
    assert not (windows.ids == BOS).any()
    assert windows.rules["bos"] == "none"


def test_auto_follows_the_tokenizer_and_records_what_it_found(
    tokenizer: PreTrainedTokenizerFast, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    assert cut_windows(TEXT, tokenizer, 3, 8, "auto").rules == cut_windows(TEXT, tokenizer, 3, 8, "none").rules
    automatic = cut_windows(TEXT, bos_tokenizer, 3, 8, "auto")
    assert automatic.rules["bos"] == "window"
    assert torch.equal(automatic.ids, cut_windows(TEXT, bos_tokenizer, 3, 8, "window").ids)


def test_a_bos_that_the_tokenizer_does_not_have_is_an_error() -> None:
    without = byte_tokenizer()
    without.bos_token = None
    assert cut_windows(TEXT, without, 3, 8, "auto").rules["bos"] == "none"
    with pytest.raises(TextError, match="has none"):
        cut_windows(TEXT, without, 3, 8, "window")


def test_the_rules_are_the_same_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert record(cut_windows(TEXT, tokenizer, 2, 8)) == record(cut_windows(TEXT, tokenizer, 2, 8))


@pytest.mark.parametrize(
    "change",
    [
        {"text": Text("other", "und", TEXT.documents, "\n\n")},
        {"text": Text("letters", "und", ["abcdefghij", "klmnopqrst", "uvwxyZ"], "\n\n")},
        {"text": Text("letters", "und", TEXT.documents, "\n")},
        {"windows": 3},
        {"length": 7},
        {"bos": "window"},
        {"dtype": torch.bfloat16},
        {"bootstrap": {"resamples": 1000, "seed": 1}},
        {"bootstrap": {"resamples": 999, "seed": 20240}},
    ],
    ids=["name", "text", "separator", "windows", "length", "bos", "dtype", "seed", "resamples"],
)
def test_the_protocol_hash_changes_with_everything_that_changes_a_number(
    change: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    def hash_of(values: dict[str, Any]) -> str:
        windows = cut_windows(values["text"], tokenizer, values["windows"], values["length"], values["bos"])
        return record(windows, values["dtype"], values["bootstrap"])

    base = {
        "text": TEXT, "windows": 2, "length": 8, "bos": "none", "dtype": torch.float32, "bootstrap": BOOTSTRAP,
    }  # fmt: skip
    assert hash_of(base) != hash_of(base | change)


def test_the_protocol_hash_changes_with_the_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    other = byte_tokenizer()
    other._tokenizer.normalizer = Lowercase()
    text = Text("letters", "und", ["ABCDEFGHIJKLMNOP"], "\n\n")
    assert record(cut_windows(text, tokenizer, 2, 8)) != record(cut_windows(text, other, 2, 8))


def test_a_shipped_text_is_found_by_its_name(tokenizer: PreTrainedTokenizerFast) -> None:
    windows = load_windows("handbook-zh", tokenizer, 2, 300)
    assert (windows.rules["text"], windows.rules["language"]) == ("handbook-zh", "zh")
    start = bytes(windows.ids.reshape(-1).tolist()).decode(errors="ignore")
    assert load_text("handbook-zh").joined.startswith(start)
    assert len(start) >= 199


def test_chat_messages_are_no_text_to_score(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TextError, match=r"engineering-chat holds chat messages.*give plain text"):
        load_windows("engineering-chat", tokenizer, 1, 16)
