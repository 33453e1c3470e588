"""A checkpoint run one decoder block at a time: at most one block has weights, everything else is on meta.

The first pass runs the base model with every block replaced by a recorder. It gives the hidden states before the first
block, and for each block the other arguments that the model hands it (masks, rotary tables), whatever they are called.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from quantkit.blocks import build_skeleton, find_blocks, map_names
from quantkit.checkpoint import Checkpoint
from quantkit.errors import CheckpointError, NumericsError, first_line
from quantkit.loading import fill_and_tie, fill_parameters
from quantkit.spill import float_table
from quantkit.tensorfile import TensorEntry

# Tokens that run through a block at once: enough for matrix products at full speed.
_BATCH_TOKENS = 2048

# What a model hands a block beside the hidden states.
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_USE_DATA_FREE = "this model cannot be calibrated; use a data-free recipe"
_HAND_ON_MORE = "its blocks hand on more than hidden states"
# Stands for what a block would put out beside the hidden states.
_UNKNOWN = object()


class _BlockReachedError(Exception):
    """The model has come to its first block."""


class LiveModel:
    """The blocks of a checkpoint, loaded and freed one by one, in float32 unless told otherwise.

    scratch: a folder for hidden states that are too large for memory; without one they stay there.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, *, scratch: Path | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._scratch = scratch
        self.model: PreTrainedModel = build_skeleton(checkpoint, dtype, real_buffers=True)
        self.prefix, self.blocks = find_blocks(self.model)
        targets = map_names(self.model, list(checkpoint.entries))
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        self._direct = {t.parameter: checkpoint.entries[name] for name, t in targets.items() if t.direct}
        for name, entry in checkpoint.entries.items():
            self._entries.setdefault(self._part_of(targets[name].parameter), {})[name] = entry
        # By batch size and length: masks and rotary tables have both.
        self._arguments: dict[tuple[int, int], list[_Arguments]] = {}
        # What a block puts out beside the hidden states, or None where it puts out a bare tensor.
        self._beside: tuple[Any, ...] | None = None

    def _part_of(self, parameter: str) -> str:
        """The block prefix that a parameter belongs to, or the empty string."""
        if not parameter.startswith(self.prefix + "."):
            return ""
        return f"{self.prefix}.{parameter[len(self.prefix) + 1 :].partition('.')[0]}"

    def entry_of(self, parameter: str) -> TensorEntry | None:
        """The disk tensor that is this parameter as it stands, or None where there is no such one."""
        return self._direct.get(parameter)

    @torch.no_grad()
    def start(self, ids: torch.Tensor, short: int | None = None) -> torch.Tensor:
        """Hidden states `[samples, length, hidden]` before the first block, of token ids `[samples, length]`.

        short: a length at which blocks will be run with one sample as well. Raises CheckpointError where the model does
        not hand its hidden states through all blocks in turn.
        """
        fill_parameters(self.model, self._entries.get("", {}), self.checkpoint.name)
        # Tied tables are left to the head, which does not run.
        base = getattr(self.model, self.model.base_model_prefix, self.model)
        self._find_outputs(base, ids[:1])
        parts = batches(ids)
        first = self._record(base, next(parts))
        hidden = float_table((*ids.shape, *first.shape[2:]), self._scratch)
        places = batches(hidden)
        next(places).copy_(first)
        for part, place in zip(parts, places, strict=True):
            place.copy_(self._record(base, part))
        if short is not None:
            self._record(base, ids[:1, :short])
        self._free_rest()
        return hidden

    def _find_outputs(self, base: nn.Module, ids: torch.Tensor) -> None:
        """Learn what blocks put out, from the first one: a model takes a tuple apart, and no bare tensor."""
        calls: list[_Arguments] = []

        def stop(*arguments: Any, **keywords: Any) -> None:
            calls.append((arguments, keywords))
            raise _BlockReachedError

        with suppress(_BlockReachedError):
            self._run_base(base, ids, stop)
        for arguments, keywords in calls:
            block = self.load(0)
            with self._failing(ids):
                output = block(*arguments, **keywords)
            if isinstance(output, tuple | list):
                self._beside = tuple(None if value is None else _UNKNOWN for value in output[1:])
            self.free(0)

    def _put_out(self, hidden: torch.Tensor) -> Any:
        """Hidden states as a block would put them out."""
        return hidden if self._beside is None else (hidden, *self._beside)

    def _run_base(self, base: nn.Module, ids: torch.Tensor, forward: Callable[..., Any]) -> None:
        """Run `ids` with `forward` in place of every block."""
        with self._failing(ids), self._stand_in(forward):
            base(input_ids=ids, use_cache=False)

    @contextmanager
    def _failing(self, ids: torch.Tensor) -> Iterator[None]:
        """Where the code of the model fails on `ids`, that is an error of the source."""
        try:
            yield
        except IndexError:
            raise CheckpointError(
                f"{self.checkpoint.name} has no row for one of {ids.shape[1]} positions, or for token {int(ids.max())}",
                "use shorter samples, or the tokenizer that belongs to this model",
            ) from None
        except _BlockReachedError:
            raise
        except Exception as error:  # may be of any kind
            raise CheckpointError(
                f"{self.checkpoint.name}: the model does not run: {first_line(error)}",
                "check that transformers runs it on these token ids",
            ) from error

    def _record(self, base: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        """Run `ids` with recorders for blocks; returns what the first was given, keeps the other arguments of all."""
        given: list[torch.Tensor] = []
        records: list[_Arguments] = []
        changed: list[int] = []

        def record(*arguments: Any, **keywords: Any) -> Any:
            hidden, others = _hidden_of(arguments, keywords)
            if not given:
                given.append(hidden.clone())
            elif not torch.equal(hidden, given[0]):
                changed.append(len(records))
            records.append(others)
            return self._put_out(hidden)

        self._run_base(base, ids, record)
        known = self._arguments.setdefault((ids.shape[0], ids.shape[1]), records)
        if len(records) != len(self.blocks):
            problem = f"the model runs {len(records)} of its {len(self.blocks)} blocks"
        elif given[0].shape[:2] != ids.shape:
            shapes = list(given[0].shape), list(ids.shape)
            problem = f"its blocks are given hidden states of shape {shapes[0]} for token ids of shape {shapes[1]}"
        elif any(value is _UNKNOWN for arguments, named in records for value in (*arguments, *named.values())):
            problem = _HAND_ON_MORE
        elif changed:
            problem = f"the model changes hidden states before its block {changed[0]}, outside of blocks"
        elif known is not records and not _alike(known, records, {}):
            problem = "its blocks are given more that depends on the text than hidden states"
        else:
            return given[0]
        raise CheckpointError(f"{self.checkpoint.name}: {problem}", _USE_DATA_FREE)

    def table(self, *shape: int) -> torch.Tensor:
        """Room for float32 values, uninitialised, where hidden states may lie."""
        return float_table(shape, self._scratch)

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Inside, what comes behind the blocks has weights.

        Gives the function from token ids `[n, length]` and hidden states after the last block `[n, length, hidden]` to
        logits `[n, length, vocabulary]`, differentiable in the hidden states.
        """
        fill_and_tie(self.model, self._entries.get("", {}), self.checkpoint.name)

        def logits(ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            self.blocks[-1].forward = lambda *_, **__: self._put_out(hidden)
            found: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
            return found

        try:
            with self._stand_in(lambda *given, **named: self._put_out(_hidden_of(given, named)[0])):
                yield logits
        finally:
            self._free_rest()

    @contextmanager
    def _stand_in(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Inside, `forward` runs in place of every block."""
        originals = [block.forward for block in self.blocks]
        for block in self.blocks:
            block.forward = forward
        try:
            yield
        finally:
            for block, original in zip(self.blocks, originals, strict=True):
                block.forward = original

    def another(self, hidden: torch.Tensor) -> torch.Tensor:
        """A copy of hidden states that may lie where they lie."""
        return self.table(*hidden.shape).copy_(hidden)

    def load(self, index: int) -> nn.Module:
        """Block `index` with its weights."""
        name = f"{self.prefix}.{index}"
        fill_parameters(self.model, self._entries.get(name, {}), self.checkpoint.name)
        block = self.blocks[index]
        for part, tensor in block.named_parameters():
            if not tensor.is_meta and not torch.isfinite(tensor).all():
                entry = self.entry_of(f"{name}.{part}")
                where = f"{entry.path}: tensor {entry.name!r}" if entry else f"{name}.{part}"
                raise NumericsError(f"{where} holds NaN or infinite values", "repair or re-export the checkpoint")
        empty = [part for part, tensor in block.named_parameters() if tensor.is_meta]
        if empty:
            raise CheckpointError(f"{self.checkpoint.name}: nothing on disk is {name}.{empty[0]}", "check the files")
        return block

    def free(self, index: int) -> None:
        """Give the memory of block `index` back; buffers that are not on disk stay."""
        _empty(self.blocks[index], [name for name, _ in self.blocks[index].named_parameters(remove_duplicate=False)])

    def run(self, index: int, hidden: torch.Tensor, weights: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Hidden states after block `index`, of a batch `[n, length, hidden]` such as `batches` gives.

        weights: parameters by their names in the block, in place of its own; the result is differentiable in them.
        """
        arguments, keywords = self._arguments[hidden.shape[0], hidden.shape[1]][index]
        containers = [value for value in (*arguments, *keywords.values()) if isinstance(value, dict | list)]
        before = [_contents(value) for value in containers]
        given = hidden.clone()  # a block may write into what it is given
        with torch.set_grad_enabled(weights is not None):
            output = functional_call(self.blocks[index], weights or {}, (given, *arguments), keywords)
        if [_contents(value) for value in containers] != before:
            raise CheckpointError(f"{self.checkpoint.name}: {_HAND_ON_MORE}", _USE_DATA_FREE)
        return output[0] if isinstance(output, tuple | list) else output

    def advance(self, index: int, hidden: torch.Tensor) -> None:
        """Run block `index` on every sample, in place."""
        for part in batches(hidden):
            part.copy_(self.run(index, part))

    def _free_rest(self) -> None:
        """Embeddings and head are not needed after the first pass; small buffers stay."""
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]  # tied ones too
        _empty(self.model, [name for name in names if not name.startswith(self.prefix + ".")])


def _empty(module: nn.Module, names: list[str]) -> None:
    """Make parameters `names` of a module ones without values."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        old = module.get_parameter(name)
        setattr(module.get_submodule(parent), leaf, nn.Parameter(old.to("meta"), requires_grad=False))


def batches(table: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of `[samples, length, ...]` over its samples in turn, each of about `_BATCH_TOKENS` tokens."""
    return iter(table.split(max(1, _BATCH_TOKENS // table.shape[1])))


def _hidden_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[torch.Tensor, _Arguments]:
    """What a block is given, parted into the hidden states and all else."""
    if arguments:
        return arguments[0], (arguments[1:], keywords)
    others = dict(keywords)
    return others.pop("hidden_states"), ((), others)


def _alike(one: Any, other: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Whether two things that a model hands its blocks say the same. known: the answers so far, by identity."""
    if one is other or type(one) is not type(other):
        return one is other
    key = id(one), id(other)
    if key not in known:
        known[key] = True  # until told otherwise: a thing may hold itself
        if isinstance(one, torch.Tensor):
            known[key] = one.dtype == other.dtype and torch.equal(one, other)
        elif isinstance(one, tuple | list):
            known[key] = len(one) == len(other) and all(map(_alike, one, other, repeat(known)))
        elif isinstance(one, dict):
            known[key] = one.keys() == other.keys() and all(_alike(one[name], other[name], known) for name in one)
        elif hasattr(one, "__dict__"):
            known[key] = _alike(vars(one), vars(other), known)
        else:
            known[key] = bool(one == other)
    return known[key]


def _contents(container: dict[Any, Any] | list[Any]) -> list[tuple[Any, int]]:
    """What is in a container, by identity."""
    items = container.items() if isinstance(container, dict) else enumerate(container)
    return [(key, id(value)) for key, value in items]
