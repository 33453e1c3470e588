"""A model that computes from the packed file: codes stay packed in memory and are unpacked one layer at a time.

Of an embedding only the rows that are looked up are unpacked. Steps of decoding may use torch's packed kernels instead.

The reference loader of the format is never called: what is measured is our reading of the bytes, and tests hold it
against an independent decoder and against transformers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from quantkit.affine import dequantize
from quantkit.algorithms.smoothquant import token_codes
from quantkit.blocks import build_skeleton, is_lookup
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import ArtifactError, CheckpointError
from quantkit.evaluate.kernels import Kernel, packed_kernel
from quantkit.formats import Format, format_of
from quantkit.loading import fill_and_tie
from quantkit.manifest import MANIFEST_FILE, LayerRecord, read_manifest
from quantkit.tensorfile import TensorEntry, read_tensor
from quantkit.types import QuantScheme


class Packed(nn.Module):
    """A layer whose weight `[out, in]` exists only as the packed tensors of the file.

    `arithmetic` is the dtype in which codes are multiplied with scales: float32 is exact. What is read is called
    `input`, as in the layers that these stand for: a model may pass it by that name.
    """

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        format: Format,
        scheme: QuantScheme,
        dtype: torch.dtype,
        arithmetic: torch.dtype,
    ) -> None:
        super().__init__()
        self.format, self.scheme, self.dtype, self.arithmetic = format, scheme, dtype, arithmetic
        # "weight" is what the dequantised property is called; the stored codes of that name stand beside it.
        self._names = {name: "weight_codes" if name == "weight" else name for name in stored}
        for name, tensor in stored.items():
            self.register_buffer(self._names[name], tensor, persistent=False)

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors of the file, by local name."""
        return {name: self.get_buffer(place) for name, place in self._names.items()}

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised weight `[out, in]`, in the dtype of the dense layer it stands for; made on each access."""
        return dequantize(self.format.unpack(self.stored, self.scheme), self.dtype, self.arithmetic)


class PackedEmbedding(Packed):
    """An embedding `[vocabulary, width]` of which only the rows that are looked up are ever unpacked."""

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        format: Format,
        scheme: QuantScheme,
        dense: nn.Embedding,
        arithmetic: torch.dtype,
    ) -> None:
        super().__init__(stored, format, scheme, dense.weight.dtype, arithmetic)
        self.num_embeddings, self.embedding_dim = dense.num_embeddings, dense.embedding_dim
        self.padding_idx = dense.padding_idx

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.format.unpack_rows(self.stored, self.scheme, input.reshape(-1))
        return dequantize(rows, self.dtype, self.arithmetic).reshape(*input.shape, self.embedding_dim)


@dataclass
class Room:
    """Bytes that unpacked weights may still take."""

    left: int

    def take(self, size: int) -> bool:
        fits = size <= self.left
        self.left -= size if fits else 0
        return fits


class PackedLinear(Packed):
    """A linear of packed weights: each forward unpacks the layer, multiplies, and forgets it.

    room: while there is some, the layer remembers its unpacked weight instead. Layers run in turn, so those that came
    first stay: the next one wanted is always the one not used for longest. fast: a forward of one token a sequence, in
    bfloat16, takes a packed kernel where there is one. The kernel is made at the first such forward, and holds the
    codes a second time.
    """

    fast = False
    room = Room(0)

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        format: Format,
        scheme: QuantScheme,
        dense: nn.Linear,
        arithmetic: torch.dtype,
    ) -> None:
        super().__init__(stored, format, scheme, dense.weight.dtype, arithmetic)
        self.out_features, self.in_features = dense.out_features, dense.in_features
        self.bias = dense.bias
        self._unpacked: torch.Tensor | None = None
        self._kernel: Kernel | None = None
        self._sought = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kernel = self.kernel() if self.fast and _is_step(input) else None
        if kernel is None:
            return nn.functional.linear(input, self._dense(), self.bias)
        # Kernels refuse rows with gaps between them, as the last positions of a batch are that a head gets.
        outputs = kernel(input.reshape(-1, self.in_features).contiguous()).reshape(*input.shape[:-1], -1)
        return outputs if self.bias is None else outputs + self.bias

    def _dense(self) -> torch.Tensor:
        if self._unpacked is not None:
            return self._unpacked
        weight = self.weight
        if self.room.take(weight.nbytes):
            self._unpacked = weight
        return weight

    def kernel(self) -> Kernel | None:
        """The packed kernel of this weight, or None where there is none."""
        if not self._sought:
            self._kernel = packed_kernel(self.format.unpack(self.stored, self.scheme))
            self._sought = True
        return self._kernel


class Int8Linear(PackedLinear):
    """A linear of int8 weights and int8 inputs, multiplied as integers: nothing but the rounding loses anything.

    Each token (row of the input) is rounded to symmetric int8 on its own absmax scale; sums are int32.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        codes, steps = token_codes(rows)
        weight, scales = self.get_buffer("weight_codes"), self.get_buffer("weight_scale")
        sums = torch._int_mm(codes, weight.T)
        outputs = (sums.float() * steps * scales.float().T).to(input.dtype)
        if self.bias is not None:
            outputs = outputs + self.bias
        return outputs.reshape(*input.shape[:-1], -1)


def load_artifact(
    artifact: str | Path,
    device: str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    arithmetic: str = "exact",
    fast: bool = False,
    keep: int = 0,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of an artifact, its quantised layers packed in memory.

    dtype: of activations and kept tensors, default the checkpoint's. arithmetic: "exact" multiplies codes and scales in
    float32; "stored" in the dtype of the stored scales, as readers do that decode on load. fast: decode with torch's
    packed kernels on the CPU, which are close to exact; only in bfloat16, and only where there is a kernel. keep: bytes
    of unpacked weights that may stay in memory, which changes speed alone.

    Raises ArtifactError (no manifest, tensors missing or not fitting) and CheckpointError (broken weight files).
    """
    if arithmetic not in {"exact", "stored"}:
        raise ValueError(f"arithmetic is 'exact' or 'stored', not {arithmetic!r}")
    path = Path(artifact)
    manifest = read_manifest(path)
    checkpoint = open_checkpoint(str(path), trust_remote_code=trust_remote_code)
    # The skeleton is the dense model; the quantisation is ours to apply.
    if hasattr(checkpoint.config, "quantization_config"):
        del checkpoint.config.quantization_config
    model = build_skeleton(checkpoint, dtype, real_buffers=True)
    format = format_of(manifest.format, manifest.recipe.get("activations") is not None)
    entries = dict(checkpoint.entries)
    modules = dict(model.named_modules())
    for layer in manifest.layers:
        scheme = layer.scheme.scheme
        product = torch.float32 if arithmetic == "exact" else scheme.torch_scale_dtype
        parent_name, _, leaf = layer.module.rpartition(".")
        parent = modules.get(parent_name)
        dense = getattr(parent, leaf, None)
        if isinstance(dense, nn.Embedding) and not is_lookup(dense):
            dense = None  # it computes more than PackedEmbedding does
        if not isinstance(dense, nn.Linear | nn.Embedding) or tuple(dense.weight.shape) != tuple(layer.shape):
            raise ArtifactError(f"{path}: the manifest's {layer.module!r} is no such layer", "run quantkit verify")
        stored_in = format.for_embedding(scheme) if isinstance(dense, nn.Embedding) else format
        stored = _take_layer(entries, layer, stored_in, path)
        assert parent is not None, "it holds a layer"
        setattr(parent, leaf, _packed(stored, stored_in, scheme, dense, product))
    _load_dense(model, entries, checkpoint)
    room = Room(keep)
    for module in model.modules():
        if type(module) is PackedLinear:  # integer products are fast as they are
            module.fast = fast and device == "cpu" and module.dtype is torch.bfloat16
            module.room = room
    return model.to(device).eval()


@contextmanager
def exactly(model: nn.Module) -> Iterator[None]:
    """Inside, no layer of `model` takes a packed kernel."""
    layers = fast_layers(model)
    try:
        for layer in layers:
            layer.fast = False
        yield
    finally:
        for layer in layers:
            layer.fast = True


def fast_layers(model: nn.Module) -> list[PackedLinear]:
    """The layers that take a packed kernel where there is one."""
    return [module for module in model.modules() if isinstance(module, PackedLinear) and module.fast]


def load_checkpoint(
    checkpoint: Checkpoint, device: str = "cpu", *, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The unquantised model of a checkpoint, through the same loader."""
    model = build_skeleton(checkpoint, dtype, real_buffers=True)
    _load_dense(model, dict(checkpoint.entries), checkpoint)
    return model.to(device)


def is_artifact(model: str | Path) -> bool:
    """Whether MODEL is an artifact of ours rather than a checkpoint."""
    return (Path(model) / MANIFEST_FILE).is_file()


def _packed(
    stored: Mapping[str, torch.Tensor],
    format: Format,
    scheme: QuantScheme,
    dense: nn.Linear | nn.Embedding,
    arithmetic: torch.dtype,
) -> Packed:
    if isinstance(dense, nn.Embedding):
        return PackedEmbedding(stored, format, scheme, dense, arithmetic)
    kind = Int8Linear if format.int8_activations else PackedLinear
    return kind(stored, format, scheme, dense, arithmetic)


def _is_step(inputs: torch.Tensor) -> bool:
    """Whether these are inputs `[..., tokens, in]` of one token a sequence that packed kernels take."""
    return inputs.dim() > 1 and inputs.shape[-2] == 1 and inputs.dtype == torch.bfloat16


def _take_layer(
    entries: dict[str, TensorEntry], layer: LayerRecord, format: Format, path: Path
) -> dict[str, torch.Tensor]:
    """Read and remove the tensors of one quantised layer from `entries`, by local name."""
    specs = format.spec(layer.name, layer.shape, layer.scheme.scheme)
    stored = {}
    for spec in specs:
        entry = entries.pop(spec.name, None)
        if entry is None or entry.dtype != spec.dtype or entry.shape != spec.shape:
            raise ArtifactError(f"{path}: tensor {spec.name!r} is missing or has another shape", "run quantkit verify")
        stored[spec.name.removeprefix(layer.name + ".")] = read_tensor(entry)
    return stored


def _load_dense(model: PreTrainedModel, entries: dict[str, TensorEntry], checkpoint: Checkpoint) -> None:
    """Fill every parameter that is not packed, and tie what the config ties.

    Raises CheckpointError where a tensor on disk fits nothing, or a parameter got no tensor.
    """
    fill_and_tie(model, entries, checkpoint.name)
    empty = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if empty:
        raise CheckpointError(f"{checkpoint.name}: no tensor on disk becomes {empty[0]!r}", "run quantkit verify")
