"""Where converted tensors go: packed, written once, and recorded for the manifest."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from quantkit.affine import dequantize, row_slices
from quantkit.artifact import WeightsWriter
from quantkit.journal import Step
from quantkit.manifest import FallbackRecord, FoldRecord, LayerError, LayerRecord, OutputError, SchemeRecord
from quantkit.passes import Chosen
from quantkit.plan import Plan, Quantised
from quantkit.saving import Saver
from quantkit.tensorfile import TensorEntry
from quantkit.types import QuantizedTensor

# Told of each source tensor that is done, by name and bytes; and of other work, in words, with 0.
Progress = Callable[[str, int], None]


@dataclass
class Sink:
    """Takes each tensor of a plan once; `done` names those that came, those of an earlier run included.

    blocks, generators: how many decoder blocks are done, and the random generators behind the last; see `Step`.
    """

    plan: Plan
    writer: WeightsWriter
    progress: Progress
    saver: Saver
    layers: list[LayerRecord] = field(default_factory=list)
    fold_sites: list[FoldRecord] = field(default_factory=list)
    fallbacks: list[FallbackRecord] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    blocks: int = 0
    generators: dict[str, str] = field(default_factory=dict)
    # What is not saved yet: source tensors, hashes of written ones; and how many records of each kind are.
    _fresh: list[str] = field(default_factory=list)
    _written: dict[str, str] = field(default_factory=dict)
    _saved: tuple[int, int, int] = (0, 0, 0)

    def restore(self, steps: list[Step]) -> None:
        """Take over what an earlier run has done."""
        for step in steps:
            self.layers += step.layers
            self.fold_sites += step.fold_sites
            self.fallbacks += step.fallbacks
            self.blocks, self.generators = step.blocks, step.generators
            for name in step.done:
                self.done.add(name)
                self.progress(name, self.plan.checkpoint.entries[name].nbytes)
        self._saved = self._counts

    def save(self) -> None:
        """Save what came since the last time, if that can be done yet."""
        if not self.saver.ready():
            return
        layers, folds, fallbacks = self._saved
        step = Step(
            blocks=self.blocks,
            done=self._fresh,
            tensors=self._written,
            layers=self.layers[layers:],
            fold_sites=self.fold_sites[folds:],
            fallbacks=self.fallbacks[fallbacks:],
            generators=self.generators,
        )
        self.saver.save(step)
        self._fresh, self._written, self._saved = [], {}, self._counts

    def save_where_cheap(self) -> None:
        """Save, where that takes little time beside the work that would be lost."""
        if self._fresh and self.saver.worth_it:
            self.save()

    @property
    def _counts(self) -> tuple[int, int, int]:
        return len(self.layers), len(self.fold_sites), len(self.fallbacks)

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
            self._write(f"{layer.name}.{local}", tensor)
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
        self._written[entry.name] = self.writer.write_chunks(entry.name, chunks)
        self._finish(entry)

    def changed(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        """Write a kept tensor that a fold has changed, in the dtype of the source; returns what was stored."""
        stored = tensor.to(entry.dtype)
        self._write(entry.name, stored)
        self._finish(entry)
        return stored

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        self._written[name] = self.writer.write(name, tensor)

    def _finish(self, entry: TensorEntry) -> None:
        self.done.add(entry.name)
        self._fresh.append(entry.name)
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
