"""Greedy answers alone and in a padded batch, against a loop without cache or padding, and what goes wrong in one."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, NumericsError
from quantkit.evaluate.generation import Continuation, continue_alone, continue_in_batch, stop_tokens
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from tests.zoo import ARCHITECTURES

Zoo = Callable[[str], Path]
NEW = 16
# Longer than the window of the one architecture that has a sliding one, and much shorter.
PROMPTS = [
    torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 40, 11, 23)
]


def model(zoo: Zoo, name: str) -> PreTrainedModel:
    return load_checkpoint(open_checkpoint(str(zoo(name))))


def naive(model: PreTrainedModel, prompt: Sequence[int], new: int, stops: Sequence[int]) -> tuple[list[int], Any]:
    """Tokens and logits `[tokens, vocabulary]` of the whole text so far, run again for each token."""
    ids, rows = list(prompt), []
    with torch.no_grad():
        while len(rows) < new and (not rows or ids[-1] not in stops):
            rows.append(model(torch.tensor([ids]), use_cache=False).logits[0, -1].float())
            ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


def both(model: PreTrainedModel, stops: Sequence[int] = (2,)) -> tuple[list[Continuation], Any]:
    alone = [continue_alone(model, prompt, NEW, stops, keep_logits=True) for prompt in PROMPTS]
    return alone, continue_in_batch(model, PROMPTS, alone)


def largest(rechecks: Any) -> float:
    return max(max(row.differences) for row in rechecks)


# Alone


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_answer_is_that_of_a_loop_without_a_cache(name: str, zoo: Zoo) -> None:
    found = model(zoo, name)
    for prompt in PROMPTS:
        run = continue_alone(found, prompt, NEW, [2], keep_logits=True)
        tokens, logits = naive(found, prompt, NEW, [2])
        assert run.tokens == tokens
        assert run.logits is not None
        torch.testing.assert_close(run.logits, logits, atol=1e-4, rtol=0)
        first = logits.sort(dim=-1, descending=True).values
        assert run.gaps == pytest.approx((first[:, 0] - first[:, 1]).tolist(), abs=1e-4)


def test_an_answer_ends_with_the_first_stop_token(zoo: Zoo) -> None:
    found = model(zoo, "llama")
    tokens, _ = naive(found, PROMPTS[0], NEW, [])
    assert continue_alone(found, PROMPTS[0], NEW, []).tokens == tokens
    stopped = continue_alone(found, PROMPTS[0], NEW, [999, tokens[4]])
    assert stopped.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert len(stopped.gaps) == len(stopped.tokens)
    assert stopped.logits is None


def test_the_models_own_defaults_take_no_part_and_are_kept(zoo: Zoo) -> None:
    plain, marked = model(zoo, "qwen2"), model(zoo, "qwen2")
    own = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=5.0, max_new_tokens=3, eos_token_id=7)
    marked.generation_config = own
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert continue_alone(marked, PROMPTS[1], NEW, []) == continue_alone(plain, PROMPTS[1], NEW, [])
    assert marked.generation_config is own
    assert torch.equal(torch.get_rng_state(), before)


# In a batch


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_of_unequal_length_give_the_same_in_a_batch(name: str, zoo: Zoo) -> None:
    alone, rechecks = both(model(zoo, name))
    assert [row.choices for row in rechecks] == [run.tokens for run in alone]
    assert [len(row.differences) for row in rechecks] == [len(run.tokens) for run in alone]
    assert largest(rechecks) < 2e-5


@pytest.mark.parametrize("recipe", ["rtn-g64", "rtn-g64-zp", "rtn-int8"])
def test_the_packed_model_gives_the_same_in_a_batch(recipe: str, zoo: Zoo, tmp_path: Path) -> None:
    convert(make_plan(open_checkpoint(str(zoo("qwen2"))), load_recipe(recipe)), tmp_path / "artifact")
    packed = load_artifact(tmp_path / "artifact")
    alone, rechecks = both(packed)
    assert [run.tokens for run in alone] == [naive(packed, prompt, NEW, [2])[0] for prompt in PROMPTS]
    assert [row.choices for row in rechecks] == [run.tokens for run in alone]
    assert largest(rechecks) < 2e-5


def test_the_batch_is_fed_what_each_prompt_gives_alone(zoo: Zoo) -> None:
    """Answers that the model would not give itself: every position still has the prefix of the answer."""
    found = model(zoo, "llama")
    forced = [[17, 200, 31, 4, 90], [8, 8], [250, 3, 3, 77], [5]]
    logits = []
    with torch.no_grad():
        for prompt, tokens in zip(PROMPTS, forced, strict=True):
            whole = found(torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
            logits.append(whole[len(prompt) - 1 : -1])
    runs = [Continuation(tokens, [0.0] * len(tokens), rows) for tokens, rows in zip(forced, logits, strict=True)]
    rechecks = continue_in_batch(found, PROMPTS, runs)
    assert [row.choices for row in rechecks] == [rows.argmax(-1).tolist() for rows in logits]
    assert largest(rechecks) < 2e-5


def test_a_row_that_only_fills_the_batch_is_not_compared(zoo: Zoo) -> None:
    found = model(zoo, "llama")
    alone, whole = both(found)
    filled = [alone[0], Continuation(alone[1].tokens, alone[1].gaps), alone[2], alone[3]]
    rechecks = continue_in_batch(found, PROMPTS, filled)
    assert [row.choices for row in rechecks] == [whole[row].choices for row in (0, 2, 3)]


# What goes wrong in a batch


def counts_padding(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Positions as if the padding were text. Without a mask, as transformers calls a single prompt, there is none."""
    if "attention_mask" not in kwargs:
        return args, kwargs
    total, width = kwargs["attention_mask"].shape[-1], kwargs["input_ids"].shape[1]
    return args, kwargs | {"position_ids": torch.arange(total - width, total).expand(kwargs["input_ids"].shape)}


def counts_padding_after_the_prompt(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The same for new tokens only, which a model with relative positions would not notice otherwise."""
    return counts_padding(module, args, kwargs) if kwargs["input_ids"].shape[1] == 1 else (args, kwargs)


def reads_padding(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Padding that is attended to."""
    masks = {name: torch.ones_like(mask) for name, mask in kwargs.items() if name == "attention_mask"}
    return args, kwargs | masks


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("gpt2", counts_padding),
        ("gpt2", reads_padding),
        ("llama", counts_padding_after_the_prompt),
        ("llama", reads_padding),
        ("qwen2", counts_padding_after_the_prompt),
    ],
)
def test_a_fault_of_padding_is_seen_in_tokens_and_logits(name: str, fault: Any, zoo: Zoo) -> None:
    found = model(zoo, name)
    found.register_forward_pre_hook(fault, with_kwargs=True)
    alone, rechecks = both(found)
    assert largest(rechecks) > 1e-2
    longest = max(range(len(PROMPTS)), key=lambda row: len(PROMPTS[row]))
    wrong = {row for row, (run, seen) in enumerate(zip(alone, rechecks, strict=True)) if run.tokens != seen.choices}
    assert wrong
    assert longest not in wrong, "the longest prompt has no padding"
    assert max(rechecks[longest].differences) < 2e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(value: float, zoo: Zoo) -> None:
    found = model(zoo, "qwen2")
    alone, _ = both(found)
    with torch.no_grad():
        found.model.norm.weight[3] = value
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        continue_alone(found, PROMPTS[0], NEW, [])
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        continue_in_batch(found, PROMPTS, alone)


def test_a_model_that_cannot_generate_is_one_line(zoo: Zoo) -> None:
    found = model(zoo, "qwen2")

    def fails(*_: Any) -> None:
        raise RuntimeError("no cache of this kind\nand more")

    found.register_forward_pre_hook(fails)
    with pytest.raises(CheckpointError, match=r"the model cannot generate \(no cache of this kind\); leave"):
        continue_alone(found, PROMPTS[0], NEW, [])


# Where an answer ends


@pytest.mark.parametrize(
    ("written", "expected"),
    [('{"eos_token_id": 7}', [7]), ('{"eos_token_id": [7, 9]}', [7, 9]), ('{"eos_token_id": null}', [2]), ("{}", [2])],
)
def test_stop_tokens_are_those_of_the_generation_defaults_then_of_the_config(
    written: str, expected: list[int], zoo: Zoo, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    (source / "generation_config.json").write_text(written)
    assert stop_tokens(open_checkpoint(str(source))) == expected
    assert AutoModelForCausalLM.from_pretrained(source).config.eos_token_id == 2


def test_a_model_that_names_no_end_has_no_stop_tokens(zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    assert stop_tokens(open_checkpoint(str(source))) == []


@pytest.mark.parametrize(
    "written",
    [
        '{"eos_token_id": "</s>"}',
        '{"eos_token_id": [2, null]}',
        '{"eos_token_id": true}',
        '{"eos_token_id": -2}',
        f'{{"eos_token_id": {1 << 63}}}',
        "[1",
        "[]",
        '"x"',
    ],
)
def test_generation_defaults_that_cannot_be_read_are_an_error(written: str, zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    (source / "generation_config.json").write_text(written)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        stop_tokens(open_checkpoint(str(source)))
