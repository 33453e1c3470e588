"""The plan: what happens to every tensor of a checkpoint under a recipe, decided from headers and structure alone."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from quantkit.blocks import (
    block_linears,
    build_skeleton,
    find_blocks,
    is_lookup,
    map_names,
    router_names,
    shared_inputs,
    unquantisable_reason,
)
from quantkit.checkpoint import Checkpoint
from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats import Format, StoredLayer, format_of
from quantkit.manifest import FallbackRecord
from quantkit.recipe import Recipe, WeightFormat, matches
from quantkit.tensorfile import TensorEntry, TensorSpec
from quantkit.types import QuantScheme

# What a run takes whatever the model: slices at work, buffers, the libraries' own.
_OVERHEAD = 1 << 27


@dataclass(frozen=True)
class Quantised:
    """A weight that becomes codes. name: module on disk; module: that in the model; fallback: what differs, or None.

    embedding: whether it is a table that token ids look up, instead of a linear.
    """

    entry: TensorEntry
    name: str
    module: str
    scheme: QuantScheme
    fallback: str | None
    embedding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.entry.shape
        return rows, columns

    @property
    def outside(self) -> bool:
        """Whether it stands outside the decoder blocks, where calibration does not reach."""
        return _block_of(self.module) == self.module


@dataclass(frozen=True)
class Kept:
    """A tensor that is copied byte for byte."""

    entry: TensorEntry
    reason: str


@dataclass(frozen=True)
class Dropped:
    """A tensor that is not written, because the same bytes stand elsewhere: `same_as`."""

    entry: TensorEntry
    same_as: TensorEntry
    reason: str


@dataclass(frozen=True)
class Plan:
    """Every tensor of the source exactly once, and what a reader of the result must know."""

    checkpoint: Checkpoint
    recipe: Recipe
    quantised: list[Quantised]
    kept: list[Kept]
    dropped: list[Dropped]
    fallbacks: list[FallbackRecord]
    notes: list[str]
    dense_linears: list[str]
    dense_embeddings: list[str]
    dense_experts: list[str]
    parameters: int
    specs: list[TensorSpec] = field(default_factory=list)

    @property
    def stored_layers(self) -> list[StoredLayer]:
        return [StoredLayer(layer.name, layer.module, layer.scheme, layer.embedding) for layer in self.quantised]

    @property
    def format(self) -> Format:
        return format_of(self.recipe.format, self.recipe.activations is not None)

    def layer_format(self, layer: Quantised) -> Format:
        """The format in which one layer is stored."""
        return self.format.for_embedding(layer.scheme) if layer.embedding else self.format

    def layer_specs(self, layer: Quantised) -> list[TensorSpec]:
        """The tensors that one layer becomes."""
        return self.layer_format(layer).spec(layer.name, layer.shape, layer.scheme)

    @property
    def readers(self) -> dict[str, str]:
        return self.format.readers(self.stored_layers)

    @property
    def output_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    @property
    def peak_bytes(self) -> int:
        """Estimate of the memory the run needs beside Python itself.

        Data-free: the largest tensor, its codes and its packed form. Calibrated: the largest block in float32 twice
        (its weights and what replaces them), a float64 Gram matrix for each of its inputs, the hidden states, and at
        the start the embedding; or, at the end, what is rounded outside the blocks, as if data-free.
        """
        largest = max((layer.entry for layer in self.quantised), key=lambda entry: entry.nbytes, default=None)
        if largest is None:
            return 0
        spec = self.recipe.calibration
        if spec is None or not self.recipe.calibrated:
            return _rounding_bytes(largest) + _OVERHEAD
        weights: Counter[str] = Counter()
        inputs: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for layer in self.quantised:
            if layer.outside:
                continue
            block = _block_of(layer.module)
            weights[block] += layer.entry.numel
            inputs[block].add((layer.module.rpartition(".")[0], layer.shape[1]))
        grams = max((sum(8 * width * width for _, width in found) for found in inputs.values()), default=0)
        table = max((kept.entry.numel for kept in self.kept), default=0)
        rounded = max((_rounding_bytes(layer.entry) for layer in self.quantised if layer.outside), default=0)
        width = min(layer.shape[1] for layer in self.quantised)
        hidden = 4 * spec.samples * spec.sequence_length * width
        return max(8 * max(weights.values(), default=0) + 2 * grams, 4 * table, rounded) + hidden + _OVERHEAD


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Decide for every tensor: quantised, kept, or dropped as a copy of a tied one.

    Raises CheckpointError (a tensor that the model does not know, or lacks; already quantised) and RecipeError (a group
    size that does not divide, an override that fits nothing or a tied table, fused siblings with different schemes).
    """
    _refuse_quantised(checkpoint)
    model = build_skeleton(checkpoint, torch.bfloat16)
    return _Planner(checkpoint, recipe, model).plan()


class _Planner:
    """One planning run: walks the tensors in disk order and collects decisions."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, model: PreTrainedModel) -> None:
        self.checkpoint, self.recipe, self.model = checkpoint, recipe, model
        self.targets = map_names(model, list(checkpoint.entries))
        # Module in the model to module on disk.
        self.disk_names = {
            t.parameter.rpartition(".")[0]: n.rpartition(".")[0] for n, t in self.targets.items() if t.direct
        }
        self.state = model.state_dict()
        self.block_prefix = find_blocks(model)[0] + "."
        self.linears = block_linears(model)
        self.routers = router_names(model)
        self.quantised: list[Quantised] = []
        self.kept: list[Kept] = []
        self.dropped: list[Dropped] = []
        self.fallbacks: list[FallbackRecord] = []
        self.notes: list[str] = []
        self.used: Counter[str] = Counter()
        self.candidates: dict[str, nn.Module] = {**self.linears, **self._requested_outside()}

    def plan(self) -> Plan:
        self._check_names()
        copies = self._tied_copies()
        for name, entry in self.checkpoint.entries.items():
            if name in copies:
                self.dropped.append(
                    Dropped(entry, copies[name], f"tied to {copies[name].name}, which has the same bytes")
                )
            else:
                self._decide(name, entry)
        self._check_patterns()
        self._check_siblings()
        if self.recipe.calibration is not None and not self.recipe.calibrated:
            self.notes.append("the recipe names a calibration set that none of its passes uses")
        embeddings = any(layer.embedding for layer in self.quantised)
        plan = Plan(
            self.checkpoint, self.recipe, self.quantised, self.kept, self.dropped, self.fallbacks, self.notes,
            self._dense(nn.Linear), self._dense(nn.Embedding) if embeddings else [], self._dense_experts(),
            sum(entry.numel for entry in self.checkpoint.entries.values()) - sum(d.entry.numel for d in self.dropped),
        )  # fmt: skip
        plan.specs.extend(output_specs(plan))
        plan.notes.extend(f"{reader}: {answer}" for reader, answer in plan.readers.items() if answer.startswith("no"))
        return plan

    def _check_names(self) -> None:
        ignorable = [*(self.model._keys_to_ignore_on_load_unexpected or ())]
        for name, target in self.targets.items():
            if target.parameter in self.state:
                shape = self.checkpoint.entries[name].shape
                expected = tuple(self.state[target.parameter].shape)
                if target.direct and shape != expected:
                    raise CheckpointError(
                        f"{self.checkpoint.entries[name].path}: tensor {name!r} is {list(shape)}, the model of "
                        f"config.json has {list(expected)}", "use the config.json that belongs to these weights",
                    )  # fmt: skip
            elif not any(matches("re:.*?" + pattern, name) for pattern in ignorable) and not self._ignored(name):
                raise CheckpointError(
                    f"{self.checkpoint.entries[name].path}: tensor {name!r} belongs to nothing in the model",
                    f"add {name!r} to the recipe's ignore to copy it unchanged, or remove it",
                )
        present = {target.parameter for target in self.targets.values()}
        tied = getattr(self.model, "all_tied_weights_keys", {})
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        lost = [
            name
            for name in sorted(parameters - present, key=lambda name: (name in tied, name))  # sources before copies
            if not (name in tied and tied[name] in present)
            and not any(name == source and target in present for target, source in tied.items())
            and not self._made_by_converter(name)
        ]
        if lost:
            raise CheckpointError(
                f"{self.checkpoint.name}: no tensor on disk becomes {lost[0]!r} ({len(lost)} missing)",
                "download or copy the whole checkpoint",
            )

    def _made_by_converter(self, parameter: str) -> bool:
        """Whether a parameter may come out of a one-to-many conversion of a tensor that is present."""
        parent = parameter.rpartition(".")[0]
        grandparent = parent.rpartition(".")[0]
        made = [t.parameter for t in self.targets.values() if not t.direct]
        return any(name.startswith((parent + ".", grandparent + ".")) for name in made)

    def _tied_copies(self) -> dict[str, TensorEntry]:
        """Disk names that repeat a tied tensor, with the entry that stays."""
        tied = getattr(self.model, "all_tied_weights_keys", {})
        by_parameter = {target.parameter: name for name, target in self.targets.items() if target.direct}
        entries = self.checkpoint.entries
        return {
            by_parameter[copy]: entries[by_parameter[source]]
            for copy, source in tied.items()
            if copy in by_parameter and source in by_parameter
        }

    def _decide(self, name: str, entry: TensorEntry) -> None:
        target = self.targets[name]
        module, _, leaf = target.parameter.rpartition(".")
        disk_module = name.rpartition(".")[0]
        if target.parameter not in self.state:
            self._keep(entry, "the model does not read it")
        elif module in self.routers:
            self._keep(entry, "router")
        elif leaf == "weight" and target.direct and module in self.candidates:
            self._decide_layer(disk_module, module, entry)
        elif target.parameter.startswith(self.block_prefix) and (reason := self._unquantisable(target.parameter)):
            self._keep(entry, reason)
            self.fallbacks.append(FallbackRecord(layer=disk_module, kind="kept", detail=reason))
        else:
            self._keep(entry, "not a linear of a decoder block")

    def _requested_outside(self) -> dict[str, nn.Module]:
        """Linears and embeddings outside the blocks (a head of its own, the token table) that an override asks for.

        Raises RecipeError where one cannot be packed: passing it over would leave the recipe half done in silence.
        """
        found: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding) or name.startswith(self.block_prefix):
                continue
            disk_name = self.disk_names.get(name, name)
            asked = [override for override in self.recipe.overrides if matches(override.match, disk_name)]
            if all(override.weights is None for override in asked):
                continue
            ignored = any(matches(pattern, disk_name) for pattern in self.recipe.ignore)
            if asked[-1].weights is not None and not ignored:
                self._check_packable(f"override {asked[-1].match!r} asks for {disk_name}", name, module)
            found[name] = module
        return found

    def _check_packable(self, request: str, name: str, module: nn.Module) -> None:
        tied = getattr(self.model, "all_tied_weights_keys", {})
        pairs = {**tied, **{source: copy for copy, source in tied.items()}}
        if partner := pairs.get(f"{name}.weight"):
            raise RecipeError(
                f"{request}, whose table is tied to {partner.removesuffix('.weight')}: readers share only dense tables",
                "take it out of the overrides, or untie the model (tie_word_embeddings: false, and a head of its own)",
            )
        if isinstance(module, nn.Embedding) and self.recipe.activations is not None:
            raise RecipeError(
                f"{request}, an embedding, which has no activations to round to int8", "take it out of the overrides"
            )
        if isinstance(module, nn.Embedding) and not is_lookup(module):
            raise RecipeError(
                f"{request}, whose {type(module).__name__} does more than look rows up", "take it out of the overrides"
            )

    def _unquantisable(self, parameter: str) -> str | None:
        return unquantisable_reason(self.model, parameter) if parameter in self.state else None

    def _decide_layer(self, disk_module: str, module: str, entry: TensorEntry) -> None:
        weights = self._format_for(disk_module)
        if weights is None:
            self._keep(entry, "ignored by the recipe")
            return
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise CheckpointError(
                f"{entry.path}: tensor {entry.name!r} is {entry.dtype}, which is quantised already",
                "give the unquantised checkpoint",
            )
        scheme, fallback = self._fitted(
            weights.scheme(str(self.checkpoint.dtype).removeprefix("torch.")), disk_module, entry
        )
        embedding = isinstance(self.candidates[module], nn.Embedding)
        self.quantised.append(Quantised(entry, disk_module, module, scheme, fallback, embedding))
        if fallback:
            self.fallbacks.append(FallbackRecord(layer=disk_module, kind="group_size", detail=fallback))

    def _format_for(self, name: str) -> WeightFormat | None:
        """The format of the last matching override, else the recipe's; None where an ignore or a null one matches."""
        chosen: WeightFormat | None = self.recipe.weights
        ignored = self._ignored(name)
        for override in self.recipe.overrides:
            if matches(override.match, name):
                self.used[override.match] += not ignored
                chosen = override.weights
        return None if ignored else chosen

    def _ignored(self, name: str) -> bool:
        hits = [pattern for pattern in self.recipe.ignore if matches(pattern, name)]
        self.used.update(hits)
        return bool(hits)

    def _fitted(self, scheme: QuantScheme, name: str, entry: TensorEntry) -> tuple[QuantScheme, str | None]:
        """The scheme, with the first group size of the recipe that divides the width."""
        width = entry.shape[1]
        if scheme.group_size is None or width % scheme.group_size == 0:
            return scheme, None
        for size in self.recipe.group_fallback:
            if width % size == 0:
                return scheme.with_group_size(size), f"group {size} instead of {scheme.group_size}: width {width}"
        raise RecipeError(
            f"{name}: group size {scheme.group_size} does not divide the input width {width}, nor does any of "
            f"group_fallback {self.recipe.group_fallback}",
            f"add a divisor of {width} to group_fallback, or --set weights.granularity=channel and "
            "--set weights.group_size=null",
        )

    def _keep(self, entry: TensorEntry, reason: str) -> None:
        self.kept.append(Kept(entry, reason))

    def _check_patterns(self) -> None:
        for override in self.recipe.overrides:
            if not self.used[override.match]:
                names = sorted(self.linears)
                raise RecipeError(
                    f"override {override.match!r} matches no linear or embedding of {self.checkpoint.name} that it "
                    "could change (ignored ones do not count)",
                    f"correct it; a linear is named for example {names[0] if names else 'nothing'}",
                )
        modules = {name for name, _ in self.model.named_modules()}
        for pattern in self.recipe.ignore:
            if not self.used[pattern] and not any(matches(pattern, name) for name in modules):
                self.notes.append(f"ignore {pattern!r} matches nothing in this model")

    def _check_siblings(self) -> None:
        groups, untraced = shared_inputs(self.model, self.linears)
        if untraced:
            self.notes.append(f"fused siblings could not all be traced ({untraced})")
        schemes = {layer.module: layer.scheme for layer in self.quantised}
        for names in groups:
            kinds = {schemes.get(name) for name in names}
            if len(kinds) > 1:
                spelled = ", ".join(
                    f"{name.rpartition('.')[2]}: {schemes[name].describe() if name in schemes else 'kept'}"
                    for name in names
                )
                raise RecipeError(
                    f"{names[0].rpartition('.')[0]}: linears that servers fuse have different schemes ({spelled})",
                    "give all of them one override or ignore",
                )

    def _dense(self, kind: type[nn.Module]) -> list[str]:
        """Names, on disk and in the model, of the modules of a kind that stay dense: what a config lists as ignored."""
        quantised = {layer.module for layer in self.quantised}
        dense = [n for n, m in self.model.named_modules() if isinstance(m, kind) and n not in quantised]
        return sorted({name for module in dense for name in (module, self.disk_names.get(module, module))})

    def _dense_experts(self) -> list[str]:
        """Modules on disk that hold kept experts, one a number: `a.experts` for the tensor `a.experts.7.up.weight`."""
        converted = [kept.entry.name for kept in self.kept if not self.targets[kept.entry.name].direct]
        numbered = [re.match(r"(.*)\.\d+\.", name) for name in converted]
        return sorted({match[1] for match in numbered if match})


def _block_of(module: str) -> str:
    """The name of a module up to its first number: the block that it stands in."""
    match = re.match(r".*?\.\d+(?=\.|$)", module)
    return match[0] if match else module


def _rounding_bytes(entry: TensorEntry) -> int:
    """What rounding a tensor takes: the tensor, its codes and its packed form."""
    return entry.nbytes + 2 * entry.numel


def output_specs(plan: Plan) -> list[TensorSpec]:
    """The tensors of the artifact in the order in which they are made."""
    specs = []
    made = {layer.entry.name: layer for layer in plan.quantised}
    gone = {dropped.entry.name for dropped in plan.dropped}
    for name, entry in plan.checkpoint.entries.items():
        if name in made:
            specs += plan.layer_specs(made[name])
        elif name not in gone:
            specs.append(TensorSpec(name, entry.dtype, entry.shape))
    return specs


def _refuse_quantised(checkpoint: Checkpoint) -> None:
    if not checkpoint.dtype.is_floating_point or checkpoint.dtype.itemsize < 2:
        raise CheckpointError(
            f"{checkpoint.name} has the dtype {checkpoint.dtype} in config.json",
            "give a float16, bfloat16 or float32 model",
        )
    if getattr(checkpoint.config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"{checkpoint.name} is quantised already (config.json has a quantization_config)",
            "give the checkpoint that it was made from",
        )
