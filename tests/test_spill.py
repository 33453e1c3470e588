"""Tables in files behave like tables in memory, and leave nothing behind."""

import os
from pathlib import Path

import pytest
import torch

from quantkit import spill
from quantkit.spill import float_table


def test_a_small_table_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("a file was made"))
    assert float_table((2, 3), tmp_path).shape == (2, 3)


def test_a_large_table_holds_what_is_written_and_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_LARGEST_IN_MEMORY", 100)
    table = float_table((5, 7, 3), tmp_path)
    wanted = torch.randn(5, 7, 3)
    for part, row in zip(table.split(2), wanted.split(2), strict=True):
        part.copy_(row)
    assert torch.equal(table, wanted)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_LARGEST_IN_MEMORY", 100)
    with pytest.raises(OSError, match=r"space|large|Invalid"):
        float_table((1 << 50, 1 << 8), tmp_path)
