"""What exactly is scored: windows of tokens cut from a text by stated rules, and the hash of those rules.

The text is joined with its separator, tokenised once, and cut into consecutive windows; every window scores its
length - 1 predictions. Two results compare only when their protocols have one hash.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from quantkit.canonical import sha256_bytes, sha256_json
from quantkit.errors import TextError
from quantkit.texts import Text, load_text

PROTOCOL_VERSION = 1

# auto: as the tokenizer itself does. none: no window starts with it. window: every window does.
BosRule = Literal["auto", "none", "window"]


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
    rule = _resolve_bos(tokenizer, bos)
    content = length - (rule == "window")
    ids = tokenizer(text.joined, add_special_tokens=False, verbose=False)["input_ids"]
    available = len(ids) // content
    if available < windows:
        raise TextError(
            f"text {text.name} gives {available} windows of {length} tokens, {windows} are asked",
            f"ask for at most {available} windows, or give a longer text",
        )
    table = torch.tensor(ids[: windows * content], dtype=torch.int64).reshape(windows, content)
    if rule == "window":
        table = torch.cat([torch.full((windows, 1), tokenizer.bos_token_id, dtype=torch.int64), table], dim=1)
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


def _resolve_bos(tokenizer: PreTrainedTokenizerBase, bos: BosRule) -> Literal["none", "window"]:
    token = tokenizer.bos_token_id
    if bos == "auto":
        return "window" if token is not None and tokenizer("a")["input_ids"][0] == token else "none"
    if bos == "window" and token is None:
        raise TextError("the suite asks for a BOS token in each window and the tokenizer has none", "set bos: none")
    return bos
