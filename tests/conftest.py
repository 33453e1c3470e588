"""Fixtures that every test may use."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantkit.evaluate import kept
from tests import zoo as architectures


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small products: threads that wait for each other make them slower. The real model keeps the machine's threads."""
    if request.node.get_closest_marker("real"):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _nothing_kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads what the user, or another test, has kept of a reference."""
    monkeypatch.setattr(kept, "cache_dir", lambda: tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint directory of a tiny architecture, written once a session. Tests must not change it."""
    root = tmp_path_factory.mktemp("zoo")

    def checkpoint(name: str) -> Path:
        directory = root / name
        return directory if directory.is_dir() else architectures.save(name, directory)

    return checkpoint
