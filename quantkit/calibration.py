"""Calibration sets: token ids with a hash, cut from named texts in stated shares, and an account of what was used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, field_validator
from transformers import PreTrainedTokenizerBase

from quantkit.canonical import sha256_bytes
from quantkit.chat import render, template_sha256
from quantkit.checkpoint import Checkpoint
from quantkit.errors import CalibrationError
from quantkit.recipe import Recipe
from quantkit.schema import Strict, find_document, read_yaml, validate
from quantkit.texts import Text, is_text_file, load_source
from quantkit.tokens import BosRule, prefix_rule, token_table


class Part(Strict):
    """One text of a set, and its share of the samples."""

    text: str
    share: Annotated[float, Field(gt=0, le=1)]


class CalibrationSet(Strict):
    """A set by name: texts with shares that add up to one."""

    name: str
    description: str = ""
    bos: BosRule = "auto"
    parts: Annotated[list[Part], Field(min_length=1)]

    @field_validator("parts")
    @classmethod
    def _shares_add_up(cls, parts: list[Part]) -> list[Part]:
        total = sum(part.share for part in parts)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares add up to {total:g}, not 1")
        return parts


@dataclass(frozen=True)
class Calibration:
    """Token ids int64 `[samples, length]`, all real tokens, and the account that the manifest records."""

    ids: torch.Tensor
    account: dict[str, Any]


def load_set(name: str) -> CalibrationSet:
    """The set of a shipped name, a YAML path, or a text file (.txt, .md, .jsonl, .parquet) on its own."""
    if is_text_file(name):
        if not Path(name).is_file():
            raise CalibrationError(f"calibration text {name} does not exist", "give an existing file or a shipped set")
        return CalibrationSet(name=Path(name).name, parts=[Part(text=name, share=1.0)])
    path = find_document("calib", name)
    return validate(CalibrationSet, read_yaml(path), f"calibration set {path.name}")


def calibrate_from(
    chosen: CalibrationSet,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    *,
    allow_short: bool = False,
) -> Calibration:
    """`samples` windows of `length` tokens, each part giving its share, spread evenly over its text.

    Raises CalibrationError where a part is too short, unless `allow_short`; where nothing at all can be cut; and where
    all tokens are the same. TextError where a text cannot be read. Chat messages: as `quantkit.chat.render`.
    """
    rule = prefix_rule(tokenizer, chosen.bos)
    tables, parts = [], []
    for part, wanted in zip(chosen.parts, _shares(chosen, samples), strict=True):
        table, account = _samples(part.text, tokenizer, wanted, length, rule)
        if len(table) < wanted and not allow_short:
            raise CalibrationError(
                f"calibration text {account['text']} gives {len(table)} samples of {length} tokens, {wanted} are asked",
                "ask for fewer or shorter samples, give more text, or pass --allow-short-calibration",
            )
        tables.append(table)
        parts.append(account)
    ids = torch.cat(tables)
    if len(ids) == 0:
        raise CalibrationError(f"calibration set {chosen.name} fills no sample of {length} tokens", "give more text")
    if bool((ids[:, 1:] == ids[0, -1]).all()):  # the first column may be a BOS
        raise CalibrationError(f"calibration set {chosen.name} holds one token over and over", "give real text")
    account = {
        "set": chosen.name,
        "bos": rule,
        "sequence_length": length,
        "samples_asked": samples,
        "samples_used": len(ids),
        "tokens_asked": samples * length,
        "tokens_used": ids.numel(),
        "tokens_sha256": sha256_bytes(ids.numpy().astype("<i8").tobytes()),
        "parts": parts,
    }
    return Calibration(ids, account)


def recipe_calibration(
    recipe: Recipe, checkpoint: Checkpoint, named: str | None = None, *, allow_short: bool = False
) -> Calibration | None:
    """The calibration of a recipe, from the set that it names or from `named`; None for a data-free recipe.

    Raises CalibrationError as `calibrate_from`, and where a set is named for a recipe that uses none.
    """
    chosen = calibration_set(recipe, named)
    wanted = recipe.calibration
    if chosen is None or wanted is None:
        return None
    tokenizer = checkpoint.tokenizer()
    return calibrate_from(chosen, tokenizer, wanted.samples, wanted.sequence_length, allow_short=allow_short)


def calibration_set(recipe: Recipe, named: str | None = None) -> CalibrationSet | None:
    """The set that a conversion with `recipe` would use: `named`, else the recipe's; None for a data-free recipe."""
    if recipe.calibrated and recipe.calibration is not None:
        return load_set(named or recipe.calibration.set)
    if named is not None:
        raise CalibrationError(f"recipe {recipe.name} uses no calibration data", "leave out --calib")
    return None


def _shares(chosen: CalibrationSet, samples: int) -> list[int]:
    """Whole samples a part, by largest remainder, so that they add up."""
    exact = [part.share * samples for part in chosen.parts]
    whole = [int(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: (whole[n] - exact[n], n))
    for n in by_remainder[: samples - sum(whole)]:
        whole[n] += 1
    return whole


def _samples(
    name: str, tokenizer: PreTrainedTokenizerBase, wanted: int, length: int, rule: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Windows of a named text and their account, which says of a chat how it became text."""
    source = load_source(name)
    if isinstance(source, Text):
        return _cut(source, tokenizer, wanted, length, rule)
    text = render(source, tokenizer)
    # A template that writes a BOS where a conversation starts must not get a second one there.
    once = "once" if rule == "window" else rule
    table, account = _cut(text, tokenizer, wanted, length, once)
    chat = {"template_sha256": template_sha256(tokenizer), "joined_with": text.separator, "bos": once}
    return table, {**account, "chat": chat}


def _cut(
    text: Text, tokenizer: PreTrainedTokenizerBase, wanted: int, length: int, rule: str
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Windows of one text, evenly spread over it, and their account."""
    table, rest = token_table(text, tokenizer, length, rule)
    used = min(wanted, len(table))
    picked = table[[n * len(table) // used for n in range(used)]] if used else table[:0]
    skipped = {
        "blank_documents": text.blank,
        "tokens_in_unfilled_last_window": rest,
        "windows_not_needed": len(table) - used,
    }
    account = {
        "text": text.name,
        "text_sha256": text.sha256,
        "samples_asked": wanted,
        "samples_used": used,
        "skipped": skipped,
    }
    return picked, account
