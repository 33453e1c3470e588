"""Bounds on what files that others wrote may ask for: counts, modules, buffers, and programs such as chat templates."""

import json
import os
import re
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from quantkit.errors import CheckpointError

# Keys of a config that count parts of a model; no model has more of any than the limit.
_COUNTS = re.compile(r"(^|_)(layers?|blocks|experts?|heads?|stages?|depths?|block_count|expert_count|head_count)$")
_LARGEST_COUNT = 1 << 16
# Modules a tensor: containers, activations and rotary tables have none. And so many are free.
_MODULES_A_TENSOR = 64
_FREE_MODULES = 4096
# Computed buffers beside the weights: masks and rotary tables.
_FREE_BUFFER_BYTES = 1 << 28


def refuse_absurd_counts(values: Any, origin: object) -> None:
    """Raises CheckpointError where a config asks for more layers, heads or experts than any model has.

    Libraries make lists of that many entries before anything can be compared with the weights.
    """
    places = [("", values)]
    while places:
        key, value = places.pop()
        if isinstance(value, dict):
            places += [(str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            places += [(key, inner) for inner in value]
        elif isinstance(value, int | float) and abs(value) > _LARGEST_COUNT and _COUNTS.search(key):
            raise CheckpointError(f"{origin}: {key} is {value:.6g}", "use the config that belongs to these weights")


@contextmanager
def bounded_modules(tensors: int, name: str) -> Iterator[None]:
    """While a model is built: raises CheckpointError once it has more modules than `tensors` weights could fill."""
    limit, made = _FREE_MODULES + _MODULES_A_TENSOR * tensors, 0

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if made > limit:
            raise CheckpointError(
                f"{name}: its config asks for more than {limit} modules, its files hold {tensors} tensors",
                "use the config that belongs to these weights",
            )

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def refuse_absurd_sizes(skeleton: nn.Module, most: int, name: str) -> None:
    """Raises CheckpointError where a model on meta has more than `most` values, all that its files could hold.

    Buffers are what the model computes for itself: rotary tables, in some models masks.
    """
    weights = sum(parameter.numel() for parameter in skeleton.parameters())
    buffers = sum(buffer.nbytes for buffer in skeleton.buffers())
    if weights > most or buffers > _FREE_BUFFER_BYTES + 4 * most:
        raise CheckpointError(
            f"{name}: its config makes a model of {weights} values and {buffers} bytes of buffers, its files hold at "
            f"most {most} values",
            "use the config that belongs to these weights",
        )


def run_bounded(work: Callable[[], Any], seconds: float, memory: int) -> Any:
    """What `work` returns (plain JSON values), computed in a forked child that may take `memory` more bytes.

    Raises TimeoutError after `seconds`, and MemoryError where the child ended without an answer.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):  # whatever happens in here, the parent's code never goes on in the child
            os.close(reading)
            _bound_this_process(seconds, memory)
            with os.fdopen(writing, "wb") as stream:
                stream.write(json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    try:
        answer = _read_all(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    try:
        return json.loads(answer)
    except ValueError:
        raise MemoryError(f"more than {memory} bytes") from None


def _bound_this_process(seconds: float, memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    # If the parent is killed, nobody else would end this.
    whole = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _read_all(descriptor: int, stop: float) -> bytes:
    """All bytes until the other end closes. Raises TimeoutError at the monotonic time `stop`."""
    parts: list[bytes] = []
    while True:
        left = stop - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
