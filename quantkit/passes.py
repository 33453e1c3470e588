"""Passes: thin adapters between a recipe's steps and the pure algorithms."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quantkit.algorithms.rtn import rtn_quantize
from quantkit.schema import Strict
from quantkit.types import QuantizedTensor, QuantScheme


class RtnOptions(Strict):
    """Round to nearest has no options."""


@dataclass(frozen=True)
class Quantiser:
    """A step that turns a float weight `[out, in]` into codes."""

    options: type[Strict]
    run: Callable[[torch.Tensor, QuantScheme], QuantizedTensor]


QUANTISERS: dict[str, Quantiser] = {"rtn": Quantiser(RtnOptions, rtn_quantize)}

# Every step that a recipe may name; transforms will stand beside the quantisers.
PASSES = {**QUANTISERS}
