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
from quantkit.artifact import CARD_FILE, WeightsWriter, record_components, seal_run, weight_layouts
from quantkit.blockwise import quantise_blocks
from quantkit.calibration import Calibration
from quantkit.canonical import sha256_bytes, sha256_file
from quantkit.card import model_card, place_of
from quantkit.checkpoint import INDEX_FILE, Checkpoint, config_values
from quantkit.components import component_hashes
from quantkit.errors import ArtifactError, CalibrationError, CheckpointError, NumericsError
from quantkit.files import copy_file, write_file
from quantkit.journal import Journal, Step, first_difference
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
from quantkit.saving import Saver, intact_steps, remove_others
from quantkit.sink import Progress, Sink
from quantkit.tensorfile import TensorEntry, read_chunks, read_tensor
from quantkit.workspace import Workspace, refuse_busy, refuse_existing, refuse_unfinished, writing

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
    resume: bool = False,
) -> Converted:
    """Carry out a plan and write the artifact to `output`. A calibrated recipe needs `calibration`.

    resume: go on with an unfinished conversion to `output`, if there is one, to the same bytes. Raises ArtifactError
    (output exists, is being written, disk full; an unfinished conversion that is of another run, or is in the way),
    CheckpointError (the source changed or is cut off), NumericsError (non-finite weights or activations, scales that do
    not fit), CalibrationError (none given); each names the file and the tensor.
    """
    started = time.time()
    check_space(plan, output, resume=resume)
    if plan.recipe.calibrated and calibration is None:
        raise CalibrationError(f"recipe {plan.recipe.name} calibrates and no set is given", "pass --calib")
    digests = _Digests(plan.checkpoint)
    with writing(output, resume=resume) as work, torch.no_grad():
        run = _Run(plan, calibration, shard_bytes, digests)
        sink = _opened(work, run, progress or (lambda *_: None))
        before = len(sink.done)
        try:
            if calibration is not None and plan.recipe.calibrated:
                quantise_blocks(plan, calibration.ids, sink)
            _write_rest(plan, sink)
            sink.writer.close()
            sink.save()
        except (CheckpointError, NumericsError):
            work.discard()  # to go on would lead to the same place
            raise
        finally:
            sink.writer.abort()
            sink.saver.close()
        _write_config(plan, work.directory)
        for name in plan.checkpoint.side_files:
            copy_file(plan.checkpoint.directory / name, work.directory / place_of(name))
        manifest = _manifest(plan, sink, calibration, work.directory, digests.result())
        write_file(work.directory / MANIFEST_FILE, manifest.data)
        write_file(work.directory / CARD_FILE, model_card(manifest, work.directory).encode())
        write_file(work.directory / RUN_FILE, seal_run(_run_record(plan, manifest, started, before)))
    return Converted(output, manifest, time.time() - started)


@dataclass(frozen=True)
class _Run:
    """What a conversion is made from and with: where all of it agrees, another run may go on with it."""

    plan: Plan
    calibration: Calibration | None
    shard_bytes: int
    digests: "_Digests"

    def key(self) -> dict[str, Any]:
        """All but the source's files, as plain values."""
        checkpoint, recipe = self.plan.checkpoint, self.plan.recipe
        machine = {
            "threads": torch.get_num_threads(),
            "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        }
        key = {
            "version": {name: version(name) for name in ("quantkit", "torch", "transformers")},
            "recipe": recipe.values,
            "source": {"name": checkpoint.name, "revision": checkpoint.revision},
            "calibration": self._calibration(),
            "shard_size": self.shard_bytes,
            # Sums of floats are added in another order on another one.
            "machine": machine if recipe.calibrated else None,
        }
        plain: dict[str, Any] = json.loads(json.dumps(key))  # as a journal gives it back, in this order
        return plain

    def _calibration(self) -> dict[str, Any] | None:
        if self.calibration is None:
            return None
        tokens = sha256_bytes(self.calibration.ids.numpy().astype("<i8").tobytes())
        return self.calibration.account | {"tokens_sha256": tokens}

    def whole_key(self) -> dict[str, Any]:
        """The key with the SHA-256 of every file of the source; waits for them."""
        key = self.key()
        key["source"]["files"] = {record.name: record.sha256 for record in self.digests.result()}
        return key

    def known_key(self) -> dict[str, Any] | None:
        """The same, or None where it would have to wait."""
        return self.whole_key() if self.digests.done else None

    def check(self, journal: Journal, work: Workspace) -> None:
        """Raises ArtifactError naming what differs between an unfinished conversion and this run."""
        files = {"files": journal.run.get("source", {}).get("files")}
        key = self.key()
        # Reading the whole source takes long; what differs at first sight is said at once.
        for ours in (key | {"source": key["source"] | files}, None):
            found = first_difference(journal.run, ours or self.whole_key())
            if found is not None:
                raise ArtifactError(
                    f"the unfinished conversion in {work.root} is another one: {found}",
                    "repeat the command that began it, or remove that folder to start again",
                )


def _opened(work: Workspace, run: _Run, progress: Progress) -> Sink:
    """A sink with what an unfinished conversion in the workspace has done, as far as its bytes are intact."""
    layouts = weight_layouts(work.directory, run.plan.specs, run.shard_bytes)
    journal = work.unfinished()
    steps: list[Step] = []
    if journal is not None:
        run.check(journal, work)
        steps = intact_steps(journal.steps, layouts)
        remove_others(work.directory, layouts)
    written = {name for step in steps for name in step.tensors}
    writer = WeightsWriter(work.directory, run.plan.specs, run.shard_bytes, written)
    mark = None if journal is None else journal.mark(len(steps))
    sink = Sink(run.plan, writer, progress, Saver(work.journal_path, writer, run.known_key, mark))
    sink.restore(steps)
    return sink


def check_space(plan: Plan, output: Path, *, resume: bool = False) -> None:
    """Raises ArtifactError where `output` exists, is being written, or its disk cannot hold the artifact.

    Also where an unfinished conversion to it would be lost, because `resume` is off.
    """
    refuse_existing(output)
    refuse_busy(output)
    refuse_unfinished(output, resume=resume)
    parent = next(path for path in [*output.absolute().parents] if path.exists())
    sides = sum((plan.checkpoint.directory / name).stat().st_size for name in plan.checkpoint.side_files)
    needed, free = plan.output_bytes + sides, shutil.disk_usage(parent).free + Workspace(output).used_bytes
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
        sink.save_where_cheap()


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

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> list[FileRecord]:
        """Waits for the thread. Raises CheckpointError where a file cannot be read."""
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


def _run_record(plan: Plan, manifest: Manifest, started: float, resumed: int) -> dict[str, Any]:
    """What is true of this run and not of the artifact: never part of the identity."""
    libraries = ("quantkit", "torch", "transformers", "compressed-tensors", "numpy", "safetensors")
    return {
        "identity": manifest.identity,
        "source_path": plan.checkpoint.origin,
        "source_not_used": plan.checkpoint.skipped,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "resumed_after_tensors": resumed,
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
