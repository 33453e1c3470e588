"""Token tables: a text joined, tokenised once, and cut into consecutive windows by a stated BOS rule."""

import sys
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from quantkit.errors import TextError
from quantkit.texts import Text

# auto: as the tokenizer itself does. none: no window starts with it. window: every window does.
BosRule = Literal["auto", "none", "window"]


def prefix_rule(tokenizer: PreTrainedTokenizerBase, bos: BosRule) -> Literal["none", "window"]:
    """`bos` with `auto` resolved. Raises TextError where a BOS is asked for and the tokenizer has none."""
    token = tokenizer.bos_token_id
    if bos == "auto":
        return "window" if token is not None and tokenizer("a")["input_ids"][:1] == [token] else "none"
    if bos == "window" and token is None:
        raise TextError("a BOS token is asked for in each window and the tokenizer has none", "set bos: none")
    return bos


def token_table(text: Text, tokenizer: PreTrainedTokenizerBase, length: int, rule: str) -> tuple[torch.Tensor, int]:
    """All full windows of `text`, int64 `[windows, length]`, and the number of tokens that fill no window.

    rule: `none`, `window`, or `once`: as `window`, and a window that opens with a BOS of the text's own gets no second.
    """
    length = min(length, sys.maxsize)  # no text fills such a window, and a shape takes no more
    ids = tokenizer(text.joined, add_special_tokens=False, verbose=False)["input_ids"]
    if rule == "once":
        return _opened_once(ids, tokenizer.bos_token_id, length)
    content = length - (rule == "window")
    windows = len(ids) // content
    table = torch.tensor(ids[: windows * content], dtype=torch.int64).reshape(windows, content)
    if rule == "window":
        table = torch.cat([torch.full((windows, 1), tokenizer.bos_token_id, dtype=torch.int64), table], dim=1)
    return table, len(ids) - windows * content


def _opened_once(ids: list[int], bos: int, length: int) -> tuple[torch.Tensor, int]:
    """Windows that each open with one BOS. Their cuts depend on one another, so they are found in order."""
    rows: list[list[int]] = []
    start = 0
    while True:
        prefix = [] if ids[start : start + 1] == [bos] else [bos]
        stop = start + length - len(prefix)
        if stop > len(ids):
            return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), length), len(ids) - start
        rows.append(prefix + ids[start:stop])
        start = stop
