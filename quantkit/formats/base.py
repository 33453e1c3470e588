"""What a format is: a small object that turns one QuantizedTensor into stored tensors and back, and writes a config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from quantkit.tensorfile import TensorSpec
from quantkit.types import QuantizedTensor, QuantScheme


@dataclass(frozen=True)
class StoredLayer:
    """One quantised layer as a config has to name it.

    name: module name on disk. module: module name in the model of transformers, which may differ. scheme: its format.
    embedding: whether it is a table that token ids look up, instead of a linear.
    """

    name: str
    module: str
    scheme: QuantScheme
    embedding: bool = False


class Format(Protocol):
    """Local names, inputs untouched, nothing quantised again. `spec` works without data, so sizes can be planned."""

    int8_activations: bool
    """Whether inputs are rounded to int8 a token as well, so that products are integer."""

    def spec(self, name: str, shape: tuple[int, int], scheme: QuantScheme) -> list[TensorSpec]:
        """The tensors that `pack` will write for module `name` with a weight of `shape`."""
        ...

    def pack(self, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        """The tensors on disk, by local name."""
        ...

    def unpack(self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme) -> QuantizedTensor:
        """The codes, scales and zeros of what `pack` wrote. Raises ArtifactError where the tensors do not fit."""
        ...

    def unpack_rows(
        self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme, rows: torch.Tensor
    ) -> QuantizedTensor:
        """`unpack` of the output rows `rows` (int64 `[n]`) alone: codes `[n, in]`, nothing else is decoded.

        Raises ArtifactError where the tensors do not fit, IndexError for a row that is not there.
        """
        ...

    def for_embedding(self, scheme: QuantScheme) -> "Format":
        """The format in which an embedding of this scheme is stored: this one, or a sibling."""
        ...

    def config(self, layers: list[StoredLayer], dense: list[str], experts: list[str]) -> dict[str, Any]:
        """`quantization_config` for config.json.

        dense: names of layers that stay unquantised. experts: modules on disk whose expert weights stay unquantised
        and are stacked by the reader.
        """
        ...

    def readers(self, layers: list[StoredLayer]) -> dict[str, str]:
        """How each known reader takes the file: reader to a short sentence."""
        ...
