"""Bit packing: words that a reader can check by hand, an oracle of Python integers, and the reference library."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.bitpack import pack_int32, packed_width, unpack_columns, unpack_int32

SHAPES = [(1, 1), (1, 7), (3, 8), (5, 11), (2, 31), (4, 32), (3, 33), (2, 43), (7, 96)]


def random_codes(rows: int, count: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, count), generator=generator, dtype=torch.uint8)


def words_of(packed: torch.Tensor) -> list[list[int]]:
    """Packed words as unsigned Python integers."""
    return [[word & 0xFFFFFFFF for word in row] for row in packed.tolist()]


def packed_by_hand(row: list[int], bits: int) -> list[int]:
    """One row as one large integer, least significant bits first, cut into 32-bit words."""
    stream = sum(code << (bits * n) for n, code in enumerate(row))
    return [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-len(row) * bits // 32))]


@pytest.mark.parametrize(
    ("bits", "codes", "words"),
    [
        (2, [0, 1, 2, 3] * 4, [0b11100100_11100100_11100100_11100100]),
        (2, [3], [0b11]),
        (3, [0, 1, 2, 3, 4, 5, 6, 7], [0o76543210]),  # one octal digit is one code
        (3, [0] * 10 + [0b111], [0b11 << 30, 0b1]),  # the eleventh code straddles two words
        (4, [1, 2, 3, 4, 5, 6, 7, 8], [0x87654321]),
        (4, [0, 0, 0, 0, 0, 0, 0, 15, 9], [0xF0000000, 0x9]),  # nothing but the end of a row is padded
        (8, [1, 2, 3, 4], [0x04030201]),
        (8, [255, 0, 0, 128, 7], [0x800000FF, 0x7]),
    ],
)
def test_words_are_the_ones_worked_out_by_hand(bits: int, codes: list[int], words: list[int]) -> None:
    packed = pack_int32(torch.tensor([codes], dtype=torch.uint8), bits)
    assert packed.dtype == torch.int32
    assert words_of(packed) == [words]
    assert unpack_int32(packed, bits, len(codes)).tolist() == [codes]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_equals_one_large_integer_a_row(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, bits)
    assert words_of(pack_int32(codes, bits)) == [packed_by_hand(row, bits) for row in codes.tolist()]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_equals_the_reference_library(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, bits)
    signed = (codes.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)
    assert torch.equal(pack_int32(codes, bits), pack_to_int32(signed, bits))


@settings(max_examples=150, deadline=None)
@given(bits=st.integers(2, 8), rows=st.integers(1, 6), count=st.integers(1, 140), seed=st.integers(0, 1 << 30))
def test_unpacking_gives_back_every_code(bits: int, rows: int, count: int, seed: int) -> None:
    codes = random_codes(rows, count, bits, seed)
    packed = pack_int32(codes, bits)
    assert packed.shape == (rows, packed_width(count, bits))
    restored = unpack_int32(packed, bits, count)
    assert restored.dtype == torch.uint8
    assert torch.equal(restored, codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_largest_codes_do_not_spill_into_their_neighbours(bits: int) -> None:
    codes = torch.zeros(1, 24, dtype=torch.uint8)
    codes[0, ::3] = (1 << bits) - 1
    assert torch.equal(unpack_int32(pack_int32(codes, bits), bits, 24), codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_views_that_are_not_contiguous_pack_like_their_copies(bits: int) -> None:
    codes = random_codes(10, 6, bits)
    packed = pack_int32(codes.T, bits)
    assert torch.equal(packed, pack_int32(codes.T.contiguous(), bits))
    wide = torch.stack([packed, packed], dim=-1)[..., 0]
    assert torch.equal(unpack_int32(wide, bits, 10), codes.T)


def test_packing_leaves_its_input_alone() -> None:
    codes = random_codes(3, 13, 3)
    before = codes.clone()
    unpack_int32(pack_int32(codes, 3), 3, 13)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("words", [0, 1, 3])
def test_unpacking_another_width_says_what_was_expected(words: int) -> None:
    with pytest.raises(ValueError, match=f"9 codes of 4 bits take 2 words, not {words}"):
        unpack_int32(torch.zeros(1, words, dtype=torch.int32), 4, 9)


@pytest.mark.parametrize(("count", "bits", "words"), [(1, 2, 1), (16, 2, 1), (17, 2, 2), (10, 3, 1), (11, 3, 2)])
def test_packed_width_rounds_up_to_whole_words(count: int, bits: int, words: int) -> None:
    assert packed_width(count, bits) == words


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_single_columns_are_those_of_the_whole_row(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(*shape, bits)
    columns = torch.randint(0, shape[1], (20,), generator=torch.Generator().manual_seed(bits))
    found = unpack_columns(pack_int32(codes, bits), bits, columns)
    assert found.dtype == torch.uint8
    assert torch.equal(found, codes[:, columns])
