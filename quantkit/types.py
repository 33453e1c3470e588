"""The words of the toolkit as types, and the number conventions, decided once.

W is `[out, in]`. Codes are uint8 `[out, in]`, unsigned, `0 .. 2**bits - 1`. Scales are `[out, groups]` in the dtype of
the file; zeros are uint8 `[out, groups]` in code units, or None for a symmetric scheme, where the zero is the constant
`2**(bits - 1)`. A group is `in / groups` consecutive input columns; `dequantised = (codes - zeros[g]) * scales[g]`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

Granularity = Literal["tensor", "channel", "group"]

SCALE_DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True)
class QuantScheme:
    """The number format of one weight tensor.

    bits: width of a code, 2 to 8.
    granularity: what shares one scale: the whole tensor, an output channel, or `group_size` inputs of a channel.
    symmetric: the zero is the middle code (absmax scale); otherwise a zero-point is stored (min-max scale).
    scale_dtype: name of the dtype in which the file stores scales; codes are chosen against the rounded scale.
    """

    bits: int
    granularity: Granularity
    group_size: int | None = None
    symmetric: bool = True
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be 2 to 8, not {self.bits}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError("group_size belongs to granularity 'group', and only to it")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size must be positive, not {self.group_size}")
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be one of {', '.join(SCALE_DTYPES)}, not {self.scale_dtype}")

    @property
    def levels(self) -> int:
        """Number of codes, `2**bits`."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The zero of a symmetric scheme, `2**(bits - 1)`."""
        return 1 << (self.bits - 1)

    @property
    def torch_scale_dtype(self) -> torch.dtype:
        return SCALE_DTYPES[self.scale_dtype]

    def groups(self, in_features: int) -> int:
        """Number of scales of one row. Raises ValueError where the group size does not divide `in_features`."""
        if self.group_size is None:
            return 1
        if in_features % self.group_size:
            raise ValueError(f"group size {self.group_size} does not divide the input width {in_features}")
        return in_features // self.group_size

    def with_group_size(self, group_size: int) -> "QuantScheme":
        return replace(self, group_size=group_size)

    def describe(self) -> str:
        """Short human form, as in `int4 g64 zp`."""
        where = {"tensor": "tensor", "channel": "channel", "group": f"g{self.group_size}"}[self.granularity]
        return f"int{self.bits} {where} {'sym' if self.symmetric else 'zp'}"

    def nominal_bits(self, in_features: int) -> float:
        """Bits per weight by the book: code, scale and zero-point of one row, without padding or shape records."""
        scale_bits = torch.finfo(self.torch_scale_dtype).bits
        zero_bits = 0 if self.symmetric else self.bits
        return self.bits + self.groups(in_features) * (scale_bits + zero_bits) / in_features


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes with their scales and zeros, as chosen once and carried to the packer unchanged.

    codes: uint8 `[out, in]`; scales: `[out, groups]` in the scheme's dtype, finite and not zero, positive unless a
    search chose otherwise for a symmetric scheme; zeros: uint8 `[out, groups]`, or None for a symmetric scheme.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    scheme: QuantScheme

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def split(self, rows: list[int]) -> "list[QuantizedTensor]":
        """The tensors of so many output rows each, in turn."""
        zeros = [None] * len(rows) if self.zeros is None else self.zeros.split(rows)
        parts = zip(self.codes.split(rows), self.scales.split(rows), zeros, strict=True)
        return [QuantizedTensor(codes, scales, zero, self.scheme) for codes, scales, zero in parts]

    def rows(self, order: torch.Tensor) -> "QuantizedTensor":
        """The tensor of the output rows with the numbers `order`, in that order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return QuantizedTensor(self.codes[order], self.scales[order], zeros, self.scheme)

    @classmethod
    def join(cls, parts: "list[QuantizedTensor]") -> "QuantizedTensor":
        """The tensor of all rows of `parts`, which have one scheme."""
        codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return cls(codes, scales, torch.cat(zeros) if zeros else None, parts[0].scheme)


@dataclass
class CalibrationStats:
    """What calibration saw at the input of one set of linears: additive sums with counts.

    gram: float64 `[in, in]`, the sum of x x^T over tokens; absmax: float32 `[in]`; abs_sum: float64 `[in]`, the sum of
    |x|; tokens: how many; samples: float32 `[kept, in]`, a few inputs as they were.
    """

    gram: torch.Tensor
    absmax: torch.Tensor
    abs_sum: torch.Tensor
    tokens: int
    samples: torch.Tensor

    @property
    def act_mean(self) -> torch.Tensor:
        """Mean |x| of each channel, float32 `[in]`."""
        return (self.abs_sum / max(1, self.tokens)).float()

    @cached_property
    def hessian(self) -> torch.Tensor:
        """The mean of x x^T over tokens, float32 `[in, in]`: H of the algorithms."""
        return (self.gram / self.tokens).float()

    def scaled(self, scales: torch.Tensor) -> "CalibrationStats":
        """The statistics of inputs divided by `scales` `[in]`: exact, for every sum is a monomial in each channel."""
        wide = scales.double()
        return CalibrationStats(
            self.gram / wide / wide.unsqueeze(1),
            self.absmax / scales,
            self.abs_sum / wide,
            self.tokens,
            self.samples / scales,
        )


@dataclass(frozen=True)
class FoldSite:
    """A place where a per-channel scale can move from a producer into *all* consumers.

    kind: "norm" (its weight and bias), "offset_norm" (it multiplies by 1 + weight) or "linear" (output rows).
    producer, consumers: module names in the block. channel: int64 `[in]`, the producer's channel behind each input of
    the consumers (grouped heads repeat one). residual: the largest relative change of the block's output when random
    scales were folded; a site is used only where that is within tolerance.
    """

    kind: Literal["norm", "offset_norm", "linear"]
    producer: str
    consumers: tuple[str, ...]
    channel: torch.Tensor
    residual: float = float("nan")
