"""Bounds: absurd configs are refused before anything is made of them, and a program that runs on is ended."""

import os
import time
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.errors import CheckpointError
from quantkit.limits import bounded_modules, refuse_absurd_counts, refuse_absurd_sizes, run_bounded

MIB = 1 << 20


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"n_layer": 70_000},
        {"text_config": {"num_experts": 1 << 40}},
        {"parts": [{"num_attention_heads": 1e9}]},
        {"n_routed_experts": -(10**9)},
        {"num_hidden_layers": float("inf")},
        {"decoder_layers": [1, 10**7]},
        {"block_count": 1 << 20},
    ],
    ids=str,
)
def test_a_count_that_no_model_has_is_named(values: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: \w+ is ") as caught:
        refuse_absurd_counts(values, "config.json")
    assert "belongs to these weights" in str(caught.value)


def test_sizes_that_models_have_pass() -> None:
    refuse_absurd_counts(
        {
            "num_hidden_layers": 126, "n_routed_experts": 512, "num_attention_heads": 128, "vocab_size": 262_144,
            "max_position_embeddings": 10_485_760, "rope_theta": 1e9, "hidden_size": 1 << 17, "eos_token_id": [1, 2],
            "layer_types": ["full_attention"] * 126, "num_nextn_predict_layers": True, "head_dim": None,
        },
        "config.json",
    )  # fmt: skip


def test_a_model_of_more_modules_than_its_tensors_could_fill_stops_while_it_is_built() -> None:
    built = []

    def build() -> None:
        nn.ModuleList(built.append(n) or nn.Identity() for n in range(1_000_000))

    with (
        pytest.raises(CheckpointError, match=r"tiny: its config asks for more than 4160 modules"),
        bounded_modules(1, "tiny"),
    ):
        build()
    assert len(built) < 10_000
    nn.ModuleList(nn.Identity() for _ in range(5000))  # outside it, nothing is counted


def test_a_model_that_is_larger_than_its_files_is_refused() -> None:
    with torch.device("meta"):
        linear = nn.Linear(100, 100, bias=False)
    refuse_absurd_sizes(linear, 10_000, "tiny")
    with pytest.raises(CheckpointError, match=r"a model of 10000 values .* at most 9999"):
        refuse_absurd_sizes(linear, 9_999, "tiny")
    with torch.device("meta"):
        linear.register_buffer("mask", torch.ones(1 << 20, 1 << 20, dtype=torch.bool))
    with pytest.raises(CheckpointError, match="1099511627776 bytes of buffers"):
        refuse_absurd_sizes(linear, 10_000, "tiny")


def test_the_answer_of_bounded_work_comes_back() -> None:
    value = {"a": [1, "é\ud800", None], "long": "x" * (3 * MIB)}
    assert run_bounded(lambda: value, 30, 256 * MIB) == value


def test_work_without_end_is_ended() -> None:
    started = time.monotonic()

    def forever() -> None:
        while True:
            pass

    with pytest.raises(TimeoutError):
        run_bounded(forever, 0.5, 64 * MIB)
    assert time.monotonic() - started < 20
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # and nothing of it is left


def test_work_that_takes_too_much_memory_is_ended() -> None:
    with pytest.raises(MemoryError, match=f"more than {64 * MIB} bytes"):
        run_bounded(lambda: len(b"x" * (1 << 32)), 60, 64 * MIB)


@pytest.mark.parametrize(
    "work", [lambda: 1 / 0, lambda: os._exit(3), lambda: object()], ids=["raises", "exits", "no JSON"]
)
def test_work_that_ends_without_an_answer_is_an_error(work: Any) -> None:
    with pytest.raises(MemoryError):
        run_bounded(work, 30, 64 * MIB)


def test_nothing_of_the_child_reaches_the_parent() -> None:
    seen: list[int] = []
    assert run_bounded(lambda: seen.append(1), 30, 64 * MIB) is None
    assert seen == []
