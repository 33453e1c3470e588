"""Scorers of the quantkit tasks: pure functions of an item and the text that the model put out.

lm-eval calls the functions of the YAML files with an item and a list of one output; each returns metrics of 0 or 1.
"""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema

HERE = Path(__file__).resolve().parent
ENTRY: dict[str, Any] = json.loads((HERE / "hazard-entry.schema.json").read_text(encoding="utf-8"))

# Whatever looks like the number of a document: a reference with a letter too many is another one, and so is a drawing.
TAG = re.compile(r"(?<![A-Za-z\d])[A-Z]+-\d[A-Za-z\d]*")
# Field names of a record with their allowed words; None: references of the register.
RECORD: dict[str, dict[str, tuple[str, ...] | None]] = {
    "en": {
        "Severity": ("negligible", "minor", "major", "catastrophic"),
        "Evidence": None,
        "Status": ("open", "closed", "deferred"),
    },
    "zh": {
        "严重度": ("轻微", "一般", "严重", "灾难"),
        "证据": None,
        "状态": ("未关闭", "已关闭", "延期"),
    },
}

Item = dict[str, Any]
Metrics = dict[str, int]


def entry_schema(item: Item) -> dict[str, Any]:
    """The JSON Schema of the entry that one note asks for: that of every entry, with the note's number as its id."""
    return {**ENTRY, "properties": {**ENTRY["properties"], "id": {"const": item["entry"]}}}


def json_schema(item: Item, outputs: list[str]) -> Metrics:
    """parses: the output is JSON, each key once. valid: it is an entry with the note's number, by its JSON Schema."""
    try:
        entry = json.loads(outputs[0], parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        return {"valid": 0, "parses": 0}
    return {"valid": int(jsonschema.Draft202012Validator(entry_schema(item)).is_valid(entry)), "parses": 1}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice")
    return dict(pairs)


def evidence_copy(item: Item, outputs: list[str]) -> Metrics:
    """exact: the output's references are those of the text, as a set, and it names no other document."""
    found = set(TAG.findall(outputs[0]))
    return {"exact": int(found == set(item["references"]))}


def domain_check(item: Item, outputs: list[str]) -> Metrics:
    """A record: fields (each stands once and nothing else), vocabulary (words as agreed), references (at least one, all
    in the register), and passes: all three."""
    rules = RECORD[item["language"]]
    pairs = [re.split("[:：]", line, maxsplit=1) for line in outputs[0].strip().splitlines()]
    values = {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}
    fields = len(pairs) == len(rules) and values.keys() == rules.keys()
    vocabulary = all(values.get(name) in words for name, words in rules.items() if words is not None)
    lists = [values.get(name, "") for name, words in rules.items() if words is None]
    references = all(cited in item["references"] for text in lists for cited in re.split("[,，、 ]+", text))
    scores = {"fields": fields, "vocabulary": vocabulary, "references": references}
    return {"passes": int(all(scores.values())), **{name: int(score) for name, score in scores.items()}}


def retrieval(item: Item, outputs: list[str]) -> Metrics:
    """exact: the first number of the output is the code that was asked for."""
    number = re.search(r"\d+", outputs[0])
    return {"exact": int(number is not None and number.group() == item["code"])}
