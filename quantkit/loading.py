"""Filling a skeleton with tensors from disk, renamed and merged as transformers does when it loads."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from quantkit.checkpoint import quiet_transformers
from quantkit.errors import CheckpointError
from quantkit.tensorfile import TensorEntry, read_tensor


class _Lazy:
    """A tensor that is read when the loader of transformers asks for its values."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry

    def __getitem__(self, index: Any) -> torch.Tensor:
        return read_tensor(self._entry)[index]


def fill_parameters(model: PreTrainedModel, entries: dict[str, TensorEntry], name: str) -> set[str]:
    """Load `entries` (by disk name) into `model`, cast to its parameters' dtypes; returns parameters without tensor.

    Raises CheckpointError where a tensor does not fit the model called `name`.
    """
    settings = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), dtype=model.dtype)
    lazy = {key: _Lazy(entry) for key, entry in entries.items()}
    with quiet_transformers(), torch.no_grad():
        info, _ = convert_and_load_state_dict_in_model(model, lazy, settings, None)
    problems = [*info.conversion_errors, *info.mismatched_keys]
    if problems:
        raise CheckpointError(f"{name}: tensor {problems[0]} does not fit the model", "run quantkit verify")
    model.requires_grad_(False)
    missing: set[str] = info.missing_keys
    return missing


def fill_and_tie(model: PreTrainedModel, entries: dict[str, TensorEntry], name: str) -> None:
    """As `fill_parameters`; then tie what the config ties."""
    missing = fill_parameters(model, entries, name)
    with quiet_transformers():
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
