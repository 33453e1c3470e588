"""Source checkpoints: a local directory, a hub id (`org/name` or `org/name@revision`), or a GGUF file.

Tensors are read by name from their byte ranges; the model is never loaded. A GGUF file is decoded once by transformers
into a safetensors directory in the cache, keyed by its SHA-256, and read from there.
"""

import io
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from quantkit.canonical import sha256_file
from quantkit.errors import CheckpointError
from quantkit.ggufheader import check_gguf
from quantkit.limits import bounded_modules, refuse_absurd_counts, refuse_absurd_sizes
from quantkit.schema import read_json
from quantkit.tensorfile import TensorEntry, read_header

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Weights in other containers, and pickles, which run code when they are read. Never opened, never copied.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".h5", ".msgpack", ".onnx", ".gguf", ".npz", ".ot"}
# What an artifact writes itself: a copy of the source's would claim to describe the artifact.
_WRITTEN_BY_US = {"config.json", "manifest.json", "run.json", INDEX_FILE}
_TOKENIZER_FILES = ("tokenizer", "vocab", "spiece", "sentencepiece", "merges", "tekken")
# Folders that belong to a tokenizer.
_SIDE_FOLDERS = {"additional_chat_templates"}


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint.

    entries: every tensor by its name on disk. side_files: what an artifact copies byte for byte, relative to
    `directory`. skipped: files that are neither, with the reason.
    """

    directory: Path
    name: str
    revision: str | None
    config: PretrainedConfig
    entries: dict[str, TensorEntry]
    side_files: list[str]
    skipped: dict[str, str]
    trust_remote_code: bool = False
    origin: str = field(default="", compare=False)

    @property
    def weight_files(self) -> list[Path]:
        return sorted({entry.path for entry in self.entries.values()})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model: what config.json says, else that of the largest tensor."""
        declared = getattr(self.config, "dtype", None)
        if isinstance(declared, torch.dtype):
            return declared
        return max(self.entries.values(), key=lambda entry: entry.numel).dtype

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the checkpoint. Raises CheckpointError where there is none."""
        if not any(name.startswith(_TOKENIZER_FILES) for name in self.side_files):
            # The library would make an empty tokenizer for some architectures, and every text would be nothing.
            raise CheckpointError(f"{self.name}: {self.directory} has no tokenizer files", "add those of the model")
        try:
            return AutoTokenizer.from_pretrained(self.directory, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # the library raises almost anything here
            raise CheckpointError(
                f"{self.name}: no tokenizer can be loaded from {self.directory} ({_first_line(error)})",
                "add the tokenizer files of the model to the directory",
            ) from None


def open_checkpoint(model: str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Open a directory, hub id or GGUF file. Reads headers only.

    Raises CheckpointError: nothing there, pickle weights only, broken or hostile index or header, a model that needs
    its own code when `trust_remote_code` is off.
    """
    directory, revision = _locate(model)
    entries = _read_entries(directory)
    side_files, skipped = _side_files(directory, {entry.path.name for entry in entries.values()})
    name = Path(model).resolve().name if Path(model).exists() else model.partition("@")[0]
    config = load_config(directory, trust_remote_code)
    return Checkpoint(
        directory, name, revision, config, entries, side_files, skipped, trust_remote_code, origin=_origin(model)
    )


def load_config(directory: Path, trust_remote_code: bool) -> PretrainedConfig:
    """config.json through transformers. Raises CheckpointError naming the reason."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "give a Hugging Face model directory, a hub id or a GGUF file")
    values = read_json(path, CheckpointError, "repair config.json")
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "repair config.json")
    refuse_absurd_counts(values, path)
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:
        hint = (
            "pass --trust-remote-code if you trust the Python files beside it"
            if "trust_remote_code" in str(error)
            else ""
        )
        raise CheckpointError(f"{path} is not usable ({_first_line(error)})", hint or "repair config.json") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from writing progress bars and reports over ours, and put its state back."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def cache_dir() -> Path:
    """Where fetched and decoded material is kept: $QUANTKIT_CACHE, else $XDG_CACHE_HOME/quantkit, ~/.cache/quantkit."""
    named = os.environ.get("QUANTKIT_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "quantkit"


def _origin(model: str) -> str:
    return str(Path(model).resolve()) if Path(model).exists() else model


def _locate(model: str) -> tuple[Path, str | None]:
    """Local directory and revision of MODEL."""
    path = Path(model)
    if path.is_dir():
        return path, None
    if path.is_file() and path.suffix == ".gguf":
        return _decode_gguf(path), None
    if path.is_file():
        raise CheckpointError(f"{model} is a file", "give the model directory, a hub id or a .gguf file")
    name, _, revision = model.partition("@")
    if model.startswith((".", "/", "~")) or name.count("/") != 1:
        raise CheckpointError(f"{model} does not exist", "give a model directory, a hub id (org/name) or a .gguf file")
    return _download(name, revision or None)


def _download(name: str, revision: str | None) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(
            name, revision=revision, ignore_patterns=[f"*{s}" for s in sorted(_OTHER_WEIGHTS)]
        )
    except Exception as error:
        raise CheckpointError(
            f"{name} is neither a local directory nor reachable on the hub ({_first_line(error)})",
            "check the name and the network, or give a local directory",
        ) from None
    return Path(directory), Path(directory).name


def _read_entries(directory: Path) -> dict[str, TensorEntry]:
    single, index = directory / WEIGHTS_FILE, directory / INDEX_FILE
    for path in (directory / "config.json", single, index):
        _refuse_foreign(path, directory)
    if single.is_file() and index.is_file():
        raise CheckpointError(f"{directory} holds both {WEIGHTS_FILE} and {INDEX_FILE}", "remove the one that is stale")
    if single.is_file():
        entries = read_header(single)
        if not entries:
            raise CheckpointError(f"{single} holds no tensor", "give a complete checkpoint")
        return entries
    if index.is_file():
        return _read_sharded(directory, index)
    pickles = sorted(path.name for path in directory.glob("*") if path.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        load, save = json.dumps(str(directory)), json.dumps(f"{directory}-safetensors")
        code = f'from transformers import AutoModelForCausalLM as M; M.from_pretrained({load}, dtype="auto")'
        code += f".save_pretrained({save})"
        raise CheckpointError(
            f"{directory} holds only pickle weights ({pickles[0]}), which run code when read",
            f"convert them where you trust them: python -c {shlex.quote(code)}",
        )
    raise CheckpointError(f"{directory} holds no {WEIGHTS_FILE} and no {INDEX_FILE}", "give a complete checkpoint")


def _read_sharded(directory: Path, index: Path) -> dict[str, TensorEntry]:
    value = read_json(index, CheckpointError, "download or copy the index again")
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map", "download or copy the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name!r} points to {shard!r}, not to a safetensors file of this directory",
                "do not use this index; download it again from a source that you trust",
            )
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        path = directory / shard
        if not os.path.isfile(path):  # unlike Path.is_file, takes any name
            raise CheckpointError(f"{path} is named in {INDEX_FILE} and is missing", "download or copy the shard")
        _refuse_foreign(path, directory)
        for name, entry in read_header(path).items():
            if name in entries:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is also in {entries[name].path.name}", "remove one of them"
                )
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is not in {INDEX_FILE} for this shard", "repair the index"
                )
            entries[name] = entry
    lost = sorted(set(weight_map) - set(entries))
    if lost:
        raise CheckpointError(
            f"{directory / weight_map[lost[0]]}: tensor {lost[0]!r} is in {INDEX_FILE} but not in the shard",
            "download or copy the shard again",
        )
    return entries


def _side_files(directory: Path, weight_files: set[str]) -> tuple[list[str], dict[str, str]]:
    copied: list[str] = []
    skipped: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        name = path.name
        if name in weight_files or name in _WRITTEN_BY_US or name.startswith("."):
            continue
        if path.is_dir():
            if name in _SIDE_FOLDERS:
                copied += [f"{name}/{child.name}" for child in sorted(path.iterdir()) if child.is_file()]
            else:
                skipped[name + "/"] = "a folder"
        elif path.suffix in _OTHER_WEIGHTS or path.suffix == ".safetensors" or name.endswith(".index.json"):
            skipped[name] = "weights that the checkpoint's index does not name"
        elif name == "model.sig":
            skipped[name] = "a signature of the checkpoint, which is none of the artifact"
        elif not path.is_file():
            raise CheckpointError(f"{path} is a broken link, or no regular file", "restore it, or remove it")
        elif not name.isprintable():
            raise CheckpointError(f"{directory}: the file name {name!r} is not readable text", "rename or remove it")
        elif not _belongs(path, directory):
            skipped[name] = "a link that leads out of the checkpoint"
        else:
            copied.append(name)
    return copied, skipped


def _belongs(path: Path, directory: Path) -> bool:
    """Whether a file lies in the directory, or is a link of the hub's cache (snapshots/REVISION/name to blobs/HASH)."""
    real, home = path.resolve(), directory.resolve()
    return real.is_relative_to(home) or real.is_relative_to(home.parent.parent / "blobs")


def _refuse_foreign(path: Path, directory: Path) -> None:
    if path.is_symlink() and not _belongs(path, directory):
        raise CheckpointError(f"{path} is a link that leads out of the checkpoint", "copy the file to its place")


def _decode_gguf(path: Path) -> Path:
    """The decoded form of a GGUF file in the cache, written once and renamed into place."""
    target = cache_dir() / "gguf" / sha256_file(path)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".partial-"))
    try:
        save_decoded(*load_gguf(path), partial)
        partial.rename(target)
    except OSError as error:
        if not target.is_dir():  # another process may have been first
            raise CheckpointError(
                f"{path} cannot be decoded into {target}: {error.strerror}", "free the disk"
            ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def load_gguf(path: Path) -> tuple[PretrainedConfig, dict[str, torch.Tensor], PreTrainedTokenizerBase]:
    """Config, float32 state dict (tied tensors once) and tokenizer of a GGUF file, through transformers."""
    tensors, numel = check_gguf(path)
    try:
        # The decoder of transformers draws its bar straight to stderr.
        with quiet_transformers(), redirect_stderr(io.StringIO()), bounded_modules(2 * tensors, str(path)):
            with torch.device("meta"):
                skeleton = AutoModelForCausalLM.from_config(_gguf_config(path))
            refuse_absurd_sizes(skeleton, 2 * numel, str(path))  # tied ones count twice
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is not a GGUF file that transformers can read ({_first_line(error)})",
            "give the original safetensors checkpoint",
        ) from None
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        for tied in getattr(model, "all_tied_weights_keys", {}):
            state.pop(tied, None)
    config = model.config
    # The decoded weights are plain floats: a config that still names GGUF quantisation would be refused or misread.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config, state, tokenizer


def _gguf_config(path: Path) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def save_decoded(
    config: PretrainedConfig, state: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write a float32 checkpoint directory: config, tokenizer, one safetensors file."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = config.architectures or None
    config.dtype = torch.float32
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / WEIGHTS_FILE, {"format": "pt"})


def config_values(directory: Path) -> dict[str, Any]:
    """config.json as plain values."""
    value: dict[str, Any] = read_json(directory / "config.json", CheckpointError, "repair config.json")
    return value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
