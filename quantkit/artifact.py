"""The artifact directory: its weight files, the record of its files, and their verification byte by byte."""

import errno
import hashlib
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quantkit.canonical import sha256_file, sha256_json
from quantkit.checkpoint import INDEX_FILE, WEIGHTS_FILE
from quantkit.components import component_hashes
from quantkit.errors import ArtifactError, CheckpointError
from quantkit.files import sync_directory, write_file
from quantkit.manifest import (
    COMPONENTS,
    MANIFEST_FILE,
    RUN_FILE,
    Component,
    FileRecord,
    Manifest,
    component_of,
    read_manifest,
)
from quantkit.tensorfile import (
    FileLayout,
    TensorEntry,
    TensorFileWriter,
    TensorSpec,
    layout,
    read_chunks,
    read_tensor,
)

REPORTS = "evals"

CARD_FILE = "README.md"
SIGNATURE_FILE = "model.sig"

# What may stand in an artifact beside the files that the identity covers: regular files, never links.
OUTSIDE_IDENTITY = {MANIFEST_FILE, RUN_FILE, CARD_FILE, SIGNATURE_FILE}


def shard(specs: list[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Cut tensors, in order, into files of at most `limit` bytes; a larger tensor gets a file of its own."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


class WeightsWriter:
    """The weight files of an artifact: every tensor goes to its place in its shard, in any order.

    written: tensors that stand there already, from a run that ended early; their files are gone on with.
    """

    def __init__(
        self, directory: Path, specs: list[TensorSpec], shard_bytes: int, written: Collection[str] = ()
    ) -> None:
        self.directory = directory
        self._layouts = weight_layouts(directory, specs, shard_bytes)
        self._writers = {
            name: TensorFileWriter(directory / name, plan, plan.entries.keys() & written)
            for name, plan in self._layouts.items()
        }
        self._file_of = {tensor: name for name, plan in self._layouts.items() for tensor in plan.entries}
        sync_directory(directory)

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Returns the SHA-256 of the tensor's bytes."""
        return self._writers[self._file_of[name]].write(name, tensor)

    def write_chunks(self, name: str, chunks: Iterator[torch.Tensor]) -> str:
        """Returns the SHA-256 of the tensor's bytes."""
        return self._writers[self._file_of[name]].write_chunks(name, chunks)

    def read(self, name: str) -> torch.Tensor:
        """A tensor that was written, from its file."""
        return read_tensor(self._layouts[self._file_of[name]].entries[name])

    def flush(self) -> None:
        """Make durable what was written by now."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Flush every file, and write the index where there are several."""
        for writer in self._writers.values():
            writer.close()
        if len(self._writers) > 1:
            total = sum(entry.nbytes for plan in self._layouts.values() for entry in plan.entries.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._file_of.items()))}
            write_file(self.directory / INDEX_FILE, json.dumps(index, indent=2).encode() + b"\n")

    def abort(self) -> None:
        for writer in self._writers.values():
            writer.abort()


def weight_layouts(directory: Path, specs: list[TensorSpec], shard_bytes: int) -> dict[str, FileLayout]:
    """The weight files of an artifact by name, before their bytes."""
    shards = shard(specs, shard_bytes)
    names = (
        [WEIGHTS_FILE]
        if len(shards) == 1
        else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    )
    return {name: layout(directory / name, members) for name, members in zip(names, shards, strict=True)}


def tensor_sha256(entry: TensorEntry) -> str | None:
    """SHA-256 of the bytes of a tensor in its file, or None where the file does not hold it."""
    digest = hashlib.sha256()
    try:
        for chunk in read_chunks(entry):
            digest.update(chunk.view(torch.uint8).numpy().data)
    except (OSError, CheckpointError):
        return None
    return digest.hexdigest()


@contextmanager
def disk_errors(
    output: Path, action: Callable[[], str] = lambda: "free space, check permissions, or choose another --output"
) -> Iterator[None]:
    """Turn the system's write errors into a line that names the place and the next action."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "the disk is full" if full else str(error.strerror or error)
        where = f" ({error.filename})" if error.filename else ""
        raise ArtifactError(f"{output} cannot be written: {what}{where}", action()) from error


def record_components(directory: Path) -> dict[Component, list[FileRecord]]:
    """Every file in `directory` with its hash, by component; components without a file are there, empty."""
    components: dict[Component, list[FileRecord]] = {name: [] for name in COMPONENTS}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            components[component_of(name)].append(
                FileRecord(name=name, sha256=sha256_file(path), size=path.stat().st_size)
            )
    return components


def verify(artifact: Path) -> list[str]:
    """Every difference between an artifact and its manifest, one sentence each; empty where every byte is as recorded.

    Raises ArtifactError where there is no readable manifest to compare with.
    """
    manifest = read_manifest(artifact)
    return differences(artifact, manifest, changed_files(artifact, manifest))


def differences(artifact: Path, manifest: Manifest, changed: dict[str, str]) -> list[str]:
    """What `verify` finds, given the files that have changed."""
    problems = list(changed.values())
    if not problems:
        hashes = component_hashes(artifact, manifest.components, manifest.component_sha256)
        problems += [
            f"changed: {MANIFEST_FILE} (its hash of the component {name} is not that of the files)"
            for name, value in hashes.items()
            if value != manifest.component_sha256[name]
        ]
    problems += [f"extra: {name}" for name in _extra_files(artifact, manifest)]
    if (artifact / RUN_FILE).is_file():
        problems += _run_problems(artifact / RUN_FILE, manifest)
    return problems


def changed_files(artifact: Path, manifest: Manifest) -> dict[str, str]:
    """What is wrong with each recorded file that is not there as recorded: a sentence by file name."""
    problems = {}
    for name, record in sorted(manifest.files.items()):
        path = artifact / name
        if not path.is_file() or path.is_symlink():
            problems[name] = f"missing: {name} ({component_of(name)})"
        elif not _matches(path, record):
            problems[name] = f"changed: {name} ({component_of(name)})"
    return problems


def refuse_changed(artifact: Path) -> Manifest:
    """The manifest of an artifact whose every byte is as recorded. Raises ArtifactError with the first difference."""
    problems = verify(artifact)
    if problems:
        raise ArtifactError(f"{artifact}: {problems[0]}", "run quantkit verify for all of it, and convert again")
    return read_manifest(artifact)


def _matches(path: Path, record: FileRecord) -> bool:
    try:
        return path.stat().st_size == record.size and sha256_file(path) == record.sha256
    except OSError:  # what cannot be read is not what was recorded
        return False


def seal_run(record: dict[str, Any]) -> bytes:
    """run.json: the record with its own hash, so that a changed byte shows. Not part of the identity."""
    sealed = record | {"sha256": sha256_json(record)}
    return json.dumps(sealed, indent=2, sort_keys=True).encode() + b"\n"


def _run_problems(path: Path, manifest: Manifest) -> list[str]:
    """What is wrong with a run record: changed itself, or that of another manifest (then one of the two was edited)."""
    try:
        record = json.loads(path.read_bytes())
        intact = record.pop("sha256") == sha256_json(record) and seal_run(record) == path.read_bytes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return [f"changed: {RUN_FILE} (unreadable)"]
    if not intact:
        return [f"changed: {RUN_FILE}"]
    if record.get("identity") != manifest.identity:
        return [f"changed: {MANIFEST_FILE} (the run made {record.get('identity')}, this is {manifest.identity})"]
    return []


def _extra_files(artifact: Path, manifest: Manifest) -> list[str]:
    names = []
    for path in sorted(artifact.rglob("*")):
        name = path.relative_to(artifact).as_posix()
        if path.is_dir() and not path.is_symlink():
            continue
        outside = name in OUTSIDE_IDENTITY or _is_report(name)
        if name not in manifest.files and not (outside and path.is_file() and not path.is_symlink()):
            names.append(name)
    return names


def _is_report(name: str) -> bool:
    """Whether a file of this name in an artifact is a report or its page."""
    return name.startswith(f"{REPORTS}/") and Path(name).suffix in {".json", ".html"}


def harmed_artifact(path: Path) -> Path | None:
    """The artifact that would no longer be what its manifest says with a new file at `path`, None where none is.

    Reports and their pages may be added to one. Folders with a manifest.json of another program are none of ours.
    """
    place = path.resolve()
    for folder in place.parents:
        if (folder / MANIFEST_FILE).is_file() and not _is_report(place.relative_to(folder).as_posix()):
            with suppress(ArtifactError):
                read_manifest(folder)
                return folder
    return None
