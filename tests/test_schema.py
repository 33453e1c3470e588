"""Strict documents: what YAML is taken, and how a wrong key or value is named."""

import json
import os
import time
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from quantkit.data import shipped_names
from quantkit.errors import CheckpointError, ReportError, SchemaError
from quantkit.schema import Strict, find_document, parse_yaml, read_json, read_yaml, validate


class Inner(Strict):
    bits: Literal[4, 8]
    group_size: int | None = None


class Outer(Strict):
    name: str
    weights: Inner
    samples: int = Field(default=1, ge=1)
    layers: list[Inner] = []


GOOD = {"name": "a", "weights": {"bits": 4}}


def problem(value: object) -> str:
    with pytest.raises(SchemaError) as caught:
        validate(Outer, value, "thing.yaml")
    assert str(caught.value).startswith("thing.yaml")
    return str(caught.value)


def test_a_document_that_fits_becomes_its_model() -> None:
    value = validate(Outer, {**GOOD, "layers": [{"bits": 8, "group_size": 64}]}, "thing.yaml")
    assert value == Outer(name="a", weights=Inner(bits=4), layers=[Inner(bits=8, group_size=64)])


@pytest.mark.parametrize(
    ("value", "key", "near"),
    [
        ({**GOOD, "wieghts": {"bits": 4}}, "wieghts", "weights"),
        ({**GOOD, "weights": {"bits": 4, "groupsize": 64}}, "weights.groupsize", "group_size"),
        ({**GOOD, "layers": [{"bits": 4}, {"bit": 4}]}, "layers.1.bit", "bits"),
        ({"nam": "a", "weights": {"bits": 4}}, "nam", "name"),
    ],
)
def test_an_unknown_key_names_its_place_and_the_nearest_known_one(value: object, key: str, near: str) -> None:
    assert problem(value) == f"thing.yaml: unknown key {key!r}; did you mean {near!r}?"


def test_an_unknown_key_like_no_other_lists_the_known_ones() -> None:
    text = problem({**GOOD, "zzzzzz": 1})
    assert "unknown key 'zzzzzz'; known keys: bits, group_size, layers, name, samples, weights" in text


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"weights": {"bits": 4}}, "name"),
        ({**GOOD, "samples": 0}, "samples"),
        ({**GOOD, "samples": "3"}, "samples"),
        ({**GOOD, "samples": True}, "samples"),
        ({**GOOD, "samples": 1.5}, "samples"),
        ({**GOOD, "weights": {"bits": 5}}, "weights.bits"),
        ({**GOOD, "weights": None}, "weights"),
        ({**GOOD, "name": 4}, "name"),
        ({**GOOD, "layers": [{"bits": 4}, {"bits": "4"}]}, "layers.1.bits"),
    ],
    ids=str,
)
def test_a_wrong_value_names_its_key(value: object, key: str) -> None:
    assert f"thing.yaml: {key}: " in problem(value)


@pytest.mark.parametrize("value", [None, [], "text", 3, [1]])
def test_a_document_that_is_not_a_mapping_is_refused(value: object) -> None:
    assert problem(value)


def test_values_that_are_not_plain_data_are_refused() -> None:
    assert "not plain data" in problem({**GOOD, "name": parse_yaml("2024-01-01", "d")})


def test_the_error_and_its_action_can_be_another_ones() -> None:
    with pytest.raises(ReportError, match=r"unknown key 'x'; measure again"):
        validate(Outer, {**GOOD, "x": 1}, "report", ReportError, "measure again")


def test_models_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        validate(Outer, GOOD, "thing").name = "b"


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2", "a: {b: 1, c: 2, b: 3}", "- {x: 1, x: 1}", "1: a\n1: b", "? [1]\n: a\n? [1]\n: b"],
)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match=r"d\.yaml is not readable YAML"):
        parse_yaml(text, "d.yaml")


def test_the_repeated_key_is_named() -> None:
    with pytest.raises(SchemaError, match="the key 'bits' stands twice"):
        parse_yaml("weights: {bits: 4, bits: 8}", "d.yaml")


@pytest.mark.parametrize("text", ["a: &x [1]\nb: *x", "a: &x {y: 1}\nb: {<<: *x}", "- &a [*a]"])
def test_aliases_are_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="aliases are not allowed"):
        parse_yaml(text, "d.yaml")


def test_an_expanding_document_is_refused_before_it_expands() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(SchemaError, match="aliases are not allowed"):
        parse_yaml("\n".join(levels), "d.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\ta: 1",
        "!!python/object/apply:os.system ['true']",
        "!own tag",
        "a: \x00",
        "[" * 5000,
        "{[1]: 2}",
        "{{a: 1}: 2}",
        "a: 1\n---\nb: 2",
        "2024-99-99",
    ],
    ids=lambda text: text[:12],
)
def test_what_is_not_plain_yaml_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(SchemaError, match=r"d\.yaml is not readable YAML") as caught:
        parse_yaml(text, "d.yaml")
    assert "\n" not in str(caught.value)


def test_a_syntax_error_names_its_line() -> None:
    with pytest.raises(SchemaError, match="line 3"):
        parse_yaml("a: 1\nb: 2\nc: [", "d.yaml")


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with pytest.raises(SchemaError, match=r"r\.yaml cannot be read"):
        read_yaml(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SchemaError, match=r"r\.yaml cannot be read"):
        read_yaml(path)
    path.write_text("a: [")
    with pytest.raises(SchemaError, match=r"r\.yaml is not readable YAML"):
        read_yaml(path)
    path.write_text("#" * ((1 << 18) + 1))
    with pytest.raises(SchemaError, match="larger than 262144 bytes"):
        read_yaml(path)


def test_a_document_is_found_by_its_shipped_name_or_by_path(tmp_path: Path) -> None:
    assert find_document("recipes", "rtn-g64").name == "rtn-g64.yaml"
    (tmp_path / "own.yml").write_text("a: 1")
    assert find_document("recipes", str(tmp_path / "own.yml")) == tmp_path / "own.yml"


def test_a_name_that_is_not_shipped_lists_the_nearest() -> None:
    with pytest.raises(SchemaError, match=r"nothing named 'rtn-g46' is shipped in recipes/; use one of: .*rtn-g64"):
        find_document("recipes", "rtn-g46")
    with pytest.raises(SchemaError) as caught:
        find_document("recipes", "###")
    assert all(name in caught.value.action for name in shipped_names("recipes"))


@pytest.mark.parametrize("name", ["gone.yaml", "gone.yml", "./gone", "a/b"])
def test_a_path_where_nothing_is_says_so(name: str) -> None:
    with pytest.raises(SchemaError, match=f"{name} does not exist"):
        find_document("recipes", name)


def test_json_with_unique_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(json.dumps({"a": [1, {"b": 2}]}))
    assert read_json(tmp_path / "v.json", CheckpointError, "act") == {"a": [1, {"b": 2}]}


@pytest.mark.parametrize("text", ["", "{", '{"a": 1, "a": 2}', '[{"a": 1, "a": 1}]', "[" * 100_000, "\x00"])
def test_json_that_cannot_be_read_is_the_callers_error_naming_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"v\.json is not readable JSON .*; act"):
        read_json(tmp_path / "v.json", CheckpointError, "act")


def test_json_that_is_not_there_or_is_a_folder_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.json does not exist; act"):
        read_json(tmp_path / "gone.json", CheckpointError, "act")
    with pytest.raises(CheckpointError, match="is not readable JSON"):
        read_json(tmp_path, CheckpointError, "act")


def test_a_mapping_of_very_many_keys_is_read_in_time_that_grows_with_them() -> None:
    started = time.process_time()
    assert len(parse_yaml("\n".join(f"k{n}: 1" for n in range(15_000)), "d.yaml")) == 15_000
    assert time.process_time() - started < 30, "comparing each key with each other took minutes"


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(SchemaError, match="no regular file"):
        read_yaml(tmp_path / "pipe.yaml")
    with pytest.raises(ReportError, match="no regular file"):
        read_json(tmp_path / "pipe.yaml", ReportError, "again")


def test_json_larger_than_any_document_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "d.json").open("wb") as stream:
        stream.truncate((1 << 27) + 1)
    with pytest.raises(ReportError, match="larger than 134217728 bytes"):
        read_json(tmp_path / "d.json", ReportError, "again")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_cannot_hold_is_refused(value: float) -> None:
    class Holder(Strict):
        number: float

    with pytest.raises(SchemaError, match="number"):
        validate(Holder, {"number": value}, "thing.yaml")
