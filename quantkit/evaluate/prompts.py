"""Prompts that a model is to continue: named, hashed sets of questions, put as its chat template puts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from quantkit.canonical import sha256_json
from quantkit.chat import ask, template_sha256
from quantkit.errors import TextError
from quantkit.schema import Strict, find_document, read_yaml, validate

Words = Annotated[str, Field(min_length=1)]


class PromptEntry(Strict):
    """One question, in the language that its answer is counted under."""

    id: Words
    language: Words
    text: Words


class PromptSet(Strict):
    """A set of prompts by name."""

    name: Words
    description: str = ""
    license: str = ""
    prompts: Annotated[list[PromptEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _ids_are_unique(self) -> "PromptSet":
        ids = [prompt.id for prompt in self.prompts]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice:
            raise ValueError(f"prompts: the id {twice!r} stands twice")
        return self


@dataclass(frozen=True)
class Prompt:
    """A question and the token ids of all that the model reads before it answers."""

    id: str
    language: str
    question: str
    ids: list[int]


@dataclass(frozen=True)
class Prompts:
    """The prompts of a set in order, and the rules that made them."""

    items: list[Prompt]
    rules: dict[str, Any]


def load_prompts(name: str, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> Prompts:
    """The first `limit` prompts (None: all) of a shipped name or a path.

    With a chat template a question is a user's message, up to where the answer begins; without one it is plain text,
    tokenised as the tokenizer does by itself. Raises SchemaError; TextError where the template refuses a question, or
    where nothing is left of one.
    """
    path = find_document("evals/prompts", name)
    found = validate(PromptSet, read_yaml(path), f"prompts {path.name}")
    entries = found.prompts[:limit]
    items = [_prompt(entry, tokenizer, found.name) for entry in entries]
    return Prompts(items, _rules(found.name, entries, items, tokenizer))


def _prompt(entry: PromptEntry, tokenizer: PreTrainedTokenizerBase, origin: str) -> Prompt:
    rendered = ask(entry.text, tokenizer)
    # A template writes the special tokens itself.
    ids = (
        tokenizer(entry.text)["input_ids"]
        if rendered is None
        else tokenizer(rendered, add_special_tokens=False)["input_ids"]
    )
    if not ids:
        raise TextError(f"prompt {entry.id} of {origin} becomes no token", "give that prompt words, or leave it out")
    return Prompt(entry.id, entry.language, entry.text, list(ids))


def _rules(
    name: str, entries: Sequence[PromptEntry], items: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    return {
        "prompts": name,
        "count": len(entries),
        "prompts_sha256": sha256_json([entry.model_dump() for entry in entries]),
        "template_sha256": template_sha256(tokenizer) if tokenizer.chat_template else None,
        "tokens_sha256": sha256_json([item.ids for item in items]),
    }
