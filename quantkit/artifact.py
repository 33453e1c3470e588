"""The artifact directory: written under a sibling name and renamed when complete, verified byte by byte."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from quantkit.canonical import sha256_file, sha256_json
from quantkit.checkpoint import INDEX_FILE, WEIGHTS_FILE
from quantkit.components import component_hashes
from quantkit.errors import ArtifactError
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
from quantkit.tensorfile import FileLayout, TensorFileWriter, TensorSpec, layout

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
    """The weight files of an artifact: every tensor goes to its place in its shard, in any order."""

    def __init__(self, directory: Path, specs: list[TensorSpec], shard_bytes: int) -> None:
        shards = shard(specs, shard_bytes)
        names = (
            [WEIGHTS_FILE]
            if len(shards) == 1
            else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
        )
        self.directory = directory
        self._layouts: dict[str, FileLayout] = {
            name: layout(directory / name, members) for name, members in zip(names, shards, strict=True)
        }
        self._writers = {name: TensorFileWriter(directory / name, plan) for name, plan in self._layouts.items()}
        self._file_of = {tensor: name for name, plan in self._layouts.items() for tensor in plan.entries}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._writers[self._file_of[name]].write(name, tensor)

    def write_chunks(self, name: str, chunks: Iterator[torch.Tensor]) -> None:
        self._writers[self._file_of[name]].write_chunks(name, chunks)

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


@contextmanager
def writing(output: Path) -> Iterator[Path]:
    """A sibling directory to fill; renamed to `output` at the end, removed on any error.

    Nothing is ever visible under `output` that is not complete. A second writer of the same output is refused; what a
    killed writer left behind is removed. Raises ArtifactError (output exists, is being written, disk full, unwritable).
    """
    refuse_existing(output)
    partial = output.parent / f".{output.name}.partial"
    with disk_errors(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(output)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
                sync_directory(partial)
                refuse_existing(output)
                partial.rename(output)
                sync_directory(output.parent)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        finally:
            _unlock(output, lock)


def refuse_existing(output: Path) -> None:
    """Raises ArtifactError where `output` is there already: an artifact is never overwritten."""
    if output.exists() or output.is_symlink():
        raise ArtifactError(f"{output} exists", "choose another --output, or remove it")


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Turn the system's write errors into a line that names the place and the next action."""
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        what = "the disk is full" if full else str(error.strerror or error)
        where = f" ({error.filename})" if error.filename else ""
        raise ArtifactError(
            f"{output} cannot be written: {what}{where}", "free space, check permissions, or choose another --output"
        ) from error


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
        outside = name in OUTSIDE_IDENTITY or (name.startswith(f"{REPORTS}/") and path.suffix in {".json", ".html"})
        if name not in manifest.files and not (outside and path.is_file() and not path.is_symlink()):
            names.append(name)
    return names


def _lock_path(output: Path) -> Path:
    return output.parent / f".{output.name}.lock"


def _lock(output: Path) -> IO[bytes]:
    stream = _lock_path(output).open("wb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file between our open and our lock: then the lock guards nothing.
        if os.fstat(stream.fileno()).st_ino != _lock_path(output).stat().st_ino:
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        stream.close()
        raise ArtifactError(f"another process is writing {output}", "wait for it, or choose another --output") from None
    return stream


def _unlock(output: Path, stream: IO[bytes]) -> None:
    _lock_path(output).unlink(missing_ok=True)
    stream.close()
