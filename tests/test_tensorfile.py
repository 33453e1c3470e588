"""safetensors files: hostile headers are errors that name file and tensor, and the reference library agrees."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit import tensorfile
from quantkit.errors import ArtifactError, CheckpointError
from quantkit.tensorfile import (
    DTYPES,
    TensorEntry,
    TensorFileWriter,
    TensorSpec,
    layout,
    read_chunks,
    read_header,
    read_tensor,
)

WHOLE = [("F32", [2, 3]), ("BF16", [4]), ("U8", [5]), ("I64", []), ("F16", [0, 7])]


def raw_file(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def json_file(path: Path, header: Any, data: bytes = b"") -> Path:
    return raw_file(path, json.dumps(header).encode(), data)


def record(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    as_list = [list(v) if isinstance(v, tuple) else v for v in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


def random_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every dtype, with scalars and empty ones, from random bytes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for n, (name, dtype) in enumerate(DTYPES.items()):
        shape = [(3, 5), (), (0, 4), (7,)][n % 4]
        count = int(torch.tensor(shape).prod()) * dtype.itemsize
        data = torch.randint(0, 2 if name == "BOOL" else 256, (count,), generator=generator, dtype=torch.uint8)
        tensors[f"t.{name}"] = data.view(dtype).reshape(shape)
    return tensors


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> tensorfile.FileLayout:
    plan = layout(path, [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()])
    writer = TensorFileWriter(path, plan)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    return plan


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_the_length_is_truncated(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x02" + b"\0" * (size - 1) if size else b"")
    refused(path, "header is truncated")


@pytest.mark.parametrize("length", [0, 1, 3, 100, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_a_header_length_that_the_file_cannot_hold_is_absurd(tmp_path: Path, length: int) -> None:
    refused(raw_file(tmp_path / "m.safetensors", b"{}", length=length), "its length is absurd")


def test_a_header_beyond_the_limit_is_refused_even_where_the_file_is_as_long(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", b"{}", length=100_000_001)
    os.truncate(path, 100_000_100)  # sparse: no bytes are written
    refused(path, "its length is absurd")


def test_every_truncation_of_a_file_is_an_error(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    write(whole, {"a": torch.ones(3), "b": torch.ones(5, dtype=torch.uint8)})
    data = whole.read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        refused(path)


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    refused(tmp_path / "gone.safetensors", "cannot be read", "No such file")


def test_a_folder_in_place_of_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").mkdir()
    refused(tmp_path / "m.safetensors", "cannot be read")


@pytest.mark.parametrize(
    "header",
    [
        b'{"a"',
        b"not json at all",
        b"{}garbage",
        b"\xff\xfe\xfd\xfc",
        b"{\x00}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 5000 + b"}",
        '{"a": {}}'.encode("utf-16"),
        "{}".encode("utf-32"),
        b"\xef\xbb\xbf{}",
    ],
    ids=["open", "text", "garbage", "not utf-8", "nul", "deep", "digits", "utf-16", "utf-32", "byte order mark"],
)
def test_a_header_that_is_not_json_in_utf_8_is_refused(tmp_path: Path, header: bytes) -> None:
    refused(raw_file(tmp_path / "m.safetensors", header), "the header is not JSON")


@pytest.mark.parametrize("header", [[], "text", 12, None, True])
def test_a_header_that_is_not_an_object_is_refused(tmp_path: Path, header: Any) -> None:
    refused(raw_file(tmp_path / "m.safetensors", json.dumps(header).encode() + b"  "), "is not a JSON object")


def test_a_name_that_stands_twice_is_named(tmp_path: Path) -> None:
    one = json.dumps(record())
    header = f'{{"a.weight": {one}, "a.weight": {one}}}'.encode()
    refused(raw_file(tmp_path / "m.safetensors", header, b"\0" * 8), "'a.weight' twice")


def test_a_name_longer_than_any_is_refused(tmp_path: Path) -> None:
    """Libraries make an integer of its digits, and stop there."""
    name = f"model.layers.{'1' * 5000}.weight"
    refused(json_file(tmp_path / "m.safetensors", {name: record()}, b"\0" * 8), "a tensor's name has 5020 characters")


def test_a_key_that_stands_twice_in_a_record_is_named(tmp_path: Path) -> None:
    header = b'{"a": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}'
    refused(raw_file(tmp_path / "m.safetensors", header, b"\0" * 8), "'shape' twice")


@pytest.mark.parametrize("dtype", ["F4", "f32", "", None, 32, ["F32"], {"F32": 1}, True])
def test_an_unknown_dtype_is_named_with_its_tensor(tmp_path: Path, dtype: Any) -> None:
    path = json_file(tmp_path / "m.safetensors", {"w": record(dtype)}, b"\0" * 8)
    refused(path, "tensor 'w'", f"unknown dtype {dtype!r}")


@pytest.mark.parametrize(
    "shape",
    [(-2,), (-1, -2), (True, 2), (2.0,), ("2",), (None,), ([2],), "2", 2, None, {"0": 2}, (1 << 62,), (1 << 80,)],
    ids=str,
)
def test_a_shape_that_is_not_whole_numbers_is_refused(tmp_path: Path, shape: Any) -> None:
    path = json_file(tmp_path / "m.safetensors", {"w": record(shape=shape)}, b"\0" * 8)
    refused(path, "tensor 'w'", "no usable shape")


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 40), (1 << 61, 8), (1 << 33, 1 << 31)], ids=str)
def test_a_product_that_wraps_around_in_64_bits_does_not_fit(tmp_path: Path, shape: tuple[int, int]) -> None:
    path = json_file(tmp_path / "m.safetensors", {"w": record(shape=shape, offsets=(0, 0))})
    refused(path, "tensor 'w'", "does not fit shape")


@pytest.mark.parametrize(
    "offsets", [(-8, 0), (0.0, 8.0), (False, 8), ("0", "8"), "08", None, {"0": 8}, (0, 1 << 62)], ids=str
)
def test_offsets_that_are_not_whole_numbers_are_refused(tmp_path: Path, offsets: Any) -> None:
    path = json_file(tmp_path / "m.safetensors", {"w": record(offsets=offsets)}, b"\0" * 8)
    refused(path, "tensor 'w'", "no usable shape and data_offsets")


@pytest.mark.parametrize("offsets", [(), (0,), (0, 8, 16), (8, 0), (0, 7), (0, 9)], ids=str)
def test_a_byte_range_of_another_size_is_refused(tmp_path: Path, offsets: Any) -> None:
    path = json_file(tmp_path / "m.safetensors", {"w": record(offsets=offsets)}, b"\0" * 16)
    refused(path, "tensor 'w'", "does not fit shape [2]")


@pytest.mark.parametrize("value", [None, 1, "F32", [], [1, 2]])
def test_a_record_that_is_not_an_object_is_refused(tmp_path: Path, value: Any) -> None:
    refused(json_file(tmp_path / "m.safetensors", {"w": value}), "tensor 'w'", "no usable shape")


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_record_without_one_of_its_keys_is_refused(tmp_path: Path, key: str) -> None:
    value = record()
    del value[key]
    refused(json_file(tmp_path / "m.safetensors", {"w": value}, b"\0" * 8), "tensor 'w'")


@pytest.mark.parametrize("second", [(0, 8), (4, 12), (0, 4)], ids=str)
def test_overlapping_tensors_are_refused(tmp_path: Path, second: tuple[int, int]) -> None:
    header = {"a": record(), "b": record(shape=((second[1] - second[0]) // 4,), offsets=second)}
    refused(json_file(tmp_path / "m.safetensors", header, b"\0" * 12), "overlaps another tensor")


@pytest.mark.parametrize("start", [8, 12, 4])
def test_a_hole_between_tensors_is_refused(tmp_path: Path, start: int) -> None:
    header = {"a": record(shape=(1,), offsets=(0, 4)), "b": record(offsets=(start, start + 8))}
    path = json_file(tmp_path / "m.safetensors", header, b"\0" * (start + 8))
    if start == 4:
        assert list(read_header(path)) == ["a", "b"]
    else:
        refused(path, "tensor 'b'", "leaves a hole")


def test_a_hole_before_the_first_tensor_is_refused(tmp_path: Path) -> None:
    path = json_file(tmp_path / "m.safetensors", {"a": record(offsets=(8, 16))}, b"\0" * 16)
    refused(path, "tensor 'a'", "leaves a hole")


def test_trailing_bytes_are_counted(tmp_path: Path) -> None:
    refused(json_file(tmp_path / "m.safetensors", {"a": record()}, b"\0" * 11), "3 bytes follow the last tensor")


def test_bytes_after_a_header_without_tensors_are_counted(tmp_path: Path) -> None:
    refused(json_file(tmp_path / "m.safetensors", {"__metadata__": {}}, b"\0" * 5), "5 bytes follow")


def test_a_range_past_the_end_is_a_truncation(tmp_path: Path) -> None:
    refused(json_file(tmp_path / "m.safetensors", {"a": record()}, b"\0" * 7), "tensor 'a'", "truncated")


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error_on_reading(tmp_path: Path) -> None:
    path = json_file(tmp_path / "m.safetensors", {"a": record()}, b"\0" * 8)
    entry = read_header(path)["a"]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="tensor 'a' is cut off"):
        read_tensor(entry)
    with pytest.raises(CheckpointError, match="tensor 'a' is cut off"):
        list(read_chunks(entry))


def test_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    path = json_file(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, "a": record()}, b"\0" * 8)
    assert list(read_header(path)) == ["a"]


def valid_file() -> bytes:
    header = json.dumps({f"w{n}": record(d, s, o) for n, (d, s, o) in enumerate(_ranges())}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(_ranges()[-1][2][1])


def _ranges() -> list[tuple[str, list[int], list[int]]]:
    position, ranges = 0, []
    for dtype, shape in WHOLE:
        size = DTYPES[dtype].itemsize
        for length in shape:
            size *= length
        ranges.append((dtype, shape, [position, position + size]))
        position += size
    return ranges


def only_checkpoint_errors(path: Path, data: bytes) -> None:
    """Reading gives tensors that lie inside the file, or a CheckpointError; anything else fails the test."""
    path.write_bytes(data)
    try:
        entries = read_header(path)
    except CheckpointError:
        return
    for entry in entries.values():
        assert 8 <= entry.start <= entry.stop <= len(data)
        assert read_tensor(entry).shape == entry.shape


def test_the_file_that_the_fuzz_starts_from_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(valid_file())
    assert [(e.dtype, list(e.shape)) for e in read_header(path).values()] == [(DTYPES[d], s) for d, s in WHOLE]


FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(changes=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes_raise_nothing_but_checkpoint_errors(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(valid_file())
    for place, value in changes:
        data[place % len(data)] = value
    only_checkpoint_errors(tmp_path / "m.safetensors", bytes(data))


@FUZZ
@given(header=st.binary(max_size=200), data=st.binary(max_size=16))
def test_random_headers_raise_nothing_but_checkpoint_errors(tmp_path: Path, header: bytes, data: bytes) -> None:
    only_checkpoint_errors(tmp_path / "m.safetensors", struct.pack("<Q", len(header)) + header + data)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | _JSON,
        "shape": st.lists(st.integers(-2, 1 << 65) | st.integers(0, 4), max_size=3) | _JSON,
        "data_offsets": st.lists(st.integers(0, 24), min_size=2, max_size=2) | _JSON,
    }
)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=4), _FIELDS | _JSON, max_size=4), size=st.integers(0, 24))
def test_well_formed_headers_with_wild_values_raise_nothing_but_checkpoint_errors(
    tmp_path: Path, header: dict[str, Any], size: int
) -> None:
    text = json.dumps(header).encode()
    only_checkpoint_errors(tmp_path / "m.safetensors", struct.pack("<Q", len(text)) + text + bytes(size))


def test_files_of_the_reference_library_are_read_to_the_byte(tmp_path: Path) -> None:
    tensors = random_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    entries = read_header(tmp_path / "m.safetensors")
    assert set(entries) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bytes(read_tensor(entries[name]), tensor), name


def test_the_reference_library_reads_our_files_to_the_byte(tmp_path: Path) -> None:
    tensors = random_tensors()
    write(tmp_path / "m.safetensors", tensors)
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert same_bytes(loaded[name], tensor), name


def test_names_beyond_ascii_survive(tmp_path: Path) -> None:
    tensors = {'层.0."w"\\': torch.ones(2), "é": torch.zeros(1)}
    write(tmp_path / "m.safetensors", tensors)
    assert set(read_header(tmp_path / "m.safetensors")) == set(tensors)
    assert set(safetensors.torch.load_file(tmp_path / "m.safetensors")) == set(tensors)


def test_every_tensor_is_aligned_to_its_item_and_the_header_to_eight_bytes(tmp_path: Path) -> None:
    tensors = {f"n{'x' * n}.{name}": tensor for n, (name, tensor) in enumerate(random_tensors().items())}
    plan = write(tmp_path / "m.safetensors", tensors)
    assert len(plan.header) % 8 == 0
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in plan.entries.values())
    assert plan.size == (tmp_path / "m.safetensors").stat().st_size


def test_the_layout_depends_on_the_tensors_and_not_on_their_order(tmp_path: Path) -> None:
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in random_tensors().items()]
    assert layout(tmp_path, specs).header == layout(tmp_path, specs[::-1]).header


def test_the_planned_entries_are_the_ones_that_are_read_back(tmp_path: Path) -> None:
    plan = write(tmp_path / "m.safetensors", random_tensors())
    assert plan.entries == read_header(tmp_path / "m.safetensors")
    assert all(entry.nbytes == entry.numel * entry.dtype.itemsize for entry in plan.entries.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_chunks_join_to_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(tensorfile, "_COPY_BYTES", 16)
    tensor = torch.arange(45).to(dtype).reshape(5, 9)
    plan = write(tmp_path / "a.safetensors", {"w": tensor})
    chunks = list(read_chunks(plan.entries["w"]))
    assert len(chunks) == -(-45 * dtype.itemsize // 16)
    assert torch.equal(torch.cat(chunks).reshape(5, 9), tensor)
    copy = layout(tmp_path / "b.safetensors", [TensorSpec("w", dtype, (5, 9))])
    writer = TensorFileWriter(tmp_path / "b.safetensors", copy)
    writer.write_chunks("w", iter(chunks))
    writer.close()
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_tensors_may_be_written_in_any_order_and_from_views(tmp_path: Path) -> None:
    a, b = torch.randn(4, 6), torch.randn(3)
    write(tmp_path / "one.safetensors", {"a": a, "b": b})
    write(tmp_path / "two.safetensors", {"b": b, "a": a.T.contiguous().T})
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


@pytest.fixture
def writer(tmp_path: Path) -> TensorFileWriter:
    plan = layout(
        tmp_path / "m.safetensors", [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.uint8, (3,))]
    )
    return TensorFileWriter(tmp_path / "m.safetensors", plan)


def test_a_tensor_that_was_not_planned_is_refused(writer: TensorFileWriter) -> None:
    with pytest.raises(ArtifactError, match="'c' was not planned"):
        writer.write("c", torch.zeros(2))
    with pytest.raises(ArtifactError, match="'c' was not planned"):
        writer.write_chunks("c", iter([torch.zeros(2)]))


def test_a_tensor_that_comes_twice_is_refused(writer: TensorFileWriter) -> None:
    writer.write("a", torch.zeros(2))
    with pytest.raises(ArtifactError, match="'a' was not planned or came twice"):
        writer.write("a", torch.zeros(2))


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32)], ids=str)
def test_a_tensor_of_another_shape_or_dtype_is_refused(writer: TensorFileWriter, tensor: torch.Tensor) -> None:
    with pytest.raises(ArtifactError, match=r"'a' is .*, planned torch\.float32"):
        writer.write("a", tensor)


@pytest.mark.parametrize("chunks", [[torch.zeros(1)], [torch.zeros(2), torch.zeros(1)], []], ids=len)
def test_chunks_of_another_total_are_refused(writer: TensorFileWriter, chunks: list[torch.Tensor]) -> None:
    with pytest.raises(ArtifactError, match="'a' came with"):
        writer.write_chunks("a", iter(chunks))


def test_a_file_is_gone_on_with_where_it_was_left(tmp_path: Path, writer: TensorFileWriter) -> None:
    writer.write("a", torch.ones(2))
    writer.abort()
    plan = layout(
        tmp_path / "m.safetensors", [TensorSpec("a", torch.float32, (2,)), TensorSpec("b", torch.uint8, (3,))]
    )
    with (tmp_path / "m.safetensors").open("ab") as stream:
        stream.write(b"left over")
    second = TensorFileWriter(tmp_path / "m.safetensors", plan, {"a"})
    with pytest.raises(ArtifactError, match="'a' was not planned or came twice"):
        second.write("a", torch.zeros(2))
    second.write("b", torch.zeros(3, dtype=torch.uint8))
    second.close()
    assert torch.equal(read_tensor(read_header(tmp_path / "m.safetensors")["a"]), torch.ones(2))


def test_flushing_is_left_out_where_nothing_is_new(writer: TensorFileWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    for _ in range(3):
        writer.flush()
    assert len(flushed) == 1, "the header"
    writer.write("a", torch.zeros(2))
    writer.flush()
    assert len(flushed) == 2


def test_a_tensor_that_never_came_is_named_at_the_end(writer: TensorFileWriter) -> None:
    writer.write("a", torch.zeros(2))
    with pytest.raises(ArtifactError, match="'b' was never written"):
        writer.close()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: real(descriptor, bytes(data)[:3], offset))
    tensor = torch.randn(7)
    plan = write(tmp_path / "m.safetensors", {"w": tensor})
    assert torch.equal(read_tensor(plan.entries["w"]), tensor)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(7)
    plan = write(tmp_path / "m.safetensors", {"w": tensor})
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, at: real(descriptor, [buffers[0][:3]], at))
    assert torch.equal(read_tensor(plan.entries["w"]), tensor)


def test_a_full_disk_passes_through_as_the_systems_error(
    writer: TensorFileWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        writer.write("a", torch.zeros(2))


def test_entries_know_their_sizes(tmp_path: Path) -> None:
    entry = TensorEntry("w", torch.float16, (3, 4), tmp_path, 16, 40)
    assert (entry.numel, entry.nbytes) == (12, 24)
