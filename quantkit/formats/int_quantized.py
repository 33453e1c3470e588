"""The compressed-tensors format for 8-bit weights with 8-bit activations (`int-quantized`): W8A8 by integer products.

For a linear of weight [O, I], under `<module>.`:

    weight        int8  [O, I]   code - 128
    weight_scale  float [O, 1]   one scale an output channel (a per-tensor scale is repeated)

Nothing is stored for activations: each token is rounded, when it comes, on its own absmax scale.
"""

from collections.abc import Mapping
from typing import Any

import torch

from quantkit.errors import ArtifactError
from quantkit.formats.base import StoredLayer
from quantkit.formats.compressed_tensors import config_frame
from quantkit.tensorfile import TensorSpec
from quantkit.types import QuantizedTensor, QuantScheme

_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


class IntQuantized:
    """`int-quantized`: 8 bits, symmetric, a scale a channel, dynamic activations a token."""

    int8_activations = True

    def spec(self, name: str, shape: tuple[int, int], scheme: QuantScheme) -> list[TensorSpec]:
        return [
            TensorSpec(f"{name}.weight", torch.int8, shape),
            TensorSpec(f"{name}.weight_scale", scheme.torch_scale_dtype, (shape[0], 1)),
        ]

    def pack(self, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        signed = (tensor.codes.to(torch.int16) - tensor.scheme.midpoint).to(torch.int8)
        return {"weight": signed, "weight_scale": tensor.scales}

    def unpack(self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme) -> QuantizedTensor:
        weight, scales = stored["weight"], stored["weight_scale"]
        if weight.dtype != torch.int8 or scales.shape != (len(weight), 1):
            raise ArtifactError("int8 tensors do not fit the scheme", "convert again")
        codes = (weight.to(torch.int16) + scheme.midpoint).to(torch.uint8)
        return QuantizedTensor(codes, scales, None, scheme)

    def config(self, layers: list[StoredLayer], dense: list[str], experts: list[str]) -> dict[str, Any]:
        return config_frame("int-quantized", layers, dense, experts, _ACTIVATIONS)

    def readers(self, layers: list[StoredLayer]) -> dict[str, str]:
        if not layers:
            return {"quantkit": "yes, unquantised", "transformers": "yes, unquantised", "vllm": "yes, unquantised"}
        return {"quantkit": "yes, integer products", "transformers": "yes, simulated in float", "vllm": "yes, CUTLASS"}
