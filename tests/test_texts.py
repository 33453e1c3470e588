"""Texts: every layout, every source, and what is wrong with a broken one."""

import bz2
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from quantkit.canonical import sha256_bytes
from quantkit.data import data_dir, shipped_names
from quantkit.errors import QuantkitError, SchemaError, TextError
from quantkit.schema import read_yaml, validate
from quantkit.texts import Chat, Text, TextDefinition, load_source, load_text

BASE = {"name": "own", "description": "for tests", "language": "en", "license": "none"}


def define(directory: Path, file: str = "data", data: bytes | None = None, **changes: Any) -> str:
    """A definition beside its file; the name to load it by."""
    if data is not None:
        (directory / file).write_bytes(data)
    source = {} if {"package", "dataset"} & set(changes) else {"file": file}
    (directory / "own.yaml").write_text(yaml.safe_dump({**BASE, **source, **changes}))
    return str(directory / "own.yaml")


def refused(kind: type[QuantkitError], name: str, *words: str) -> None:
    with pytest.raises(kind) as caught:
        load_text(name)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_a_plain_text_is_one_document(tmp_path: Path) -> None:
    text = load_text(define(tmp_path, data="\n  Größe 压力\n\nsecond  \n".encode()))
    assert text.documents == ["Größe 压力\n\nsecond"]
    assert (text.name, text.language) == ("own", "en")


def test_any_number_of_documents_may_be_asked_for(tmp_path: Path) -> None:
    assert load_text(define(tmp_path, data=b"one", documents=10**30)).documents == ["one"]


def test_lines_are_documents_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    text = load_text(define(tmp_path, data=b"one\n\n   \n two \r\nthree", layout="lines"))
    assert text.documents == ["one", "two", "three"]
    assert text.joined == "one\n\ntwo\n\nthree"


def test_jsonl_takes_its_field_from_every_line(tmp_path: Path) -> None:
    rows = b'{"body": "a", "x": 1}\n\n{"body": " "}\n{"body": "b\\n\\u538b"}\n'
    assert load_text(define(tmp_path, data=rows, layout="jsonl", field="body")).documents == ["a", "b\n压"]


def test_json_values_take_their_field_in_order(tmp_path: Path) -> None:
    data = b'{"z": {"text": "first"}, "a": {"text": "second"}}'
    assert load_text(define(tmp_path, data=data, layout="json-values")).documents == ["first", "second"]


def test_parquet_takes_one_column(tmp_path: Path) -> None:
    parquet(tmp_path / "data", {"id": [1, 2, 3], "body": ["a", "", "c"]})
    assert load_text(define(tmp_path, layout="parquet", field="body")).documents == ["a", "c"]


WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>A</title><revision><text>'''Alpha''' is a [[letter|first letter]].&lt;ref&gt;source&lt;/ref&gt;
{{infobox|x=1}}

{| class="t"
| cell
|}
== Use ==
* It stands first. [[File:a.png|thumb|caption]]
</text></revision></page>
<page><title>B</title><revision><text>#REDIRECT [[A]]</text></revision></page>
<page><title>C</title><revision><text>Gamma.</text></revision></page>
</mediawiki>"""


@pytest.mark.parametrize("packed", [False, True])
def test_mediawiki_articles_lose_their_markup_and_redirects(tmp_path: Path, packed: bool) -> None:
    data = bz2.compress(WIKI.encode()) if packed else WIKI.encode()
    file = "dump.xml.bz2" if packed else "dump.xml"
    text = load_text(define(tmp_path, file, data, layout="mediawiki"))
    assert len(text.documents) == 2
    assert text.documents[0].startswith("Alpha is a first letter.")
    assert "It stands first." in text.documents[0]
    assert not any(word in text.joined for word in ("source", "infobox", "cell", "caption", "REDIRECT", "'''", "[["))
    assert text.documents[1] == "Gamma."


@pytest.mark.parametrize(
    ("file", "data", "documents"),
    [
        ("a.txt", b"one\n\ntwo", ["one\n\ntwo"]),
        ("a.md", b"# one", ["# one"]),
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"}', ["one", "two"]),
    ],
)
def test_a_path_works_in_place_of_a_name(tmp_path: Path, file: str, data: bytes, documents: list[str]) -> None:
    (tmp_path / file).write_bytes(data)
    text = load_text(str(tmp_path / file))
    assert text.documents == documents
    assert (text.name, text.language) == (file, "und")


def test_a_parquet_path_works_in_place_of_a_name(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"text": ["one", "two"]})
    assert load_text(str(tmp_path / "a.parquet")).documents == ["one", "two"]


def test_only_the_first_documents_are_taken_where_a_number_is_given(tmp_path: Path) -> None:
    # the last line is broken, and is never reached
    rows = b'{"text": "a"}\n{"text": "b"}\n{broken'
    assert load_text(define(tmp_path, data=rows, layout="jsonl", documents=2)).documents == ["a", "b"]


def test_the_separator_joins_and_changes_the_hash(tmp_path: Path) -> None:
    text = load_text(define(tmp_path, data=b"a\nb", layout="lines", separator=" | "))
    assert text.joined == "a | b"
    assert text.sha256 == sha256_bytes(b"a | b")
    assert Text("x", "en", ["a", "b"], "\n").sha256 != text.sha256


@pytest.mark.parametrize(
    ("layout", "data"),
    [
        ("text", b"\xff\xfe"),
        ("lines", b"\xff\xfe"),
        ("jsonl", b'{"text": "a"}\nnot json'),
        ("jsonl", b'{"body": "a"}'),
        ("jsonl", b'["text"]'),
        ("jsonl", b"3"),
        ("jsonl", b'{"text": 3}'),
        ("jsonl", b'{"text": null}'),
        ("jsonl", b'{"text": "half of a pair: \\ud800"}'),
        ("jsonl", b"[" * 100_000),
        ("json-values", b'[{"text": "a"}]'),
        ("json-values", b'{"a": {"body": "x"}}'),
        ("json-values", b'{"a": "text"}'),
        ("json-values", b"{"),
        ("parquet", b"not parquet"),
        ("parquet", b""),
        ("mediawiki", b"<mediawiki><page>"),
        ("mediawiki", b"not xml"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_of_another_layout_names_file_layout_and_field(tmp_path: Path, layout: str, data: bytes) -> None:
    name = define(tmp_path, data=data, layout=layout)
    refused(TextError, name, f"{tmp_path / 'data'} cannot be read as {layout} with field 'text'")


@pytest.mark.parametrize("data", [b"not bz2", bz2.compress(b"<mediawiki/>" * 100)[:-5]])
def test_a_damaged_archive_is_named(tmp_path: Path, data: bytes) -> None:
    refused(TextError, define(tmp_path, "d.bz2", data, layout="mediawiki"), "d.bz2 cannot be read as mediawiki")


@pytest.mark.parametrize("columns", [{"body": ["a"]}, {"text": [1, 2]}, {"text": ["a", None]}], ids=str)
def test_a_column_that_is_missing_or_no_text_is_named(tmp_path: Path, columns: dict[str, list[Any]]) -> None:
    parquet(tmp_path / "data", columns)
    refused(TextError, define(tmp_path, layout="parquet"), "cannot be read as parquet with field 'text'")


@pytest.mark.parametrize(
    ("layout", "data"), [("text", b""), ("lines", b"\n \n"), ("jsonl", b""), ("json-values", b"{}")]
)
def test_a_text_without_documents_is_refused(tmp_path: Path, layout: str, data: bytes) -> None:
    refused(TextError, define(tmp_path, data=data, layout=layout), "text own holds no documents")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(TextError, define(tmp_path, "gone.txt"), "gone.txt cannot be read")
    refused(TextError, str(tmp_path / "gone.txt"), "gone.txt does not exist")
    refused(SchemaError, str(tmp_path / "gone.yaml"), "gone.yaml cannot be read")


def test_an_unknown_name_lists_the_shipped_ones() -> None:
    refused(TextError, "wikipedia-xx", "no text is named 'wikipedia-xx'", "handbook-zh", "wiki-en")


@pytest.mark.parametrize(
    "changes",
    [
        {"file": None},
        {"file": "data", "dataset": {"id": "x", "split": "train"}},
        {"file": "data", "package": {"package": "p", "version": "1", "member": "m", "sha256": "0" * 64}},
    ],
)
def test_a_definition_has_exactly_one_source(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**BASE, **changes}))
    refused(SchemaError, str(tmp_path / "own.yaml"), "exactly one of file, package and dataset")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layuot": "text"}, "did you mean 'layout'"),
        ({"layout": "html"}, "layout"),
        ({"documents": 0}, "documents"),
        ({"chat": "yes"}, "chat"),
        ({"chat": True}, "chat needs rows"),
        ({"chat": True, "layout": "lines"}, "chat needs rows"),
        ({"chat": True, "layout": "jsonl", "separator": ""}, "leave out separator"),
        ({"language": None}, "language"),
    ],
)
def test_a_definition_is_checked_like_every_document(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    refused(SchemaError, define(tmp_path, data=b"x", **changes), "text own.yaml", words)


def test_a_local_dataset_is_read_through_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = [{"body": "one"}, {"body": " "}, {"body": "two"}]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"id": str(tmp_path / "set"), "split": "train"}
    assert load_text(define(tmp_path, dataset=source, field="body")).documents == ["one", "two"]
    refused(TextError, define(tmp_path, dataset=source, field="text"), "dataset", "(train) cannot be read")
    refused(TextError, define(tmp_path, dataset={**source, "split": "test"}, field="body"), "(test) cannot be read")


@pytest.mark.parametrize("folder", ["evals/texts", "calib/texts"])
def test_every_shipped_definition_is_sound_and_carries_the_name_of_its_file(folder: str) -> None:
    names = shipped_names(folder)
    assert names
    for name in names:
        path = data_dir(folder) / f"{name}.yaml"
        definition = validate(TextDefinition, read_yaml(path), name)
        assert definition.name == name
        if definition.file is not None:
            assert (path.parent / definition.file).is_file()


def test_the_texts_written_for_this_project_load_by_name() -> None:
    text = load_text("handbook-zh")
    assert text.language == "zh"
    assert len(text.joined) > 10_000
    assert sum("\u4e00" <= character <= "\u9fff" for character in text.joined) > len(text.joined) / 2


ROWS = [[{"role": "user", "content": "Which valve?"}], [], [{"role": "user", "content": "压力?"}]]


def jsonl(*rows: Any) -> bytes:
    return "\n\n".join(json.dumps(row) for row in rows).encode()


def test_a_chat_holds_its_rows_as_they_stand(tmp_path: Path) -> None:
    data = jsonl(*({"turns": row, "x": 1} for row in ROWS))
    chat = load_source(define(tmp_path, data=data, layout="jsonl", field="turns", chat=True))
    assert chat == Chat("own", "en", ROWS)
    only = load_source(define(tmp_path, data=data, layout="jsonl", field="turns", chat=True, documents=1))
    assert only == Chat("own", "en", ROWS[:1])


def test_a_chat_may_be_parquet_or_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet(tmp_path / "data", {"id": [1, 2, 3], "messages": ROWS})
    expected = Chat("own", "en", ROWS)
    assert load_source(define(tmp_path, layout="parquet", field="messages", chat=True)) == expected
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(jsonl(*({"messages": row} for row in ROWS)))
    source = {"id": str(tmp_path / "set"), "split": "train"}
    assert load_source(define(tmp_path, dataset=source, field="messages", chat=True)) == expected


def test_a_file_is_a_chat_where_its_first_row_has_messages_and_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n" + jsonl({"messages": ROWS[0]}, {"messages": "checked later"}))
    assert load_source(str(tmp_path / "a.jsonl")) == Chat("a.jsonl", "und", [ROWS[0], "checked later"])
    parquet(tmp_path / "a.parquet", {"messages": ROWS})
    assert load_source(str(tmp_path / "a.parquet")) == Chat("a.parquet", "und", ROWS)
    (tmp_path / "b.jsonl").write_bytes(jsonl({"messages": ROWS[0], "text": "one"}))
    assert load_text(str(tmp_path / "b.jsonl")).documents == ["one"]
    parquet(tmp_path / "b.parquet", {"messages": ROWS, "text": ["one", "two", "three"]})
    assert load_text(str(tmp_path / "b.parquet")).documents == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (jsonl({"messages": ROWS[0]}, {"text": "a"}), "field 'messages' (row 2: no 'messages')"),
        (jsonl({"messages": ROWS[0]}) + b"\n{broken", "field 'messages' (row 2: "),
        (jsonl({"text": "a"}, {"messages": ROWS[0]}), "field 'text' (row 2: no 'text')"),
        (b"3", "field 'text' (row 1: "),
        (b"not json", "field 'text' (row 1: "),
        (b"", "a.jsonl holds no documents"),
    ],
    ids=str,
)
def test_a_row_that_is_not_like_the_first_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(TextError) as caught:
        load_source(str(tmp_path / "a.jsonl"))
    assert words in str(caught.value)


def test_a_chat_without_rows_is_refused(tmp_path: Path) -> None:
    refused(TextError, define(tmp_path, data=b"", layout="jsonl", chat=True), "text own holds no conversations")


def test_messages_are_refused_where_plain_text_is_wanted(tmp_path: Path) -> None:
    refused(TextError, "engineering-chat", "engineering-chat holds chat messages", "only calibration", "plain text")
    (tmp_path / "a.jsonl").write_bytes(jsonl({"messages": ROWS[0]}))
    refused(TextError, str(tmp_path / "a.jsonl"), "a.jsonl holds chat messages")
