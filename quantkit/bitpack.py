"""Dense bit packing into int32 words, least significant bits first, along the last axis.

    bits = 4, word w:  | code 8w+7 | ... | code 8w+1 | code 8w |      code 8w+k in bits 4k .. 4k+3
    bits = 3: eight codes fill three bytes; codes may straddle words, nothing is padded but the end of a row

A row of n codes takes ceil(n * bits / 32) words. This is the layout that compressed-tensors reads since 0.18, and for
2, 4 and 8 bits the one that every version reads.
"""

import torch

# Rows are unpacked in slices of about so many codes: temporaries of whole layers would stay in the heap for good.
_SLICE_CODES = 1 << 18


def packed_width(count: int, bits: int) -> int:
    """Number of int32 words that `count` codes of `bits` bits take."""
    return -(-count * bits // 32)


def pack_int32(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes `[rows, n]`, each below 2**bits, to int32 `[rows, ceil(n * bits / 32)]`."""
    rows, count = codes.shape
    words = packed_width(count, bits)
    unit = _codes_per_unit(bits)
    padded = -(-words * 32 // (bits * unit)) * unit
    if padded != count:
        codes = torch.nn.functional.pad(codes, (0, padded - count))
    units = codes.reshape(rows, padded // unit, unit)
    # Whole bytes stay in uint8; eight codes of 3, 5, 6 or 7 bits need a wider accumulator.
    wide = torch.uint8 if unit * bits == 8 else torch.int64
    merged = units[..., 0].to(wide)
    for k in range(1, unit):
        merged = merged | (units[..., k].to(wide) << (bits * k))
    data = merged.contiguous().view(torch.uint8).reshape(rows, padded // unit, -1)[..., : unit * bits // 8]
    # A single row that was cut keeps the stride of the longer one, which a wider dtype refuses: view the flat bytes.
    return data.reshape(rows, -1)[:, : words * 4].reshape(-1).view(torch.int32).reshape(rows, words)


def unpack_int32(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 `[rows, ceil(count * bits / 32)]` back to uint8 codes `[rows, count]`. Raises ValueError if not so wide."""
    rows, words = packed.shape
    if words != packed_width(count, bits):
        raise ValueError(f"{count} codes of {bits} bits take {packed_width(count, bits)} words, not {words}")
    unit = _codes_per_unit(bits)
    units = -(-count // unit)
    codes = torch.empty(rows, units, unit, dtype=torch.uint8)
    step = max(1, _SLICE_CODES // max(1, count))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        merged = _merged_units(packed[part], units, unit * bits // 8)
        for k in range(unit):
            codes[part, :, k] = (merged >> (bits * k)) & ((1 << bits) - 1)
    return codes.reshape(rows, units * unit)[:, :count].contiguous()


def unpack_columns(packed: torch.Tensor, bits: int, columns: torch.Tensor) -> torch.Tensor:
    """The codes at `columns` (int64 `[n]`) of each row of int32 `[rows, words]`, as uint8 `[rows, n]`.

    A code lies in one word or straddles two, so two are read for each.
    """
    first, shift = columns * bits // 32, columns * bits % 32
    last = (columns * bits + bits - 1) // 32
    low, high = (packed.index_select(1, words).to(torch.int64) & 0xFFFFFFFF for words in (first, last))
    return ((((high << 32) | low) >> shift) & ((1 << bits) - 1)).to(torch.uint8)


def _merged_units(packed: torch.Tensor, units: int, size: int) -> torch.Tensor:
    """The first `units` runs of `size` bytes of each row, each as one integer `[rows, units]`."""
    rows = packed.shape[0]
    data = packed.contiguous().view(torch.uint8).reshape(rows, -1)
    if units * size > data.shape[1]:
        data = torch.nn.functional.pad(data, (0, units * size - data.shape[1]))
    data = data[:, : units * size].reshape(rows, units, size)
    if size == 1:
        return data[..., 0]
    return torch.stack([data[..., b].to(torch.int64) << (8 * b) for b in range(size)]).sum(0)


def _codes_per_unit(bits: int) -> int:
    """Codes that fill whole bytes: a byte's worth where bits divides 8, else eight codes in `bits` bytes."""
    return 8 // bits if 8 % bits == 0 else 8
