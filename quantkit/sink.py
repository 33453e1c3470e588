"""Where converted tensors go: packed, written once, and recorded for the manifest."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from quantkit.affine import dequantize, row_slices
from quantkit.artifact import WeightsWriter
from quantkit.manifest import FallbackRecord, FoldRecord, LayerError, LayerRecord, OutputError, SchemeRecord
from quantkit.passes import Chosen
from quantkit.plan import Plan, Quantised
from quantkit.tensorfile import TensorEntry
from quantkit.types import QuantizedTensor

# Called with a tensor's name and its source bytes when it is done.
Progress = Callable[[str, int], None]


@dataclass
class Sink:
    """Takes each tensor of a plan once; `done` names those that came."""

    plan: Plan
    writer: WeightsWriter
    progress: Progress
    layers: list[LayerRecord] = field(default_factory=list)
    fold_sites: list[FoldRecord] = field(default_factory=list)
    fallbacks: list[FallbackRecord] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def layer(
        self,
        layer: Quantised,
        weight: torch.Tensor,
        chosen: Chosen,
        passes: list[str],
        output_error: OutputError | None = None,
        tokens: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Pack and write a layer; returns what was stored, by local name. `weight`: the float it was made of."""
        stored = self.plan.layer_format(layer).pack(chosen.tensor)
        for local, tensor in stored.items():
            self.writer.write(f"{layer.name}.{local}", tensor)
        self.layers.append(
            LayerRecord(
                name=layer.name,
                module=layer.module,
                shape=layer.shape,
                scheme=SchemeRecord.of(layer.scheme),
                passes=passes,
                error=rounding_error(weight, chosen.tensor),
                output_error=output_error,
                tokens=tokens,
                damping=chosen.damping,
                notes=list(chosen.notes),
                bytes=sum(tensor.nbytes for tensor in stored.values()),
                fallback=layer.fallback,
            )
        )
        self._finish(layer.entry)
        return stored

    def kept(self, entry: TensorEntry, chunks: Iterator[torch.Tensor]) -> None:
        """Write a tensor as the source holds it."""
        self.writer.write_chunks(entry.name, chunks)
        self._finish(entry)

    def changed(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        """Write a kept tensor that a fold has changed, in the dtype of the source."""
        self.writer.write(entry.name, tensor.to(entry.dtype))
        self._finish(entry)

    def _finish(self, entry: TensorEntry) -> None:
        self.done.add(entry.name)
        self.progress(entry.name, entry.nbytes)


def rounding_error(weight: torch.Tensor, quantised: QuantizedTensor) -> LayerError:
    """Relative Frobenius and largest absolute error of the dequantised weight, the same on any number of threads.

    Squares of a row are added in float64 inside one row, rows by exact summation; six digits are kept, because the last
    bits of a float64 sum may differ between processors and the manifest must not.
    """
    errors: list[float] = []
    norms: list[float] = []
    largest = 0.0
    for part in row_slices(*quantised.shape):
        piece = QuantizedTensor(
            quantised.codes[part],
            quantised.scales[part],
            None if quantised.zeros is None else quantised.zeros[part],
            quantised.scheme,
        )
        exact = weight[part].float()
        difference = exact - dequantize(piece)
        largest = max(largest, difference.abs().max().item())
        errors += difference.double().square_().sum(1).tolist()
        norms += exact.double().square_().sum(1).tolist()
    norm = math.fsum(norms)
    relative = math.sqrt(math.fsum(errors) / norm) if norm else 0.0
    return LayerError(relative=float(f"{relative:.6g}"), max_abs=float(f"{largest:.6g}"))
