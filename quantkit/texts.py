"""Texts: named, hashed sources of documents, for evaluation and calibration.

A definition is YAML with one source: a file beside it, a `datasets` id, or a file that a package ships. A path to a
plain text, JSONL or parquet file works in place of a name. Rows may hold chat messages in place of a document; they
become text only with a model's template (`quantkit.chat`).
"""

import bz2
import io
import itertools
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from quantkit.canonical import sha256_bytes
from quantkit.data import data_dir, shipped_names
from quantkit.errors import TextError, first_line, one_line
from quantkit.material import PackageFile, package_file
from quantkit.schema import Strict, read_yaml, validate

Layout = Literal["text", "lines", "jsonl", "parquet", "json-values", "mediawiki"]

# Where named texts are defined, in this order.
_FOLDERS = ("evals/texts", "calib/texts")
# What readers raise where a file is not what its layout says, from whichever library.
_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, ElementTree.ParseError,
)  # fmt: skip
_LAYOUT_OF_SUFFIX: dict[str, Layout] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
# Layouts whose rows have fields, and so may hold a list.
_ROWS: set[Layout] = {"jsonl", "json-values", "parquet"}


class DatasetSource(Strict):
    """A dataset on the hub (or a local dataset folder), read through `datasets`."""

    id: str
    config: str | None = None
    split: str
    revision: str | None = None


class TextDefinition(Strict):
    """A text by name. Exactly one of file, package and dataset.

    field: the column of structured layouts. chat: its rows hold lists of messages, not text. documents: take only the
    first so many.
    """

    name: str
    description: str
    language: str
    license: str
    file: str | None = None
    package: PackageFile | None = None
    dataset: DatasetSource | None = None
    layout: Layout = "text"
    field: str = "text"
    chat: bool = False
    documents: Annotated[int, Field(ge=1)] | None = None
    separator: str = "\n\n"

    @model_validator(mode="after")
    def _one_source(self) -> "TextDefinition":
        if sum(source is not None for source in (self.file, self.package, self.dataset)) != 1:
            raise ValueError("give exactly one of file, package and dataset")
        return self

    @model_validator(mode="after")
    def _chat_has_rows_and_no_separator(self) -> "TextDefinition":
        if self.chat and self.dataset is None and self.layout not in _ROWS:
            raise ValueError("chat needs rows: a dataset, or layout jsonl, parquet or json-values")
        if self.chat and "separator" in self.model_fields_set:
            raise ValueError("conversations are joined with nothing: leave out separator where chat is true")
        return self


@dataclass(frozen=True)
class Text:
    """Documents in order, and how they are joined. Blank documents are left out, and counted in `blank`."""

    name: str
    language: str
    documents: list[str]
    separator: str
    blank: int = 0

    @property
    def joined(self) -> str:
        return self.separator.join(self.documents)

    @property
    def sha256(self) -> str:
        """SHA-256 of the joined text in UTF-8."""
        return sha256_bytes(self.joined.encode())


@dataclass(frozen=True)
class Chat:
    """Conversations in order, as the rows hold them: `quantkit.chat` checks them and renders them into a Text."""

    name: str
    language: str
    rows: list[Any]


def load_text(name: str) -> Text:
    """`load_source` where there is no model to render messages for.

    Raises TextError as `load_source`, and for a chat.
    """
    source = load_source(name)
    if isinstance(source, Chat):
        raise TextError(f"text {source.name} holds chat messages, which only calibration reads", "give plain text here")
    return source


def load_source(name: str) -> Text | Chat:
    """The text or chat of a shipped name, of a YAML definition, or of a .txt, .md, .jsonl or .parquet file.

    A file is a chat where its first row has `messages` and no `text`. Raises TextError: nothing there, cannot be
    fetched, wrong layout, no documents.
    """
    path = Path(name)
    if path.suffix in _LAYOUT_OF_SUFFIX:
        if not path.is_file():
            raise TextError(f"text file {name} does not exist", "give an existing file or a shipped name")
        layout = _LAYOUT_OF_SUFFIX[path.suffix]
        if _holds_messages(path, layout):
            return _chat(path.name, "und", _read(path, layout, "messages", chat=True))
        return _text(path.name, "und", _read(path, layout, "text"), "\n\n")
    definition_path = path if path.suffix in {".yaml", ".yml"} else _find(name)
    definition = validate(TextDefinition, read_yaml(definition_path), f"text {definition_path.name}")
    first = None if definition.documents is None else min(definition.documents, sys.maxsize)
    documents = itertools.islice(_documents(definition, definition_path), first)
    if definition.chat:
        return _chat(definition.name, definition.language, documents)
    return _text(definition.name, definition.language, documents, definition.separator)


def is_text_file(name: str) -> bool:
    """Whether `name` is the path of a text file rather than a name or a YAML definition."""
    return Path(name).suffix in _LAYOUT_OF_SUFFIX


def _find(name: str) -> Path:
    for folder in _FOLDERS:
        path = data_dir(folder) / f"{name}.yaml"
        if path.is_file():
            return path
    known = sorted({known for folder in _FOLDERS for known in shipped_names(folder)})
    raise TextError(f"no text is named {name!r}", f"use one of {', '.join(known)}, or a path to a file")


def _text(name: str, language: str, documents: Iterator[str], separator: str) -> Text:
    stripped = [document.strip() for document in documents]
    kept = [document for document in stripped if document]
    if not kept:
        raise TextError(f"text {name} holds no documents", "check its file and its field")
    return Text(name, language, kept, separator, len(stripped) - len(kept))


def _chat(name: str, language: str, rows: Iterator[Any]) -> Chat:
    kept = list(rows)
    if not kept:
        raise TextError(f"text {name} holds no conversations", "check its file and its field")
    return Chat(name, language, kept)


def _holds_messages(path: Path, layout: Layout) -> bool:
    """Whether the first row has `messages` and no `text`. A file that cannot be read is left to its reader."""
    try:
        columns = _columns(path, layout)
    except _UNREADABLE:
        return False
    return "messages" in columns and "text" not in columns


def _columns(path: Path, layout: Layout) -> set[str]:
    """Names of the fields of the first row; none for layouts without fields."""
    if layout == "parquet":
        import pyarrow.parquet

        return set(pyarrow.parquet.read_schema(path).names)
    if layout == "jsonl":
        with path.open(encoding="utf-8") as stream:
            return set(json.loads(next(filter(str.strip, stream), "{}")))
    return set()


def _documents(definition: TextDefinition, origin: Path) -> Iterator[Any]:
    if definition.dataset is not None:
        return _read_dataset(definition.dataset, definition.field, chat=definition.chat)
    path = package_file(definition.package) if definition.package else origin.parent / str(definition.file)
    return _read(path, definition.layout, definition.field, chat=definition.chat)


def _read(path: Path, layout: Layout, field: str, *, chat: bool = False) -> Iterator[Any]:
    """The values of a file: text, or whatever the rows hold for a chat."""
    try:
        values = _READERS[layout](path, field)
        yield from values if chat else map(_string, values)
    except _UNREADABLE as error:
        raise TextError(
            f"{path} cannot be read as {layout} with field {field!r} ({_reason(error)})", "correct the file"
        ) from None


def _reason(error: BaseException) -> str:
    """One line of what a reader raised."""
    return f"no {error}" if isinstance(error, KeyError) else one_line(error)


def _read_text(path: Path, _: str) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _read_lines(path: Path, _: str) -> Iterator[str]:
    yield from path.read_text(encoding="utf-8").splitlines()


def _read_jsonl(path: Path, field: str) -> Iterator[Any]:
    with path.open(encoding="utf-8") as stream:
        for row, line in enumerate(filter(str.strip, stream), 1):
            try:
                value = json.loads(line)[field]
            except _UNREADABLE as error:  # what the parser says counts lines from this row
                raise ValueError(f"row {row}: {_reason(error)}") from None
            yield value


def _read_json_values(path: Path, field: str) -> Iterator[Any]:
    for value in json.loads(path.read_bytes()).values():
        yield value[field]


def _read_parquet(path: Path, field: str) -> Iterator[Any]:
    import pyarrow.parquet

    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=[field]):
        yield from batch.column(0).to_pylist()


def _read_mediawiki(path: Path, _: str) -> Iterator[str]:
    """Articles of a MediaWiki XML dump (bz2 or plain) as plain text, without redirects, references, tables, files."""
    import mwparserfromhell

    data = path.read_bytes()
    stream = io.BytesIO(bz2.decompress(data) if path.suffix == ".bz2" else data)
    for _, element in ElementTree.iterparse(stream):  # noqa: S314 - a hashed file; entities are not expanded
        if element.tag.rpartition("}")[2] != "text" or not element.text:
            continue
        if element.text.lower().startswith("#redirect"):
            continue
        code = mwparserfromhell.parse(element.text)
        for tag in code.filter_tags(matches=lambda node: str(node.tag).lower() in {"ref", "table", "gallery"}):
            _remove(code, tag)
        for link in code.filter_wikilinks(matches=lambda node: ":" in str(node.title)):
            _remove(code, link)
        lines = (line.strip() for line in code.strip_code().splitlines())
        yield "\n\n".join(line for line in lines if len(line) > 1)


def _remove(code: "mwparserfromhell.wikicode.Wikicode", node: object) -> None:  # type: ignore[name-defined] # noqa: F821
    try:
        code.remove(node)
    except ValueError:  # it stood inside a node that is gone already
        return


_READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "jsonl": _read_jsonl,
    "json-values": _read_json_values,
    "parquet": _read_parquet,
    "mediawiki": _read_mediawiki,
}


def _read_dataset(source: DatasetSource, field: str, *, chat: bool = False) -> Iterator[Any]:
    from datasets import load_dataset

    try:
        rows = load_dataset(source.id, source.config, split=source.split, revision=source.revision)
        yield from rows[field] if chat else map(_string, rows[field])
    except Exception as error:
        raise TextError(
            f"dataset {source.id} ({source.split}) cannot be read ({first_line(error)})",
            "check its id, field and the network, or use a local file",
        ) from None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a value is {type(value).__name__}, not text")
    value.encode()  # JSON can spell half of a character pair, which no tokenizer takes: a ValueError that says where
    return value
