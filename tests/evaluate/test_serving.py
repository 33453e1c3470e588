"""Same answer when served: metrics by hand, two models against a naive loop, and all of it in a report and a gate."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import CheckpointError, ReportError, SchemaError, TextError
from quantkit.evaluate.generation import Continuation, Recheck
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.prompts import Prompt
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.serving import (
    Serving,
    batching_metrics,
    continuations,
    first_difference,
    generation_metrics,
    load_serving,
    measure_serving,
)
from quantkit.evaluate.suite import Generation, Suite
from quantkit.gates import Policy, gate
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import write_report

Zoo = Callable[[str], Path]
NEW = 12
PROMPTS = """
name: mine
prompts:
  - {id: a, language: en, text: "Which valve opens at 3.5 MPa, and who has checked it?"}
  - {id: b, language: zh, text: 阀门}
  - {id: c, language: en, text: "Why"}
  - {id: d, language: zh, text: 爆破片什么时候更换？}
  - {id: e, language: en, text: "Name the evidence."}
"""


@pytest.fixture(scope="module")
def home(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, an artifact of it, a text and prompts. Tests must not change them."""
    root = tmp_path_factory.mktemp("serving")
    source = shutil.copytree(zoo("qwen2"), root / "source")
    convert(make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64-zp")), root / "artifact")
    (root / "notes.txt").write_text("The valve opens at 3.5 MPa. " * 8)
    (root / "mine.yaml").write_text(PROMPTS, encoding="utf-8")
    return root


def entry(home: Path, **changes: Any) -> Generation:
    return Generation(**{"prompts": str(home / "mine.yaml"), "new_tokens": NEW, "batch": 2} | changes)


def suite(home: Path, **changes: Any) -> Suite:
    corpus = {"text": str(home / "notes.txt"), "windows": 2, "length": 40}
    return Suite(name="s", perplexity=[corpus], fidelity=corpus, generation=entry(home, **changes).model_dump())


def loaded(home: Path, **changes: Any) -> tuple[Serving, Checkpoint]:
    checkpoint = open_checkpoint(str(home / "source"))
    return load_serving(entry(home, **changes), checkpoint, checkpoint.tokenizer()), checkpoint


def decode(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def naive(model: PreTrainedModel, serving: Serving) -> list[list[int]]:
    """The answer to each prompt by a loop that runs the whole text again for each token."""
    answers = []
    for prompt in serving.prompts:
        ids = list(prompt.ids)
        with torch.no_grad():
            for _ in range(serving.entry.new_tokens):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                if ids[-1] in serving.stops:
                    break
        answers.append(ids[len(prompt.ids) :])
    return answers


# Metrics


def asked(*languages: str) -> list[Prompt]:
    return [Prompt(f"p{n}", language, f"question {n}", [1, 2]) for n, language in enumerate(languages)]


def answered(*answers: Sequence[int]) -> list[Continuation]:
    return [Continuation(list(tokens), [float(token) for token in tokens]) for tokens in answers]


def test_the_first_difference_is_an_index_or_nothing() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([9], [1, 5, 3]) == 0
    assert first_difference([1, 2], [1, 2]) is None


def test_generation_metrics_are_those_counted_by_hand() -> None:
    own = answered([1, 2, 3, 4], [5, 6, 9, 9], [7, 2], [3, 3, 3, 3])
    expected = answered([1, 2, 3, 4], [5, 6, 7, 8], [7, 2], [4, 3, 3, 3])
    found = generation_metrics(asked("en", "zh", "zh", "zh"), own, expected, decode)
    assert found["n"] == 4
    assert found["identical"]["value"] == 0.5
    assert found["prefix_mean"]["value"] == (4 + 2 + 2 + 0) / 4
    assert found["prefix_median"]["value"] == 2.0
    assert found["prefix_share"]["value"] == (1 + 0.5 + 1 + 0) / 4
    assert found["identical"]["low"] < 0.5 < found["identical"]["high"]
    assert found["by_language"]["en"] | {"n": 0} == {
        "n": 0, "identical": {"value": 1.0}, "prefix_mean": {"value": 4.0}, "prefix_median": {"value": 4.0},
        "prefix_share": {"value": 1.0},
    }  # fmt: skip
    assert found["by_language"]["zh"]["n"] == 3
    assert found["by_language"]["zh"]["prefix_mean"]["value"] == pytest.approx(4 / 3)


def test_a_sample_holds_both_answers_and_where_they_part() -> None:
    own, expected = answered([5, 6, 9, 9], [7, 2]), answered([5, 6, 8, 1], [7, 2])
    first, second = generation_metrics(asked("en", "zh"), own, expected, decode)["samples"]
    assert first == {
        "prompt": "p0", "language": "en", "question": "question 0", "answer": "<5><6><9><9>", "tokens": 4,
        "reference_answer": "<5><6><8><1>", "reference_tokens": 4,
        "divergence": {
            "index": 2, "before": "<5><6>", "token": {"id": 9, "text": "<9>"},
            "reference_token": {"id": 8, "text": "<8>"}, "reference_gap": 8.0,
        },
    }  # fmt: skip
    assert (second["divergence"], second["tokens"]) == (None, 2)


def test_batching_metrics_are_those_counted_by_hand() -> None:
    own = [Continuation([5, 6, 7], [0.5, 0.02, 3.0]), Continuation([8, 2], [0.25, 1.0])]
    rechecks = [Recheck([5, 9, 7], [0.1, 0.01, 0.3]), Recheck([8, 2], [0.126, 0.4])]
    found = batching_metrics(asked("en", "zh"), own, rechecks, decode)
    assert found["equal"]["value"] == 0.5
    assert (found["n"], found["tokens"]) == (2, 5)
    assert found["logit_difference"] == {"value": 0.4}
    assert found["smallest_gap"] == {"value": 0.02}
    assert found["within_reach"] == 2, "0.02 of 2 * 0.01, 0.25 of 2 * 0.126"
    assert found["unequal"] == [
        {
            "prompt": "p0", "index": 1, "token": {"id": 9, "text": "<9>"}, "alone_token": {"id": 6, "text": "<6>"},
            "alone_gap": 0.02, "difference": 0.01,
        }
    ]  # fmt: skip


# Two models


def test_the_same_model_never_parts_from_itself(home: Path) -> None:
    serving, checkpoint = loaded(home)
    found = measure_serving(
        serving, load_checkpoint(checkpoint), continuations(serving, load_checkpoint(checkpoint)), decode
    )
    certain = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["generation"]["identical"] == found["generation"]["prefix_share"] == certain
    assert all(sample["divergence"] is None for sample in found["generation"]["samples"])
    assert found["batching"]["equal"] == certain
    assert found["batching"]["unequal"] == []
    assert found["batching"]["logit_difference"]["value"] < 2e-5


@pytest.mark.parametrize("noise", [0.003, 0.1])
def test_a_perturbed_model_parts_where_a_naive_loop_finds_it(noise: float, home: Path) -> None:
    serving, checkpoint = loaded(home)
    base, other = load_checkpoint(checkpoint), load_checkpoint(checkpoint)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    answers, expected = naive(other, serving), naive(base, serving)
    found = measure_serving(serving, other, continuations(serving, base), decode)["generation"]
    splits = [
        next((n for n in range(min(len(a), len(b))) if a[n] != b[n]), None)
        for a, b in zip(answers, expected, strict=True)
    ]
    assert any(split is not None for split in splits)
    for sample, answer, other_answer, split in zip(found["samples"], answers, expected, splits, strict=True):
        assert (sample["answer"], sample["reference_answer"]) == (decode(answer), decode(other_answer))
        if split is None:
            assert sample["divergence"] is None
        else:
            assert sample["divergence"]["index"] == split
            assert sample["divergence"]["before"] == decode(other_answer[:split])
            assert sample["divergence"]["token"]["id"] == answer[split]
            assert sample["divergence"]["reference_token"]["id"] == other_answer[split]


@pytest.mark.parametrize("batch", [2, 3, 5, 8])
def test_every_prompt_is_compared_once_in_a_full_batch(batch: int, home: Path) -> None:
    serving, checkpoint = loaded(home, batch=batch)
    model = load_checkpoint(checkpoint)
    sizes: set[int] = set()
    watch = model.register_forward_pre_hook(lambda _, __, kwargs: sizes.add(len(kwargs["input_ids"])), with_kwargs=True)
    found = measure_serving(serving, model, None, decode)
    watch.remove()
    assert sizes == {1, batch}
    assert found.keys() == {"batching"}
    assert found["batching"]["n"] == 5
    assert found["batching"]["tokens"] == sum(map(len, naive(model, serving)))
    assert found["batching"]["equal"]["value"] == 1.0


def test_a_fault_of_padding_fails_the_share_of_equal_prompts(zoo: Zoo, home: Path) -> None:
    checkpoint = open_checkpoint(str(zoo("gpt2")))
    model = load_checkpoint(checkpoint)

    def counts_padding(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" not in kwargs:  # a single prompt, which has no padding
            return args, kwargs
        total, width = kwargs["attention_mask"].shape[-1], kwargs["input_ids"].shape[1]
        return args, kwargs | {"position_ids": torch.arange(total - width, total).expand(kwargs["input_ids"].shape)}

    serving = load_serving(entry(home), checkpoint, checkpoint.tokenizer())
    healthy = measure_serving(serving, model, None, decode)["batching"]
    model.register_forward_pre_hook(counts_padding, with_kwargs=True)
    faulty = measure_serving(serving, model, None, decode)["batching"]
    assert healthy["equal"]["value"] == 1.0 > faulty["equal"]["value"]
    assert healthy["logit_difference"]["value"] < 2e-5 < 1e-2 < faulty["logit_difference"]["value"]
    assert healthy["within_reach"] == 0 < faulty["within_reach"]
    assert faulty["unequal"]


def test_each_answer_is_told_once(home: Path) -> None:
    for changes, models, expected in (({}, 2, 15), ({"batch": None}, 2, 10), ({"limit": 3}, 1, 6)):
        serving, checkpoint = loaded(home, **changes)
        model = load_checkpoint(checkpoint)
        told: list[int] = []

        def tick(told: list[int] = told) -> None:
            told.append(1)

        before = continuations(serving, model, tick) if models == 2 else None
        measure_serving(serving, model, before, decode, tick)
        assert len(told) == serving.answers(models) == expected


# What cannot be asked


def test_a_prompt_that_leaves_too_little_of_the_context_is_an_error(home: Path) -> None:
    with pytest.raises(
        TextError, match=r"prompt a of mine has \d+ tokens, which with 100 new ones exceeds the model's context"
    ):
        loaded(home, new_tokens=100)


def test_a_prompt_with_a_token_that_the_model_does_not_have_is_an_error(home: Path) -> None:
    checkpoint = open_checkpoint(str(home / "source"))
    tokenizer = checkpoint.tokenizer()
    tokenizer.add_tokens(["valve"])
    with pytest.raises(TextError, match="prompt a of mine holds token 257, the model has 256"):
        load_serving(entry(home), checkpoint, tokenizer)


def test_a_set_that_does_not_exist_is_an_error_before_a_model_is_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.evaluate.run.load_artifact", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SchemaError, match="case-study"):
        evaluate(str(home / "artifact"), suite(home, prompts="case-stuhdy"))


def test_generation_defaults_that_cannot_be_read_are_an_error(home: Path, tmp_path: Path) -> None:
    source = shutil.copytree(home / "source", tmp_path / "source")
    (source / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not readable JSON"):
        evaluate(str(source), suite(home))


# In a report


def test_a_report_compares_answers_with_the_source_and_each_with_itself_in_a_batch(home: Path) -> None:
    told: list[int | None] = []
    report = evaluate(str(home / "artifact"), suite(home), progress=told.append)
    assert told == [2 + 15, *[None] * 17]
    serving, checkpoint = loaded(home)
    answers = [sample["answer"] for sample in report.metrics["generation"]["samples"]]
    expected = [sample["reference_answer"] for sample in report.metrics["generation"]["samples"]]
    tokenizer = checkpoint.tokenizer()
    assert answers == [tokenizer.decode(ids) for ids in naive(load_artifact(home / "artifact"), serving)]
    assert expected == [tokenizer.decode(ids) for ids in naive(load_checkpoint(checkpoint), serving)]
    assert answers != expected
    assert report.metric("generation.by_language.zh.prefix_mean") is not None
    assert report.metrics["batching"]["equal"]["value"] == 1.0
    rules = report.protocol_record["generation"]
    assert {key: rules[key] for key in ("prompts", "count", "new_tokens", "batch", "stop_tokens")} == {
        "prompts": "mine", "count": 5, "new_tokens": NEW, "batch": 2, "stop_tokens": [2],
    }  # fmt: skip
    assert "task_answers" not in report.run
    json.dumps(report.metrics, allow_nan=False)


def test_without_a_reference_only_the_batch_is_measured_and_a_note_says_so(home: Path) -> None:
    report = evaluate(str(home / "source"), suite(home))
    assert "generation" not in report.metrics
    assert report.metrics["batching"]["n"] == 5
    assert any("answers were not compared" in note for note in report.notes)


def test_a_limit_cuts_the_prompts_and_the_protocol_says_so(home: Path) -> None:
    whole, cut = (evaluate(str(home / "artifact"), suite(home), limit=limit) for limit in (None, 2))
    assert cut.metrics["generation"]["n"] == cut.metrics["batching"]["n"] == 2
    assert cut.suite.limit == 2
    assert cut.protocol != whole.protocol


def test_a_suite_that_generates_nothing_has_the_protocol_that_it_had(home: Path) -> None:
    plain = suite(home).model_copy(update={"generation": None})
    assert "generation" not in evaluate(str(home / "artifact"), plain, limit=1).protocol_record


def test_a_policy_can_bound_answers_and_batches(home: Path, tmp_path: Path) -> None:
    path = shutil.copytree(home / "artifact", tmp_path / "artifact")
    asked = suite(home)
    (tmp_path / "s.yaml").write_text(json.dumps(asked.model_dump(mode="json")))
    write_report(evaluate(str(path), asked, reference=str(home / "source")), path / "evals" / "s.json")

    def judged(*limits: dict[str, Any]) -> list[str]:
        policy = Policy(name="p", suite=str(tmp_path / "s.yaml"), limits=list(limits))
        return [row.outcome for row in gate(path, policy).rows[2:]]

    assert judged(
        {"metric": "batching.equal", "min": 1.0},
        {"metric": "batching.logit_difference", "max": 1e-3},
        {"metric": "batching.within_reach", "max": 0},
        {"metric": "generation.prefix_share", "min": 0.0, "upper": True},
        {"metric": "generation.identical", "min": 1.0},
        {"metric": "generation.by_language.zh.prefix_mean", "max": NEW},
    ) == ["pass", "pass", "pass", "pass", "fail", "pass"]
    with pytest.raises(ReportError, match="no confidence interval"):
        judged({"metric": "batching.smallest_gap", "min": 0.0, "upper": True})
