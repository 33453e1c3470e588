"""Hooks that see what a module reads and are gone after a run, and tensors known by their place."""

from typing import Any

import pytest
import torch
from torch import nn

from quantkit.hooks import hooked, on_read, place_of


class _Scale(nn.Module):
    def forward(self, value: torch.Tensor, factor: int = 2) -> torch.Tensor:
        return value * factor


def test_what_a_module_reads_is_seen_by_position_and_by_name() -> None:
    module, seen = _Scale(), []
    with hooked([on_read(module, seen.append)]):
        assert module(torch.tensor(3), 4) == 12
        assert module(value=torch.tensor(5), factor=4) == 20
        assert module(factor=4, value=torch.tensor(6)) == 24
    module(torch.tensor(7))
    assert seen == [3, 5, 6]


def test_what_is_read_is_the_first_tensor_whatever_the_module_takes_beside_it() -> None:
    class Anything(nn.Module):
        def forward(self, *arguments: Any, adapter: Any = None, **named: Any) -> Any:
            return arguments, adapter, named

    module, seen = Anything(), []
    one, other = torch.tensor(1), torch.tensor(2)
    with hooked([on_read(module, seen.append)]):
        module(one, other)
        module(None, other)
        module(adapter=None, x=one, y=other)
        module("no", tensor="at all")
    assert [int(value) for value in seen] == [1, 2, 1]
    with hooked([on_read(module, lambda value: value + 5)]):
        assert module(None, one, x=other) == ((None, 6), None, {"x": 2})
        assert module(adapter=None, x=one, y=other) == ((), None, {"x": 6, "y": 2})


def test_what_a_watcher_returns_is_read_in_place_of_what_was_given() -> None:
    module = _Scale()
    with hooked([on_read(module, lambda value: value + 1)]):
        assert module(torch.tensor(3), 4) == 16
        assert module(value=torch.tensor(3), factor=4) == 16


def test_a_watcher_that_is_to_be_first_sees_what_was_given() -> None:
    module, seen = _Scale(), []
    handles = [on_read(module, lambda value: value + 1), on_read(module, seen.append, first=True)]
    with hooked(handles):
        assert module(torch.tensor(3)) == 8
    assert seen == [3]


def test_hooks_act_inside_the_with_and_are_gone_after_it_also_after_an_error() -> None:
    modules, seen = [nn.Identity(), nn.Identity()], []

    def fails() -> None:
        with hooked(on_read(module, seen.append) for module in modules):
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
    before = place_of(table)
    table += 1
    assert place_of(table) != before
