"""The compressed-tensors format, weight-only integers (`pack-quantized`): what transformers and vLLM read.

For a linear of weight [O, I] at b bits and group size g, under `<module>.`:

    weight_packed      int32 [O, ceil(I * b / 32)]      codes, dense bit stream along the input axis
    weight_scale       float [O, I / g]                 ([O, 1] per channel and per tensor)
    weight_zero_point  int32 [ceil(O * b / 32), I / g]  zero-points only: packed along the *output* axis
    weight_shape       int64 [2]                        O and I

Our codes are already the unsigned ones of the file (`u = q + 2**(b-1)`), so packing moves bits and computes nothing.
A per-tensor scale is stored once a channel, because readers know only channels and groups for packed weights.
An embedding `[vocabulary, width]` is stored as a linear of that weight: O is the vocabulary, I the width. One of 8
symmetric bits may be stored as int8 (`int-quantized`) instead: as many bytes, and transformers can load it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.bitpack import pack_int32, packed_width, unpack_columns, unpack_int32
from quantkit.errors import ArtifactError
from quantkit.formats.base import Format, StoredLayer
from quantkit.tensorfile import TensorSpec
from quantkit.types import QuantizedTensor, QuantScheme

# Names of this format and its sibling in a config.
_PACKED, INT8 = "pack-quantized", "int-quantized"

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


@dataclass(frozen=True)
class ConfigGroup:
    """Layers of one scheme in one format, which is what a group of the config describes."""

    format: str
    members: list[StoredLayer]

    @property
    def scheme(self) -> QuantScheme:
        return self.members[0].scheme

    @property
    def linears(self) -> list[StoredLayer]:
        return [layer for layer in self.members if not layer.embedding]

    @property
    def embeddings(self) -> list[StoredLayer]:
        return [layer for layer in self.members if layer.embedding]


class CompressedTensors:
    """`pack-quantized`, any of 2 to 8 bits, symmetric or with zero-points.

    int8_tables: the format in which embeddings of 8 symmetric bits are stored instead, or None to pack them too.
    """

    int8_activations = False

    def __init__(self, int8_tables: Format | None = None) -> None:
        self._int8_tables = int8_tables

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

    def unpack_rows(
        self, stored: Mapping[str, torch.Tensor], scheme: QuantScheme, rows: torch.Tensor
    ) -> QuantizedTensor:
        zeros = None
        try:
            _, columns = (int(size) for size in stored["weight_shape"])
            scales = stored["weight_scale"].index_select(0, rows)
            codes = unpack_int32(stored["weight_packed"].index_select(0, rows), scheme.bits, columns)
            if not scheme.symmetric:
                zeros = unpack_columns(stored["weight_zero_point"].T, scheme.bits, rows).T.contiguous()
            groups = scheme.groups(columns)
        except (ValueError, KeyError) as error:
            raise ArtifactError(f"packed tensors do not fit the scheme ({error})", "convert again") from None
        if scales.shape[1] != groups or (zeros is not None and zeros.shape != scales.shape):
            raise ArtifactError(f"packed tensors do not fit the width {columns}", "convert again")
        return QuantizedTensor(codes, scales, zeros, scheme)

    def for_embedding(self, scheme: QuantScheme) -> Format:
        fits = scheme.bits == 8 and scheme.symmetric
        return self._int8_tables if self._int8_tables is not None and fits else self

    def config(self, layers: list[StoredLayer], dense: list[str], experts: list[str]) -> dict[str, Any]:
        """One config group a scheme. A single scheme targets every Linear; several name their layers."""
        groups = self._groups(layers)
        config = config_frame(_PACKED, groups, dense, experts, None)
        if len(groups) == 1 and _needs_dequantize(groups):
            config["dequantize"] = True
        return config

    def readers(self, layers: list[StoredLayer]) -> dict[str, str]:
        if not layers:
            return {"quantkit": "yes", "transformers": "yes, unquantised", "vllm": "yes, unquantised"}
        groups = self._groups(layers)
        return {
            "quantkit": "yes, packed in memory",
            "transformers": _transformers_reads(groups),
            "vllm": _vllm_reads(groups),
        }

    def _groups(self, layers: list[StoredLayer]) -> list[ConfigGroup]:
        def format_of(layer: StoredLayer) -> str:
            return INT8 if layer.embedding and self.for_embedding(layer.scheme) is not self else _PACKED

        return config_groups(layers, format_of)


def config_groups(layers: list[StoredLayer], format_of: Callable[[StoredLayer], str]) -> list[ConfigGroup]:
    """Layers that one config group can describe, in order of their first."""
    found: dict[tuple[int, int | None, bool, str], list[StoredLayer]] = defaultdict(list)
    for layer in layers:
        found[layer.scheme.bits, layer.scheme.group_size, layer.scheme.symmetric, format_of(layer)].append(layer)
    return [ConfigGroup(format, members) for (*_, format), members in found.items()]


def config_frame(
    format: str, groups: list[ConfigGroup], dense: list[str], experts: list[str], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """`quantization_config` of a format of this family; see `Format.config`. A group of another format names it."""
    every_linear = sum(bool(group.linears) for group in groups) == 1
    every_embedding = sum(bool(group.embeddings) for group in groups) == 1
    entries = {
        f"group_{n}": {
            "targets": _targets(group, every_linear=every_linear, every_embedding=every_embedding),
            "input_activations": activations,
            "output_activations": None,
            "weights": _weights_config(group.scheme),
        }
        | ({} if group.format == format else {"format": group.format})
        for n, group in enumerate(groups)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        # Without this status the load succeeds with random weights.
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": sorted(dense) + [rf"re:^{re.escape(expert)}\." for expert in sorted(experts)],
        "config_groups": entries | (_KEPT_EXPERTS if experts else {}),
    }


def _weights_config(scheme: QuantScheme) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.granularity == "group" else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
    }


def _targets(group: ConfigGroup, *, every_linear: bool, every_embedding: bool) -> list[str]:
    """What a config group applies to: its layers by name, or by their class where no other group has that class.

    Embeddings are named both ways: some models of servers build theirs without telling it its name, and a name goes
    before a class. The dense layers of a class must be listed as ignored.
    """
    return [
        *(["Linear"] if group.linears and every_linear else _both_names(group.linears)),
        *_both_names(group.embeddings),
        *(["Embedding"] if group.embeddings and every_embedding else []),
    ]


def _both_names(layers: list[StoredLayer]) -> list[str]:
    """Names on disk, which servers match, and names in the model where transformers renames on load."""
    return sorted({name for layer in layers for name in (layer.name, layer.module)})


def _needs_dequantize(groups: list[ConfigGroup]) -> bool:
    """What transformers cannot hold in a module, but can decode on load.

    compressed-tensors 0.18 to 0.20.1 has no place for packed zero-points; transformers up to 5.24 initialises every
    embedding after the load, and stops where one has no `weight`.
    """
    return any(not group.scheme.symmetric or (group.embeddings and group.format == _PACKED) for group in groups)


def _transformers_reads(groups: list[ConfigGroup]) -> str:
    if not _needs_dequantize(groups):
        return "yes"
    if len(groups) == 1:
        return "yes, decoded on load in the scale dtype"
    # Its dequantising loader decodes every layer with the first group's scheme; without it they do not load.
    if any(not group.scheme.symmetric for group in groups):
        return "no: compressed-tensors after 0.17 cannot load zero-points under several schemes"
    return "no: transformers up to 5.24 cannot load a packed embedding under several schemes"


def _vllm_reads(groups: list[ConfigGroup]) -> str:
    linears = {_kind(group.scheme) for group in groups if group.linears}
    tables = {_kind(group.scheme) for group in groups if group.embeddings}
    refused = [_spelled(kind) for kind in sorted(linears) if not _marlin_takes(*kind)]
    # Its lookup of packed rows knows no zero-points, and no codes that straddle words.
    refused += [f"{_spelled(kind)} embedding" for kind in sorted(tables) if not kind[2] or 32 % kind[0]]
    if refused:
        return f"no: no kernel for {', '.join(refused)}"
    if any(group.embeddings and group.format != _PACKED for group in groups):
        return "no: it reads an embedding packed, as the format compressed-tensors-packed writes it"
    return "not verified: it reads a packed embedding in some of its models only" if tables else "yes, Marlin"


def _kind(scheme: QuantScheme) -> tuple[int, int, bool]:
    return scheme.bits, scheme.group_size or -1, scheme.symmetric


def _spelled(kind: tuple[int, int, bool]) -> str:
    bits, group, symmetric = kind
    return f"int{bits} {f'group {group}' if group > 0 else 'channel'} {'symmetric' if symmetric else 'zero-point'}"


def _marlin_takes(bits: int, group: int, symmetric: bool) -> bool:
    return bits in ((4, 8) if symmetric else (4,)) and group in _MARLIN_GROUPS
