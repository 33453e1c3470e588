"""The conversion loop: one tensor at a time from the source to its packed bytes, then the manifest, then the rename."""

import json
import math
import os
import platform
import resource
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit.affine import dequantize, row_slices
from quantkit.artifact import WeightsWriter, record_components, refuse_existing, writing
from quantkit.canonical import sha256_file
from quantkit.checkpoint import Checkpoint, config_values
from quantkit.errors import ArtifactError, CheckpointError, NumericsError
from quantkit.files import copy_file, write_file
from quantkit.formats import FORMATS
from quantkit.manifest import (
    MANIFEST_FILE,
    RUN_FILE,
    SCHEMA_VERSION,
    DroppedRecord,
    FileRecord,
    KeptRecord,
    LayerError,
    LayerRecord,
    Manifest,
    SchemeRecord,
    SourceRecord,
    Totals,
)
from quantkit.passes import QUANTISERS
from quantkit.plan import Dropped, Kept, Plan, Quantised
from quantkit.tensorfile import TensorEntry, read_chunks, read_tensor
from quantkit.types import QuantizedTensor

# Called with a tensor's name and its source bytes when it is done.
Progress = Callable[[str, int], None]

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: where it stands and what it is."""

    path: Path
    manifest: Manifest
    seconds: float


def convert(
    plan: Plan, output: Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES, progress: Progress | None = None
) -> Converted:
    """Carry out a plan and write the artifact to `output`.

    Raises ArtifactError (output exists, is being written, disk full), CheckpointError (the source changed or is cut
    off), NumericsError (non-finite weights, scales that do not fit); each names the file and the tensor.
    """
    started = time.time()
    check_space(plan, output)
    digests = _Digests(plan.checkpoint)
    with writing(output) as directory, torch.no_grad():
        layers = _write_weights(plan, directory, shard_bytes, progress or (lambda *_: None))
        _write_config(plan, directory)
        for name in plan.checkpoint.side_files:
            copy_file(plan.checkpoint.directory / name, directory / name)
        manifest = _manifest(plan, layers, directory, digests.result())
        write_file(directory / MANIFEST_FILE, manifest.data)
        run = _run_record(plan, manifest, started)
        write_file(directory / RUN_FILE, json.dumps(run, indent=2, sort_keys=True).encode() + b"\n")
    return Converted(output, manifest, time.time() - started)


def check_space(plan: Plan, output: Path) -> None:
    """Raises ArtifactError where `output` exists or its disk cannot hold the artifact."""
    refuse_existing(output)
    parent = next(path for path in [*output.absolute().parents] if path.exists())
    sides = sum((plan.checkpoint.directory / name).stat().st_size for name in plan.checkpoint.side_files)
    needed, free = plan.output_bytes + sides, shutil.disk_usage(parent).free
    if needed > free:
        raise ArtifactError(
            f"{output} needs {needed / 1e9:.2f} GB and {parent} has {free / 1e9:.2f} GB free",
            "free space or choose another --output",
        )


def _write_weights(plan: Plan, directory: Path, shard_bytes: int, progress: Progress) -> list[LayerRecord]:
    format = FORMATS[plan.recipe.format]
    items: list[Quantised | Kept | Dropped] = [*plan.quantised, *plan.kept, *plan.dropped]
    work = {item.entry.name: item for item in items}
    layers = []
    writer = WeightsWriter(directory, plan.specs, shard_bytes)
    try:
        for name, entry in plan.checkpoint.entries.items():
            item = work[name]
            if isinstance(item, Quantised):
                quantised, error = _quantise(plan, item)
                stored = format.pack(quantised)
                for local, tensor in stored.items():
                    writer.write(f"{item.name}.{local}", tensor)
                layers.append(_layer_record(plan, item, error, sum(t.nbytes for t in stored.values())))
            elif isinstance(item, Kept):
                writer.write_chunks(name, _checked_chunks(entry))
            else:
                _check_copy(item)
            progress(name, entry.nbytes)
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return layers


def _quantise(plan: Plan, layer: Quantised) -> tuple[QuantizedTensor, LayerError]:
    quantiser, _ = plan.recipe.steps[-1]
    weight = read_tensor(layer.entry)
    try:
        quantised = QUANTISERS[quantiser].run(weight, layer.scheme)
    except NumericsError as error:
        raise NumericsError(f"{layer.entry.path}: tensor {layer.entry.name!r}: {error.problem}", error.action) from None
    return quantised, rounding_error(weight, quantised)


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


def _checked_chunks(entry: TensorEntry) -> Iterator[torch.Tensor]:
    """The pieces of a kept tensor; NaN and infinity are errors, in kept tensors as in quantised ones."""
    for chunk in read_chunks(entry):
        if chunk.dtype.is_floating_point and chunk.dtype.itemsize > 1 and not torch.isfinite(chunk).all():
            raise NumericsError(
                f"{entry.path}: tensor {entry.name!r} holds NaN or infinite values",
                "repair or re-export the checkpoint",
            )
        yield chunk


def _check_copy(dropped: Dropped) -> None:
    pairs = zip(read_chunks(dropped.entry), read_chunks(dropped.same_as), strict=True)
    same = dropped.entry.nbytes == dropped.same_as.nbytes
    if not same or not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        raise CheckpointError(
            f"{dropped.entry.path}: tensor {dropped.entry.name!r} differs from {dropped.same_as.name!r}, to which "
            "config.json ties it",
            "set tie_word_embeddings to false in config.json, or remove the tensor that is not used",
        )


def _layer_record(plan: Plan, layer: Quantised, error: LayerError, size: int) -> LayerRecord:
    return LayerRecord(
        name=layer.name,
        module=layer.module,
        shape=layer.shape,
        scheme=SchemeRecord.of(layer.scheme),
        passes=[name for name, _ in plan.recipe.steps],
        error=error,
        bytes=size,
        fallback=layer.fallback,
    )


def _write_config(plan: Plan, directory: Path) -> None:
    values = config_values(plan.checkpoint.directory)
    if plan.quantised:
        format = FORMATS[plan.recipe.format]
        values["quantization_config"] = format.config(plan.stored_layers, plan.dense_linears, plan.dense_experts)
    write_file(directory / "config.json", json.dumps(values, indent=2, ensure_ascii=False).encode() + b"\n")


class _Digests:
    """SHA-256 of the source files, computed beside the conversion (hashing releases the interpreter lock)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        names = [path.name for path in checkpoint.weight_files] + ["config.json"]
        index = checkpoint.directory / "model.safetensors.index.json"
        names += [index.name] if index.is_file() else []
        self._paths = {name: checkpoint.directory / name for name in sorted({*names, *checkpoint.side_files})}
        self._records: list[FileRecord] = []
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for name, path in self._paths.items():
                self._records.append(FileRecord(name=name, sha256=sha256_file(path), size=path.stat().st_size))
        except OSError as error:
            self._failure = error

    def result(self) -> list[FileRecord]:
        self._thread.join()
        if self._failure is not None:
            raise CheckpointError(f"the source cannot be read: {self._failure}", "restore the source and convert again")
        return self._records


def source_files(checkpoint: Checkpoint) -> list[FileRecord]:
    """Name, SHA-256 and size of every file that a checkpoint consists of."""
    return _Digests(checkpoint).result()


def _manifest(plan: Plan, layers: list[LayerRecord], directory: Path, source: list[FileRecord]) -> Manifest:
    checkpoint = plan.checkpoint
    return Manifest(
        schema_version=SCHEMA_VERSION,
        versions={name: version(name) for name in ("quantkit", "torch")},
        format=plan.recipe.format,
        recipe=plan.recipe.values,
        recipe_sha256=plan.recipe.sha256,
        source=SourceRecord(
            name=checkpoint.name, revision=checkpoint.revision, files=source, not_used=checkpoint.skipped
        ),
        calibration=None,
        layers=layers,
        kept=[
            KeptRecord(name=k.entry.name, dtype=dtype_name(k.entry.dtype), shape=list(k.entry.shape), reason=k.reason)
            for k in plan.kept
        ],
        dropped=[DroppedRecord(name=d.entry.name, reason=d.reason) for d in plan.dropped],
        fallbacks=plan.fallbacks,
        notes=plan.notes,
        readers=plan.readers,
        components=record_components(directory),
        totals=totals(plan, directory),
    )


def totals(plan: Plan, directory: Path | None = None) -> Totals:
    """Sizes of a plan; with `directory`, the weight bytes are those of the files on disk."""
    quantised = sum(layer.entry.numel for layer in plan.quantised)
    format = FORMATS[plan.recipe.format]
    stored = sum(s.nbytes for layer in plan.quantised for s in format.spec(layer.name, layer.shape, layer.scheme))
    nominal = sum(layer.scheme.nominal_bits(layer.shape[1]) * layer.entry.numel for layer in plan.quantised)
    files = [] if directory is None else [path.stat().st_size for path in directory.glob("*.safetensors")]
    weight_bytes = sum(files) if files else plan.output_bytes
    return Totals(
        weight_bytes=weight_bytes,
        source_weight_bytes=sum(path.stat().st_size for path in plan.checkpoint.weight_files),
        parameters=plan.parameters,
        quantised_parameters=quantised,
        bits_per_weight=round(8 * stored / quantised, 6) if quantised else None,
        bits_per_weight_nominal=round(nominal / quantised, 6) if quantised else None,
        bits_per_parameter=round(8 * weight_bytes / plan.parameters, 6),
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _run_record(plan: Plan, manifest: Manifest, started: float) -> dict[str, Any]:
    """What is true of this run and not of the artifact: never part of the identity."""
    libraries = ("quantkit", "torch", "transformers", "compressed-tensors", "numpy", "safetensors")
    return {
        "identity": manifest.identity,
        "source_path": plan.checkpoint.origin,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": {name: version(name) for name in libraries},
        "command": sys.argv,
    }


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
