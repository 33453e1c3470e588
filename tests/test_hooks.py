"""Hooks that are gone after a run, and tensors known by their place."""

import pytest
import torch
from torch import nn

from quantkit.hooks import hooked, place_of


def test_hooks_act_inside_the_with_and_are_gone_after_it_also_after_an_error() -> None:
    modules, seen = [nn.Identity(), nn.Identity()], []

    def hook(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG001
        seen.append(arguments[0])

    def fails() -> None:
        with hooked(module.register_forward_pre_hook(hook) for module in modules):
            modules[1](torch.ones(2))
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert len(seen) == 1
    assert all(not module._forward_pre_hooks for module in modules)


def test_a_tensor_has_the_place_of_itself_and_of_no_other() -> None:
    table = torch.zeros(4, 3)
    assert place_of(table) == place_of(table.view(4, 3))
    assert place_of(table) != place_of(table[1:])
    assert place_of(table) != place_of(table[:2])
    assert place_of(table) != place_of(table.clone())
