"""GGUF headers: a good one is counted, and what declares more than it holds is refused at once."""

import struct
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.ggufheader import check_gguf

U32, STRING, ARRAY, U64 = 4, 8, 9, 10
HUGE = 1 << 60


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, shape: tuple[int, ...], offset: int = 0, kind: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(path: Path, entries: list[bytes], infos: list[bytes], data: int = 0, **changes: Any) -> Path:
    head = {"magic": b"GGUF", "version": 3, "tensors": len(infos), "pairs": len(entries)} | changes
    raw = head["magic"] + struct.pack("<IQQ", head["version"], head["tensors"], head["pairs"])
    raw += b"".join([*entries, *infos])
    path.write_bytes(raw + b"\0" * (-len(raw) % 32 + data))
    return path


def refused(path: Path, *words: str) -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        check_gguf(path)
    assert time.monotonic() - started < 10
    for word in (str(path), *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.gguf"


def test_a_file_of_the_reference_writer_is_counted(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_float32("rope", 1e4)
    writer.add_bool("flag", True)
    writer.add_token_list(["a", "b", "层"])
    writer.add_token_scores([0.5, 0.25, 0.0])
    writer.add_custom_alignment(64)
    writer.add_tensor("a", torch.zeros(4, 8).numpy())
    writer.add_tensor("b", torch.zeros(64, dtype=torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert check_gguf(path) == (2, 4 * 8 + 64)
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - 64)
    refused(path, "truncated")


def test_our_own_writing_of_the_layout_agrees(path: Path) -> None:
    assert check_gguf(write(path, [pair("k", U32, struct.pack("<I", 7))], [tensor("a", (4, 2))], data=32)) == (1, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": b"GGML"}, "no little-endian GGUF file"),
        ({"version": 1}, "version 2 or 3"),
        ({"version": 3 << 24}, "little-endian"),
        ({"tensors": HUGE}, f"{HUGE} tensors"),
        ({"pairs": HUGE}, f"{HUGE} keys"),
        ({"tensors": 1000}, "cut off"),
        ({"pairs": 1000}, "cut off"),
    ],
)
def test_a_head_that_declares_what_is_not_there_is_refused(changes: dict[str, Any], words: str, path: Path) -> None:
    refused(write(path, [], [], **changes), words)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (struct.pack("<Q", HUGE), f"a text of {HUGE} bytes"),
        (struct.pack("<Q", 1 << 20), "cut off"),
        (pair("k", 13, b""), "'k' has the unknown type 13"),
        (pair("k", STRING, struct.pack("<Q", HUGE)), f"a text of {HUGE} bytes"),
        (pair("k", ARRAY, struct.pack("<IQ", 0, HUGE)), f"'k' declares {HUGE} entries"),
        (pair("k", ARRAY, struct.pack("<IQ", STRING, HUGE)), f"'k' declares {HUGE} entries"),
        (pair("k", ARRAY, struct.pack("<IQ", U64, 1 << 20)), "cut off"),
        (pair("k", ARRAY, struct.pack("<IQ", STRING, 1 << 20)), "cut off"),
        (pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "'k' is an array of the type 9"),
        (pair("llama.block_count", U32, struct.pack("<I", 10**9)), "block_count is 1e+09"),
        (pair("general.alignment", U32, struct.pack("<I", 0)), "its alignment is 0"),
        (pair("general.alignment", STRING, text("x")), "its alignment is None"),
    ],
    ids=str,
)
def test_a_value_that_declares_more_than_there_is_is_refused(entry: bytes, words: str, path: Path) -> None:
    refused(write(path, [entry], []), words)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([tensor("a", (4,) * 5)], "'a' has 5 dimensions"),
        ([text("a") + struct.pack("<I", 1 << 31)], "dimensions"),
        ([tensor("a", (4,), kind=99)], "'a' has the unknown type 99"),
        ([tensor("a", (HUGE, HUGE))], "truncated"),
        ([tensor("a", (8,), offset=HUGE)], "truncated"),
        ([tensor("a", (9,))], "truncated"),
        ([tensor(f"t{n}", (8,)) for n in range(100)], "overlap"),
    ],
)
def test_tensors_that_do_not_fit_in_the_file_are_refused(tensors: list[bytes], words: str, path: Path) -> None:
    refused(write(path, [], tensors, data=32), words)


def test_a_file_that_is_not_there_is_one_error(path: Path) -> None:
    refused(path, "cannot be read")
