"""One spelling for one value, and its hash."""

import hashlib
import json
from pathlib import Path

import pytest

from quantkit import canonical
from quantkit.canonical import canonical_json, sha256_bytes, sha256_file, sha256_json


def test_keys_are_sorted_at_every_depth_and_nothing_is_padded() -> None:
    assert canonical_json({"b": [1, {"d": None, "c": True}], "a": 0.5}) == b'{"a":0.5,"b":[1,{"c":true,"d":null}]}\n'


def test_the_order_of_keys_does_not_change_the_hash() -> None:
    assert sha256_json({"a": 1, "b": {"c": 2, "d": 3}}) == sha256_json({"b": {"d": 3, "c": 2}, "a": 1})


def test_the_order_of_a_list_changes_the_hash() -> None:
    assert sha256_json([1, 2]) != sha256_json([2, 1])


def test_text_is_written_in_utf_8_and_not_escaped() -> None:
    assert canonical_json("压力") == '"压力"\n'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")], {"a": float("nan")}])
def test_numbers_that_json_cannot_hold_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


@pytest.mark.parametrize("value", [0.1, 1e-30, 123456789.123456789, 2**53 + 1, "é\n\\", [], {}, None, False])
def test_values_survive_the_round_trip(value: object) -> None:
    assert json.loads(canonical_json(value)) == value
    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


def test_hashes_are_sha_256_of_known_inputs() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_bytes(b"") == empty
    assert sha256_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_json(None) == hashlib.sha256(b"null\n").hexdigest()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_file_is_hashed_over_all_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(canonical, "_BLOCK", 8)
    data = bytes(range(size))
    (tmp_path / "f").write_bytes(data)
    assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()
