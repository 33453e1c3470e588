"""What hooks on modules share: what a module reads, gone after the run, and a tensor known by its place in memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def on_read(
    module: nn.Module, see: Callable[[torch.Tensor], torch.Tensor | None], *, first: bool = False
) -> RemovableHandle:
    """Call `see` with what `module` is about to read, the first tensor that it is given, by position or by name.

    What `see` returns, unless None, is read in its place. first: before all hooks that are there.
    """

    def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        given: dict[Any, Any] = dict(enumerate(arguments)) | keywords
        place = next((place for place, value in given.items() if isinstance(value, torch.Tensor)), None)
        value = None if place is None else see(given[place])
        if value is None:
            return None
        given[place] = value
        return tuple(given[n] for n in range(len(arguments))), {name: given[name] for name in keywords}

    return module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove the hooks behind `handles` where the `with` ends, however it ends."""
    with ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle)
        yield


# Address, shape, and how often the tensor had been written to.
Place = tuple[int, torch.Size, int]


def place_of(tensor: torch.Tensor) -> Place:
    """The same for tensors that are one and the same and hold the same, as long as somebody keeps both.

    Writes are not counted in inference mode.
    """
    return tensor.data_ptr(), tensor.shape, 0 if tensor.is_inference() else tensor._version
