"""Suites: which texts are scored, in how many windows of what length, which tasks are done, what is generated."""

from typing import Annotated

from pydantic import Field, model_validator

from quantkit.canonical import sha256_json
from quantkit.errors import UsageError
from quantkit.schema import Strict, find_document, read_yaml, validate
from quantkit.tokens import BosRule

# No server puts more requests together; and prompts are repeated until a batch is full.
LARGEST_BATCH = 1024
# More than any text or task holds, and a number that libraries can count to.
LARGEST_LIMIT = 1 << 31


class Corpus(Strict):
    """A text by name or path, and how many windows of how many tokens of it are scored."""

    text: str
    windows: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=2)]


class TaskEntry(Strict):
    """An lm-eval task, by its name or the path of its YAML.

    limit: only the first so many documents. num_fewshot: examples in each prompt, where the task leaves that open.
    """

    name: str
    limit: Annotated[int, Field(ge=1, le=LARGEST_LIMIT)] | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None


class Generation(Strict):
    """A set of prompts by name or path, the first so many of them (null: all), each continued by at most new_tokens.

    batch: each is also asked in a padded batch of so many; null leaves that out.
    """

    prompts: str
    limit: Annotated[int, Field(ge=1, le=LARGEST_LIMIT)] | None = None
    new_tokens: Annotated[int, Field(ge=1)]
    batch: Annotated[int, Field(ge=2, le=LARGEST_BATCH)] | None = None


class Suite(Strict):
    """A whole suite. A text in both lists with the same windows is scored once; a task may be just a name."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    description: str = ""
    bos: BosRule = "auto"
    perplexity: Annotated[list[Corpus], Field(min_length=1)]
    fidelity: Corpus | None = None
    tasks: list[str | TaskEntry] = []
    generation: Generation | None = None

    @model_validator(mode="after")
    def _texts_and_tasks_are_named_once(self) -> "Suite":
        texts, tasks = [corpus.text for corpus in self.perplexity], [entry.name for entry in self.task_entries]
        for names, twice in ((texts, "perplexity: a text stands twice"), (tasks, "tasks: a task stands twice")):
            if len(set(names)) != len(names):
                raise ValueError(twice)
        return self

    @property
    def task_entries(self) -> list[TaskEntry]:
        return [entry if isinstance(entry, TaskEntry) else TaskEntry(name=entry) for entry in self.tasks]

    @property
    def sha256(self) -> str:
        # A suite without tasks keeps the hash that it had before there were any, and so do the reports made with it;
        # so does one that generates nothing.
        absent = {name for name in ("tasks", "generation") if not getattr(self, name)}
        return sha256_json(self.model_dump(mode="json", exclude=absent))

    @property
    def fidelity_key(self) -> str:
        """Under which key the fidelity corpus is scored: that of the perplexity entry with which it shares its run."""
        assert self.fidelity is not None
        return self.fidelity.text if self.fidelity in self.perplexity else f"fidelity:{self.fidelity.text}"

    def corpora(self, with_reference: bool) -> dict[str, Corpus]:
        """What is scored, by key. Fidelity needs a reference."""
        corpora = {corpus.text: corpus for corpus in self.perplexity}
        if self.fidelity is not None and with_reference:
            corpora.setdefault(self.fidelity_key, self.fidelity)
        return corpora

    def limited(self, limit: int | None) -> "Suite":
        """At most `limit` windows of each text, documents of each task, and prompts. Raises UsageError below one."""
        if limit is None:
            return self
        if limit < 1:
            raise UsageError(f"--limit {limit} leaves nothing to score", "give at least 1")
        limit = min(limit, LARGEST_LIMIT)
        values = self.model_dump()
        for corpus in [*values["perplexity"], *([values["fidelity"]] if values["fidelity"] else [])]:
            corpus["windows"] = min(corpus["windows"], limit)
        values["tasks"] = [
            entry.model_copy(update={"limit": min(entry.limit or limit, limit)}).model_dump()
            for entry in self.task_entries
        ]
        if values["generation"]:
            values["generation"]["limit"] = min(values["generation"]["limit"] or limit, limit)
        return Suite(**values)


def load_suite(name: str) -> Suite:
    """The suite of a shipped name or a path. Raises SchemaError."""
    path = find_document("evals/suites", name)
    return validate(Suite, read_yaml(path), f"suite {path.name}")
