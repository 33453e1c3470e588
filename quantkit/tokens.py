"""Token tables: a text joined, tokenised once, and cut into consecutive windows by a stated BOS rule."""

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
        return "window" if token is not None and tokenizer("a")["input_ids"][0] == token else "none"
    if bos == "window" and token is None:
        raise TextError("a BOS token is asked for in each window and the tokenizer has none", "set bos: none")
    return bos


def token_table(text: Text, tokenizer: PreTrainedTokenizerBase, length: int, rule: str) -> tuple[torch.Tensor, int]:
    """All full windows of `text`, int64 `[windows, length]`, and the number of tokens that fill no window."""
    content = length - (rule == "window")
    ids = tokenizer(text.joined, add_special_tokens=False, verbose=False)["input_ids"]
    windows = len(ids) // content
    table = torch.tensor(ids[: windows * content], dtype=torch.int64).reshape(windows, content)
    if rule == "window":
        table = torch.cat([torch.full((windows, 1), tokenizer.bos_token_id, dtype=torch.int64), table], dim=1)
    return table, len(ids) - windows * content
