"""The model as structure: a skeleton without weights, its decoder blocks, its linears, and their names on disk.

Nothing here knows a model by name. Blocks are the repeated modules that hold most parameters; a linear is an
`nn.Linear` in one of them; names on disk are read through the mapping that transformers itself loads with.
"""

import copy
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from quantkit.checkpoint import Checkpoint, quiet_transformers
from quantkit.errors import CheckpointError
from quantkit.hooks import hooked, on_read
from quantkit.limits import bounded_modules, refuse_absurd_sizes

# Codes of 2 bits, and tied parameters twice.
_VALUES_A_BYTE = 8


@dataclass(frozen=True)
class Target:
    """Where a tensor on disk goes: the parameter's name in the model, and whether it arrives as it is.

    direct: one disk tensor is one parameter. Otherwise transformers merges, splits or transposes on the way.
    """

    parameter: str
    direct: bool


def build_skeleton(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, *, real_buffers: bool = False
) -> PreTrainedModel:
    """The model on the meta device, in `dtype` (default: the checkpoint's), in eval mode.

    real_buffers: keep computed buffers (rotary frequencies) real, for a model whose weights will be filled in.
    Raises CheckpointError where transformers cannot build a causal language model from the config.
    """
    config = copy.deepcopy(checkpoint.config)  # the library writes the dtype into it
    if real_buffers:
        held = sum(entry.nbytes for entry in checkpoint.entries.values())
        refuse_absurd_sizes(build_skeleton(checkpoint, dtype), _VALUES_A_BYTE * held, checkpoint.name)
    try:
        with quiet_transformers(), bounded_modules(len(checkpoint.entries), checkpoint.name):
            make = lambda: AutoModelForCausalLM.from_config(  # noqa: E731
                config,
                dtype=dtype or checkpoint.dtype,
                trust_remote_code=checkpoint.trust_remote_code,
            )
            if real_buffers:
                with init_empty_weights(include_buffers=False):
                    model = make()
            else:
                with torch.device("meta"):
                    model = make()
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(
            f"{checkpoint.name}: transformers cannot build a causal language model from its config ({reason})",
            "check that this is a decoder model that the installed transformers knows",
        ) from None
    return model.eval()


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder blocks: the ModuleList whose members all hold linears and that is largest.

    Raises CheckpointError where no such list exists.
    """
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) == 0:
            continue
        if not all(any(isinstance(part, nn.Linear | Conv1D) for part in block.modules()) for block in module):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if best is None or size > best[0]:
            best = (size, name, module)
    if best is None:
        raise CheckpointError("the model has no list of decoder blocks with linears", "give a decoder language model")
    return best[1], best[2]


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every `nn.Linear` inside the decoder blocks by module name, routers excluded, in model order."""
    prefix, blocks = find_blocks(model)
    routers = router_names(model)
    return {
        f"{prefix}.{name}": module
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear) and f"{prefix}.{name}" not in routers
    }


def router_names(model: nn.Module) -> set[str]:
    """Linears that route tokens to experts: as wide as the number of experts that stand beside them.

    Their outputs choose between experts, so the smallest error changes which weights are used at all: never quantised.
    """
    routers = set()
    for name, module in model.named_modules():
        counts = {count for _, child in module.named_children() if (count := _expert_count(child))}
        for child_name, child in module.named_children():
            if isinstance(child, nn.Linear) and child.out_features in counts:
                routers.add(f"{name}.{child_name}" if name else child_name)
    return routers


def _expert_count(module: nn.Module) -> int:
    """Number of experts that a module holds, as a list of equal modules or stacked into 3-D parameters; else 0."""
    if isinstance(module, nn.ModuleList) and len(module) > 1 and any(True for _ in module.parameters()):
        return len(module)
    stacked = {p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3}
    return stacked.pop() if len(stacked) == 1 else 0


def is_lookup(module: nn.Embedding) -> bool:
    """Whether an embedding looks rows up and does nothing else: no scaling, offset or renormalising."""
    return type(module).forward is nn.Embedding.forward and module.max_norm is None


def unquantisable_reason(model: nn.Module, parameter: str) -> str | None:
    """Why a matrix of the decoder blocks cannot be quantised yet; None for a parameter that is not such a matrix."""
    module_name, _, leaf = parameter.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, Conv1D) and leaf == "weight":
        return "stored transposed (Conv1D): no reader of the format decodes it into this module"
    tensor = getattr(module, leaf)
    if isinstance(tensor, nn.Parameter) and tensor.dim() == 3:
        return "stacked experts: the tensor on disk is not one linear"
    return None


def map_names(model: PreTrainedModel, names: list[str]) -> dict[str, Target]:
    """Disk name to parameter, through the mapping with which transformers loads. Unknown names map to themselves."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state = model.state_dict()
    prefix = model.base_model_prefix
    targets = {}
    # Some renamings switch on at the first name that they see: the order of the library's own loader matters.
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = Target(renamed, pattern is None)
    return targets


def shared_inputs(model: nn.Module, linears: dict[str, nn.Linear]) -> tuple[list[list[str]], str | None]:
    """Sets of linears of one parent module that read the very same tensor (q/k/v, gate/up), from one run on meta.

    Servers fuse such linears into one, so they need one scheme. `model` is a skeleton fully on meta. Returns the sets,
    and why the run ended early, or None: a module whose work depends on values cannot run on meta, and what lies behind
    it is not traced.
    """
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    alive = []  # keeps the ids from being used again

    def watch(name: str, value: torch.Tensor) -> None:
        alive.append(value)
        seen[name.rpartition(".")[0], id(value)].append(name)

    reason = None
    hooks = hooked(on_read(module, partial(watch, name)) for name, module in linears.items())
    try:
        with hooks, torch.no_grad():
            # A ready 4-D mask is used as it is; building one would read values, which meta tensors do not have.
            mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool, device="meta")
            model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), attention_mask=mask, use_cache=False)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return [names for names in seen.values() if len(names) > 1], reason
