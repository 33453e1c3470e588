"""The journal of an unfinished conversion: one line a saved step, each bound by hash to every line before it.

    line 1   {"chain": H1, "run": {...}}       what is converted, from what, with what
    line n   {"chain": Hn, "step": {...}}      what became durable since the line before

Hn is the SHA-256 of H(n-1) and the line's content. A line counts only where it is whole and its hash fits, so a line
that a crash cut off, and all that follow it, are as if they had never been written. Whoever appends a step has flushed
to the disk before what it speaks of.
"""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from quantkit.canonical import canonical_json, sha256_bytes
from quantkit.errors import ArtifactError
from quantkit.files import sync_directory
from quantkit.manifest import FallbackRecord, FoldRecord, LayerRecord
from quantkit.schema import Strict, validate

_AGAIN = "remove the folder that it is in, and start again"
# A value of a difference that is shown is cut here: hashes and lists are told apart by less.
_SHOWN = 40


class Step(Strict):
    """What was done since the step before.

    blocks: decoder blocks done by now, in all. done: names of source tensors. tensors: SHA-256 of the bytes of each
    tensor that was written. layers, fold_sites, fallbacks: their records, in order. generators: state by name of each
    random generator after the step, base64.
    """

    blocks: int
    done: list[str]
    tensors: dict[str, str]
    layers: list[LayerRecord]
    fold_sites: list[FoldRecord]
    fallbacks: list[FallbackRecord]
    generators: dict[str, str]


@dataclass(frozen=True)
class Mark:
    """A place behind a whole line: its hash, and how many bytes of the file it ends."""

    chain: str
    end: int


@dataclass(frozen=True)
class Journal:
    """What a journal says: `run`, `contents` of its steps, and the mark behind each; `start` is that behind the run.

    Contents are plain values: those of another version need not fit a `Step`, and `run` says of which they are.
    """

    run: dict[str, Any]
    start: Mark
    contents: list[dict[str, Any]]
    marks: list[Mark]

    @property
    def steps(self) -> list[Step]:
        """Raises ArtifactError where a step does not fit its schema."""
        return [validate(Step, content, "journal", ArtifactError, _AGAIN) for content in self.contents]

    def mark(self, steps: int) -> Mark:
        """Where the first `steps` steps end."""
        return self.marks[steps - 1] if steps else self.start


class JournalWriter:
    """Appends steps. Raises OSError (disk full); a line that was cut off by that does not count."""

    def __init__(self, stream: IO[bytes], chain: str) -> None:
        self._stream, self._chain = stream, chain

    @classmethod
    def create(cls, path: Path, run: dict[str, Any]) -> "JournalWriter":
        """A new journal of `run`, plain JSON values."""
        writer = cls(path.open("wb", buffering=0), "")
        writer._append("run", run)
        sync_directory(path.parent)
        return writer

    @classmethod
    def after(cls, path: Path, mark: Mark) -> "JournalWriter":
        """The journal at `path` again; what stands behind `mark` is cut off."""
        stream = path.open("r+b", buffering=0)
        stream.truncate(mark.end)
        stream.seek(mark.end)
        return cls(stream, mark.chain)

    def append(self, step: Step) -> None:
        """Write a step and flush it to the disk."""
        self._append("step", step.model_dump(mode="json"))

    def close(self) -> None:
        self._stream.close()

    def _append(self, kind: str, content: dict[str, Any]) -> None:
        self._chain = _chained(self._chain, kind, content)
        data = memoryview(canonical_json({"chain": self._chain, kind: content}))
        while data:
            data = data[self._stream.write(data) :]
        os.fsync(self._stream.fileno())


def read_journal(path: Path) -> Journal | None:
    """The part of a journal that counts, or None where there is none: no file, or no whole first line."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    run: dict[str, Any] | None = None
    start = mark = Mark("", 0)
    contents: list[dict[str, Any]] = []
    marks: list[Mark] = []
    for line in data.splitlines(keepends=True):
        kind = "run" if run is None else "step"
        content = _content(line, kind)
        chain = "" if content is None else _chained(mark.chain, kind, content)
        if content is None or line != canonical_json({"chain": chain, kind: content}):
            break
        mark = Mark(chain, mark.end + len(line))
        if run is None:
            run, start = content, mark
        else:
            contents.append(content)
            marks.append(mark)
    return None if run is None else Journal(run, start, contents, marks)


def _content(line: bytes, kind: str) -> dict[str, Any] | None:
    """What a line says, or None where it is cut off, of another kind, or holds what canonical JSON cannot."""
    try:
        found = json.loads(line)[kind]
        canonical_json(found)  # python reads NaN, infinities and halves of characters, and none of them has a hash
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _chained(chain: str, kind: str, content: dict[str, Any]) -> str:
    return sha256_bytes(canonical_json([chain, kind, content]))


def first_difference(old: Any, new: Any, key: str = "") -> str | None:
    """The first place where two plain values differ, as `recipe.weights.bits was 4 and is 8`; None where none does."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*new, *(name for name in old if name not in new)]:
            found = first_difference(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
            if found is not None:
                return found
        return None
    return None if old == new else f"{key} was {_shown(old)} and is {_shown(new)}"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def generator_state(generator: torch.Generator) -> str:
    """The state of a generator as text."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def set_generator(generator: torch.Generator, state: str) -> None:
    """Put a generator back into a state that `generator_state` gave."""
    generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8))
