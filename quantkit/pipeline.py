"""The conversion loop: one tensor at a time from the source to its packed bytes, then the manifest, then the rename."""

import json
import os
import platform
import resource
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit.algorithms.rtn import rtn_quantize
from quantkit.artifact import CARD_FILE, WeightsWriter, record_components, refuse_existing, seal_run, writing
from quantkit.blockwise import quantise_blocks
from quantkit.calibration import Calibration
from quantkit.canonical import sha256_file
from quantkit.card import model_card, place_of
from quantkit.checkpoint import INDEX_FILE, Checkpoint, config_values
from quantkit.components import component_hashes
from quantkit.errors import ArtifactError, CalibrationError, CheckpointError, NumericsError
from quantkit.files import copy_file, write_file
from quantkit.manifest import (
    MANIFEST_FILE,
    RUN_FILE,
    SCHEMA_VERSION,
    DroppedRecord,
    FallbackRecord,
    FileRecord,
    KeptRecord,
    Manifest,
    SourceRecord,
    Totals,
)
from quantkit.passes import Chosen
from quantkit.plan import Dropped, Kept, Plan, Quantised
from quantkit.sink import Progress, Sink
from quantkit.tensorfile import TensorEntry, read_chunks, read_tensor

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: where it stands and what it is."""

    path: Path
    manifest: Manifest
    seconds: float


def convert(
    plan: Plan,
    output: Path,
    *,
    calibration: Calibration | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Carry out a plan and write the artifact to `output`. A calibrated recipe needs `calibration`.

    Raises ArtifactError (output exists, is being written, disk full), CheckpointError (the source changed or is cut
    off), NumericsError (non-finite weights or activations, scales that do not fit), CalibrationError (none given); each
    names the file and the tensor.
    """
    started = time.time()
    check_space(plan, output)
    if plan.recipe.calibrated and calibration is None:
        raise CalibrationError(f"recipe {plan.recipe.name} calibrates and no set is given", "pass --calib")
    digests = _Digests(plan.checkpoint)
    with writing(output) as directory, torch.no_grad():
        sink = Sink(plan, WeightsWriter(directory, plan.specs, shard_bytes), progress or (lambda *_: None))
        try:
            if calibration is not None and plan.recipe.calibrated:
                quantise_blocks(plan, calibration.ids, sink)
            _write_rest(plan, sink)
            sink.writer.close()
        except BaseException:
            sink.writer.abort()
            raise
        _write_config(plan, directory)
        for name in plan.checkpoint.side_files:
            copy_file(plan.checkpoint.directory / name, directory / place_of(name))
        manifest = _manifest(plan, sink, calibration, directory, digests.result())
        write_file(directory / MANIFEST_FILE, manifest.data)
        write_file(directory / CARD_FILE, model_card(manifest, directory).encode())
        write_file(directory / RUN_FILE, seal_run(_run_record(plan, manifest, started)))
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


def _write_rest(plan: Plan, sink: Sink) -> None:
    """Every tensor that no block pass has written: rounded to nearest, copied, or dropped as a copy."""
    items: list[Quantised | Kept | Dropped] = [*plan.quantised, *plan.kept, *plan.dropped]
    work = {item.entry.name: item for item in items}
    for name, entry in plan.checkpoint.entries.items():
        item = work[name]
        if name in sink.done:
            continue
        if isinstance(item, Quantised):
            weight = read_tensor(entry)
            sink.layer(item, weight, _round(item, weight), ["rtn"])
            # An embedding has no inputs that calibration could weigh: rounding it to nearest is what was asked for.
            if plan.recipe.calibrated and not item.embedding:
                detail = "rounded to nearest: it stands outside the decoder blocks, where calibration does not reach"
                sink.fallbacks.append(FallbackRecord(layer=item.name, kind="quantiser", detail=detail))
        elif isinstance(item, Kept):
            sink.kept(entry, _checked_chunks(entry))
        else:
            _check_copy(item)
            sink.progress(name, entry.nbytes)


def _round(layer: Quantised, weight: torch.Tensor) -> Chosen:
    """A layer that no calibrated pass has taken, rounded to nearest."""
    try:
        return Chosen(rtn_quantize(weight, layer.scheme))
    except NumericsError as error:
        raise NumericsError(f"{layer.entry.path}: tensor {layer.entry.name!r}: {error.problem}", error.action) from None


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


def _write_config(plan: Plan, directory: Path) -> None:
    values = config_values(plan.checkpoint.directory)
    if plan.quantised:
        dense = plan.dense_linears + plan.dense_embeddings
        values["quantization_config"] = plan.format.config(plan.stored_layers, dense, plan.dense_experts)
    write_file(directory / "config.json", json.dumps(values, indent=2).encode() + b"\n")


class _Digests:
    """SHA-256 of the source files, computed beside the conversion (hashing releases the interpreter lock)."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        names = [path.name for path in checkpoint.weight_files] + ["config.json"]
        index = checkpoint.directory / INDEX_FILE
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


def _manifest(
    plan: Plan, sink: Sink, calibration: Calibration | None, directory: Path, source: list[FileRecord]
) -> Manifest:
    checkpoint = plan.checkpoint
    components = record_components(directory)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        # Without the local tag: builds of one release compute the same codes.
        versions={name: version(name).partition("+")[0] for name in ("quantkit", "torch")},
        format=plan.recipe.format,
        recipe=plan.recipe.values,
        recipe_sha256=plan.recipe.sha256,
        source=SourceRecord(name=checkpoint.name, revision=checkpoint.revision, files=source),
        calibration=None if calibration is None else calibration.account,
        layers=sink.layers,
        fold_sites=sink.fold_sites,
        kept=[
            KeptRecord(name=k.entry.name, dtype=dtype_name(k.entry.dtype), shape=list(k.entry.shape), reason=k.reason)
            for k in plan.kept
        ],
        dropped=[DroppedRecord(name=d.entry.name, reason=d.reason) for d in plan.dropped],
        fallbacks=plan.fallbacks + sink.fallbacks,
        notes=plan.notes,
        readers=plan.readers,
        components=components,
        component_sha256=component_hashes(directory, components),
        totals=totals(plan, directory),
    )


def totals(plan: Plan, directory: Path | None = None) -> Totals:
    """Sizes of a plan; with `directory`, the weight bytes are those of the files on disk."""
    quantised = sum(layer.entry.numel for layer in plan.quantised)
    stored = sum(spec.nbytes for layer in plan.quantised for spec in plan.layer_specs(layer))
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
        "source_not_used": plan.checkpoint.skipped,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": {name: version(name) for name in libraries},
        "command": [ascii(argument) if not argument.isprintable() else argument for argument in sys.argv],
    }


def peak_resident_bytes() -> int:
    """The largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
