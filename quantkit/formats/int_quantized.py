"""The compressed-tensors format of plain int8 (`int-quantized`): W8A8 by integer products, and embeddings of 8 bits.

For a linear of weight [O, I] or an embedding [O, I], under `<module>.`:

    weight        int8  [O, I]       code - 128
    weight_scale  float [O, I / g]   ([O, 1] per channel and per tensor, as always with 8-bit activations)

Nothing is stored for activations: each token is rounded, when it comes, on its own absmax scale.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import ArtifactError
from quantkit.formats.base import Format, StoredLayer
from quantkit.formats.compressed_tensors import INT8, config_frame, config_groups
from quantkit.tensorfile import TensorSpec
from quantkit.types import QuantizedTensor, QuantScheme

_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


class IntQuantized:
    """`int-quantized`: 8 bits, symmetric. Linears have a scale a channel and dynamic activations a token."""

    int8_activations = True

    def spec(self, name: str, shape: tuple[int, int], scheme: QuantScheme) -> list[TensorSpec]:
        return [
            TensorSpec(f"{name}.weight", torch.int8, shape),
            TensorSpec(f"{name}.weight_scale", scheme.torch_scale_dtype, (shape[0], scheme.groups(shape[1]))),
        ]

    def pack(self, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {"weight": _moved(tensor.codes).view(torch.int8), "weight_scale": tensor.scales}

    def unpack(self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme) -> QuantizedTensor:
        weight, scales = stored["weight"], stored["weight_scale"]
        if weight.dtype != torch.int8 or scales.shape != (len(weight), scheme.groups(weight.shape[1])):
            raise ArtifactError("int8 tensors do not fit the scheme", "convert again")
        return QuantizedTensor(_moved(weight.view(torch.uint8)), scales, None, scheme)

    def unpack_rows(
        self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme, rows: torch.Tensor
    ) -> QuantizedTensor:
        return self.unpack({name: tensor.index_select(0, rows) for name, tensor in stored.items()}, scheme)

    def for_embedding(self, scheme: QuantScheme) -> Format:  # noqa: ARG002
        return self

    def config(self, layers: list[StoredLayer], dense: list[str], experts: list[str]) -> dict[str, Any]:
        return config_frame(INT8, config_groups(layers, lambda _: INT8), dense, experts, _ACTIVATIONS)

    def readers(self, layers: list[StoredLayer]) -> dict[str, str]:
        if not layers:
            return {"quantkit": "yes, unquantised", "transformers": "yes, unquantised", "vllm": "yes, unquantised"}
        return {"quantkit": "yes, integer products", "transformers": "yes, simulated in float", "vllm": "yes, CUTLASS"}


def _moved(codes: torch.Tensor) -> torch.Tensor:
    """Bytes moved by 128, from codes to signed values or back: the highest bit flips, and a table is not widened."""
    return codes ^ 0x80
