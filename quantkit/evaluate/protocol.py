"""What exactly is scored: windows of tokens cut from a text by stated rules, and the hash of those rules.

The text is joined with its separator, tokenised once, and cut into consecutive windows; every window scores its
length - 1 predictions. Two results compare only when their protocols have one hash.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from quantkit.canonical import sha256_bytes, sha256_json
from quantkit.errors import TextError
from quantkit.texts import Text, load_text
from quantkit.tokens import BosRule, prefix_rule, token_table

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class Windows:
    """Token ids int64 `[windows, length]` of one text, and the rules that made them."""

    ids: torch.Tensor
    rules: dict[str, Any]

    @property
    def count(self) -> int:
        """Number of scored predictions."""
        windows, length = self.ids.shape
        return windows * (length - 1)


def cut_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, windows: int, length: int, bos: BosRule = "auto"
) -> Windows:
    """The first `windows` windows of `length` tokens of `text`.

    Raises TextError where the text is too short, or a BOS is asked for and the tokenizer has none.
    """
    rule = prefix_rule(tokenizer, bos)
    table, _ = token_table(text, tokenizer, length, rule)
    if len(table) < windows:
        raise TextError(
            f"text {text.name} gives {len(table)} windows of {length} tokens, {windows} are asked",
            f"ask for at most {len(table)} windows, or give a longer text",
        )
    table = table[:windows].clone()
    rules = {
        "text": text.name,
        "language": text.language,
        "text_sha256": text.sha256,
        "separator": text.separator,
        "bos": rule,
        "windows": windows,
        "length": length,
        "tokens_sha256": sha256_bytes(table.numpy().astype("<i8").tobytes()),
    }
    return Windows(table, rules)


def load_windows(
    name: str, tokenizer: PreTrainedTokenizerBase, windows: int, length: int, bos: BosRule = "auto"
) -> Windows:
    """`cut_windows` of a named text or a file."""
    return cut_windows(load_text(name), tokenizer, windows, length, bos)


def protocol_record(texts: dict[str, Windows], dtype: torch.dtype, bootstrap: dict[str, int]) -> dict[str, Any]:
    """Everything that determines the numbers of a report beside the model: its hash is the report's `protocol`."""
    return {
        "version": PROTOCOL_VERSION,
        "texts": {name: windows.rules for name, windows in texts.items()},
        "dtype": str(dtype).removeprefix("torch."),
        "bootstrap": bootstrap,
    }


def protocol_hash(record: dict[str, Any]) -> str:
    return sha256_json(record)
