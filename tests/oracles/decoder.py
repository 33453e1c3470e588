"""An independent reader of pack-quantized files: Python integers and numpy, nothing of quantkit, nothing of torch.

It follows the description of the format: every row is one little-endian integer, code n stands in its bits
`n * bits .. (n + 1) * bits - 1`; zero-points are packed the same way along the output axis, one group a column.

`python -m tests.oracles.decoder` prints the golden vectors of tests/golden/compressed_tensors.json.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

_NUMPY = {"F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8", "BF16": "<u2"}


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file; bfloat16 widened to float32, other dtypes that we do not need left out."""
    tensors = {}
    for name, record in safetensors.deserialize(path.read_bytes()):
        if record["dtype"] in _NUMPY:
            values = np.frombuffer(bytes(record["data"]), _NUMPY[record["dtype"]]).reshape(record["shape"])
            if record["dtype"] == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = values
    return tensors


def decode(tensors: dict[str, np.ndarray], name: str, bits: int, symmetric: bool) -> np.ndarray:
    """The float32 weight `[out, in]` of module `name`."""
    rows, columns = (int(size) for size in tensors[f"{name}.weight_shape"])
    scales = tensors[f"{name}.weight_scale"].astype(np.float32)
    groups = scales.shape[1]
    codes = [_codes(row, bits, columns) for row in tensors[f"{name}.weight_packed"]]
    if symmetric:
        zeros = [[1 << (bits - 1)] * groups] * rows
    else:
        by_group = [_codes(column, bits, rows) for column in tensors[f"{name}.weight_zero_point"].T]
        zeros = [[by_group[g][o] for g in range(groups)] for o in range(rows)]
    weight = np.empty((rows, columns), np.float32)
    for o in range(rows):
        for i in range(columns):
            g = i * groups // columns
            weight[o, i] = np.float32(codes[o][i] - zeros[o][g]) * scales[o, g]
    return weight


def encode(codes: list[int], bits: int) -> bytes:
    """One row of codes as the bytes of its words."""
    stream = sum(code << (bits * n) for n, code in enumerate(codes))
    return stream.to_bytes(4 * -(-len(codes) * bits // 32), "little")


def _codes(words: np.ndarray, bits: int, count: int) -> list[int]:
    stream = int.from_bytes(np.ascontiguousarray(words).tobytes(), "little")
    return [(stream >> (bits * n)) & ((1 << bits) - 1) for n in range(count)]


def golden_case(bits: int, symmetric: bool, rows: int, columns: int, groups: int) -> dict[str, Any]:
    """Bytes of every stored tensor and of the decoded weight, from fixed codes and scales."""
    low, levels = int(symmetric), 1 << bits
    codes = [[low + (7 * o + 5 * i) % (levels - low) for i in range(columns)] for o in range(rows)]
    zeros = [[levels // 2 if symmetric else (3 * o + 2 * g) % levels for g in range(groups)] for o in range(rows)]
    scales = np.array([[(1 + o + 3 * g) / 48 for g in range(groups)] for o in range(rows)], np.float16)
    steps = np.array([[codes[o][i] - zeros[o][i * groups // columns] for i in range(columns)] for o in range(rows)])
    weight = steps.astype(np.float32) * np.repeat(scales.astype(np.float32), columns // groups, axis=1)
    packed_zeros = [encode([zeros[o][g] for o in range(rows)], bits) for g in range(groups)]
    words = np.array([np.frombuffer(column, "<i4") for column in packed_zeros]).T
    case = {
        "bits": bits,
        "symmetric": symmetric,
        "shape": [rows, columns],
        "groups": groups,
        "codes": codes,
        "weight_packed": b"".join(encode(row, bits) for row in codes).hex(),
        "weight_scale": scales.tobytes().hex(),
        "decoded_float32": weight.tobytes().hex(),
    }
    return case if symmetric else {**case, "zeros": zeros, "weight_zero_point": words.tobytes().hex()}


def golden_cases() -> list[dict[str, Any]]:
    """Rows and columns that fill no word, for every width, with several groups and with one."""
    return [
        golden_case(bits, symmetric, rows, columns, groups)
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for rows, columns, groups in ((3, 10, 2), (5, 13, 1))
    ]


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(case) for case in golden_cases()) + "\n]")
