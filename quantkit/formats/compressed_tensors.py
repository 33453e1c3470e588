"""The compressed-tensors format, weight-only integers (`pack-quantized`): what transformers and vLLM read.

For a linear of weight [O, I] at b bits and group size g, under `<module>.`:

    weight_packed      int32 [O, ceil(I * b / 32)]      codes, dense bit stream along the input axis
    weight_scale       float [O, I / g]                 ([O, 1] per channel and per tensor)
    weight_zero_point  int32 [ceil(O * b / 32), I / g]  zero-points only: packed along the *output* axis
    weight_shape       int64 [2]                        O and I

Our codes are already the unsigned ones of the file (`u = q + 2**(b-1)`), so packing moves bits and computes nothing.
A per-tensor scale is stored once a channel, because readers know only channels and groups for packed weights.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from quantkit.bitpack import pack_int32, packed_width, unpack_int32
from quantkit.errors import ArtifactError
from quantkit.formats.base import StoredLayer
from quantkit.tensorfile import TensorSpec
from quantkit.types import QuantizedTensor, QuantScheme

# Group sizes of vLLM's Marlin kernels; -1 stands for a scale a channel.
_MARLIN_GROUPS = {-1, 32, 64, 128}

# transformers decodes per-expert tensors before it stacks them, whatever the ignore list says, and drops those that are
# not packed. It lets dense ones pass where the group of the experts is 8-bit float, and takes for that group the one
# whose pattern says "experts". This pattern fits no module, so no reader applies the scheme to anything.
_KEPT_EXPERTS: dict[str, Any] = {
    "kept_experts": {
        "targets": ["re:^no module: experts stay dense$"],
        "input_activations": None,
        "output_activations": None,
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    }
}


class CompressedTensors:
    """`pack-quantized`, any of 2 to 8 bits, symmetric or with zero-points."""

    int8_activations = False

    def spec(self, name: str, shape: tuple[int, int], scheme: QuantScheme) -> list[TensorSpec]:
        rows, columns = shape
        groups = scheme.groups(columns)
        specs = [
            TensorSpec(f"{name}.weight_packed", torch.int32, (rows, packed_width(columns, scheme.bits))),
            TensorSpec(f"{name}.weight_scale", scheme.torch_scale_dtype, (rows, groups)),
            TensorSpec(f"{name}.weight_shape", torch.int64, (2,)),
        ]
        if not scheme.symmetric:
            specs.append(
                TensorSpec(f"{name}.weight_zero_point", torch.int32, (packed_width(rows, scheme.bits), groups))
            )
        return specs

    def pack(self, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        stored = {
            "weight_packed": pack_int32(tensor.codes, tensor.scheme.bits),
            "weight_scale": tensor.scales,
            "weight_shape": torch.tensor(tensor.shape, dtype=torch.int64),
        }
        if tensor.zeros is not None:
            stored["weight_zero_point"] = pack_int32(tensor.zeros.T.contiguous(), tensor.scheme.bits).T.contiguous()
        return stored

    def unpack(self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme) -> QuantizedTensor:
        zeros = None
        try:
            rows, columns = (int(size) for size in stored["weight_shape"])
            scales = stored["weight_scale"]
            codes = unpack_int32(stored["weight_packed"], scheme.bits, columns)
            if not scheme.symmetric:
                zeros = unpack_int32(stored["weight_zero_point"].T.contiguous(), scheme.bits, rows).T.contiguous()
            groups = scheme.groups(columns)
        except (ValueError, KeyError) as error:
            raise ArtifactError(f"packed tensors do not fit the scheme ({error})", "convert again") from None
        fitting = zeros is None or zeros.shape == scales.shape
        if codes.shape[0] != rows or scales.shape != (rows, groups) or not fitting:
            raise ArtifactError(f"packed tensors do not fit the shape {rows} x {columns}", "convert again")
        return QuantizedTensor(codes, scales, zeros, scheme)

    def config(self, layers: list[StoredLayer], dense: list[str], experts: list[str]) -> dict[str, Any]:
        """One config group a scheme. A single scheme targets every Linear; several name their layers."""
        config = config_frame("pack-quantized", layers, dense, experts, None)
        if _needs_dequantize(layers) and len(_by_scheme(layers)) == 1:
            config["dequantize"] = True
        return config

    def readers(self, layers: list[StoredLayer]) -> dict[str, str]:
        schemes = {(layer.scheme.bits, layer.scheme.group_size or -1, layer.scheme.symmetric) for layer in layers}
        if not layers:
            return {"quantkit": "yes", "transformers": "yes, unquantised", "vllm": "yes, unquantised"}
        return {
            "quantkit": "yes, packed in memory",
            "transformers": _transformers_reads(layers, len(schemes)),
            "vllm": _vllm_reads(schemes),
        }


def config_frame(
    name: str, layers: list[StoredLayer], dense: list[str], experts: list[str], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """`quantization_config` of a format of this family; see `Format.config`."""
    by_scheme = _by_scheme(layers)
    groups = {
        f"group_{n}": {
            "targets": ["Linear"] if len(by_scheme) == 1 else _both_names(members),
            "input_activations": activations,
            "output_activations": None,
            "weights": _weights_config(members[0].scheme),
        }
        for n, members in enumerate(by_scheme)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        # Without this status the load succeeds with random weights.
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted(dense) + [rf"re:^{re.escape(expert)}\." for expert in sorted(experts)],
        "config_groups": groups | (_KEPT_EXPERTS if experts else {}),
    }


def _by_scheme(layers: list[StoredLayer]) -> list[list[StoredLayer]]:
    """Layers that one config group can describe, in order of their first."""
    groups: dict[tuple[int, int | None, bool], list[StoredLayer]] = defaultdict(list)
    for layer in layers:
        groups[layer.scheme.bits, layer.scheme.group_size, layer.scheme.symmetric].append(layer)
    return list(groups.values())


def _weights_config(scheme: QuantScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.granularity == "group" else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
    }


def _both_names(layers: list[StoredLayer]) -> list[str]:
    """Names on disk, which servers match, and names in the model where transformers renames on load."""
    return sorted({name for layer in layers for name in (layer.name, layer.module)})


def _needs_dequantize(layers: list[StoredLayer]) -> bool:
    """compressed-tensors 0.18 to 0.20.1 cannot hold packed zero-points in a module; decoded on load they are exact."""
    return any(not layer.scheme.symmetric for layer in layers)


def _transformers_reads(layers: list[StoredLayer], schemes: int) -> str:
    if not _needs_dequantize(layers):
        return "yes"
    if schemes == 1:
        return "yes, decoded on load in the scale dtype"
    # Its dequantising loader decodes every layer with the first group's scheme; without it zero-points do not fit.
    return "no: compressed-tensors after 0.17 cannot load zero-points under several schemes"


def _vllm_reads(schemes: set[tuple[int, int, bool]]) -> str:
    refused = [
        f"int{bits} {f'group {group}' if group > 0 else 'channel'} {'symmetric' if symmetric else 'zero-point'}"
        for bits, group, symmetric in sorted(schemes)
        if bits not in ((4, 8) if symmetric else (4,)) or group not in _MARLIN_GROUPS
    ]
    return f"no: no kernel for {', '.join(refused)}" if refused else "yes, Marlin"
