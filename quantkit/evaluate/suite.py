"""Suites: which texts are scored, in how many windows of what length."""

from typing import Annotated

from pydantic import Field, model_validator

from quantkit.canonical import sha256_json
from quantkit.errors import UsageError
from quantkit.schema import Strict, find_document, read_yaml, validate
from quantkit.tokens import BosRule


class Corpus(Strict):
    """A text by name or path, and how many windows of how many tokens of it are scored."""

    text: str
    windows: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=2)]


class Suite(Strict):
    """A whole suite. A text that stands in both lists with the same windows is scored once."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    bos: BosRule = "auto"
    perplexity: Annotated[list[Corpus], Field(min_length=1)]
    fidelity: Corpus | None = None

    @model_validator(mode="after")
    def _texts_are_named_once(self) -> "Suite":
        names = [corpus.text for corpus in self.perplexity]
        if len(set(names)) != len(names):
            raise ValueError("perplexity: a text stands twice")
        return self

    @property
    def sha256(self) -> str:
        return sha256_json(self.model_dump(mode="json"))

    def limited(self, limit: int | None) -> "Suite":
        """The suite with at most `limit` windows a text. Raises UsageError for a limit below one."""
        if limit is None:
            return self
        if limit < 1:
            raise UsageError(f"--limit {limit} leaves nothing to score", "give at least 1")
        values = self.model_dump()
        for corpus in [*values["perplexity"], *([values["fidelity"]] if values["fidelity"] else [])]:
            corpus["windows"] = min(corpus["windows"], limit)
        return Suite(**values)


def load_suite(name: str) -> Suite:
    """The suite of a shipped name or a path. Raises SchemaError."""
    path = find_document("evals/suites", name)
    return validate(Suite, read_yaml(path), f"suite {path.name}")
