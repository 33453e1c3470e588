"""Same answer when served: greedy answers beside the reference's, and each answer alone beside itself in a batch.

Prompts are the unit that the bootstrap draws.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantkit.checkpoint import Checkpoint
from quantkit.errors import TextError
from quantkit.evaluate.generation import Continuation, Recheck, continue_alone, continue_in_batch, stop_tokens
from quantkit.evaluate.prompts import Prompt, load_prompts
from quantkit.evaluate.suite import Generation
from quantkit.evaluate.uncertainty import Draws, draw, estimate


@dataclass(frozen=True)
class Serving:
    """The prompts of a suite, ready for a model. stops: tokens that end an answer. rules: what enters the protocol."""

    entry: Generation
    prompts: list[Prompt]
    stops: list[int]
    rules: dict[str, Any]

    def answers(self, models: int) -> int:
        """How many continuations `models` models are asked for: the first one also in batches."""
        return len(self.prompts) * (models + (self.entry.batch is not None))


def load_serving(entry: Generation, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> Serving:
    """The prompts of an entry and where answers end.

    Raises SchemaError (the set), CheckpointError (generation_config.json) and TextError: the template refuses a
    question, a prompt holds a token that the model does not have, or leaves too little of its context.
    """
    prompts = load_prompts(entry.prompts, tokenizer, entry.limit)
    config = checkpoint.config.get_text_config()
    room = getattr(config, "max_position_embeddings", None)
    for prompt in prompts.items:
        name = f"prompt {prompt.id} of {prompts.rules['prompts']}"
        if room is not None and len(prompt.ids) + entry.new_tokens > room:
            raise TextError(
                f"{name} has {len(prompt.ids)} tokens, which with {entry.new_tokens} new ones exceeds the model's "
                f"context of {room}",
                "ask for fewer new_tokens, or give shorter prompts",
            )
        if max(prompt.ids) >= config.vocab_size:
            raise TextError(
                f"{name} holds token {max(prompt.ids)}, the model has {config.vocab_size}",
                "evaluate with the tokenizer that belongs to this model",
            )
    stops = stop_tokens(checkpoint)
    rules = prompts.rules | {"new_tokens": entry.new_tokens, "batch": entry.batch, "stop_tokens": stops}
    return Serving(entry, prompts.items, stops, rules)


def measure_serving(
    serving: Serving,
    subject: PreTrainedModel,
    expected: Sequence[Continuation] | None,
    decode: Callable[[list[int]], str],
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """`generation` beside what a reference writes, and `batching` where the suite asks for a batch.

    tick: called once an answer. Raises NumericsError where a logit is not finite, CheckpointError where transformers
    cannot generate with a model.
    """
    own, rechecks = _answers(serving, subject, tick)
    metrics: dict[str, Any] = {}
    if expected is not None:
        metrics["generation"] = generation_metrics(serving.prompts, own, expected, decode)
    if serving.entry.batch is not None:
        metrics["batching"] = batching_metrics(serving.prompts, own, rechecks, decode)
    return metrics


def continuations(
    serving: Serving, model: PreTrainedModel, tick: Callable[[], None] = lambda: None
) -> list[Continuation]:
    """What a model writes after each prompt, alone. Raises as `measure_serving`."""
    found = []
    for prompt in serving.prompts:
        found.append(continue_alone(model, prompt.ids, serving.entry.new_tokens, serving.stops))
        tick()
    return found


def _answers(
    serving: Serving, model: PreTrainedModel, tick: Callable[[], None]
) -> tuple[list[Continuation], list[Recheck]]:
    """Every prompt alone and, batch by batch, among others: logits are held for one batch only.

    The last batch is filled up with the first prompts, which are not compared again: a batch of one would tell nothing.
    """
    entry, prompts = serving.entry, serving.prompts
    own: list[Continuation] = []
    rechecks: list[Recheck] = []
    size = entry.batch or len(prompts)
    for start in range(0, len(prompts), size):
        fresh = []
        for prompt in prompts[start : start + size]:
            fresh.append(
                continue_alone(model, prompt.ids, entry.new_tokens, serving.stops, keep_logits=entry.batch is not None)
            )
            tick()
        own += [replace(run, logits=None) for run in fresh]
        if entry.batch is not None:
            filler = list(islice(cycle(range(len(prompts))), size - len(fresh)))
            rows = [*range(start, start + len(fresh)), *filler]
            rechecks += continue_in_batch(model, [prompts[n].ids for n in rows], fresh + [own[n] for n in filler])
            for _ in fresh:
                tick()
    return own, rechecks


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first index at which two answers differ, None where they are the same.

    Both have the same stops and the same bound, so neither is the beginning of the other.
    """
    return next((n for n, (token, other) in enumerate(zip(tokens, expected, strict=False)) if token != other), None)


def generation_metrics(
    prompts: Sequence[Prompt],
    own: Sequence[Continuation],
    expected: Sequence[Continuation],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """`metrics["generation"]`: identical, prefix_mean, prefix_median, prefix_share, the same by language, and samples.

    The prefix of a prompt is the number of tokens before the first that differs: the whole answer where none does.
    """
    splits = [first_difference(run.tokens, other.tokens) for run, other in zip(own, expected, strict=True)]
    lengths = np.array([len(other.tokens) for other in expected])
    prefixes = np.array([length if at is None else at for at, length in zip(splits, lengths, strict=True)])
    same = np.array([at is None for at in splits])

    def of(rows: Sequence[int]) -> dict[str, Any]:
        prefix, share, identical = prefixes[rows], (prefixes / lengths)[rows], same[rows]
        draws = draw(len(rows))
        return {
            "n": len(rows),
            "identical": estimate(draws, lambda drawn: float(identical[drawn].mean())),
            "prefix_mean": estimate(draws, lambda drawn: float(prefix[drawn].mean())),
            "prefix_median": estimate(draws, lambda drawn: float(np.median(prefix[drawn]))),
            "prefix_share": estimate(draws, lambda drawn: float(share[drawn].mean())),
        }

    languages = dict.fromkeys(prompt.language for prompt in prompts)
    by_language = {
        name: of([row for row, prompt in enumerate(prompts) if prompt.language == name]) for name in languages
    }
    samples = [
        _sample(prompt, run, other, at, decode)
        for prompt, run, other, at in zip(prompts, own, expected, splits, strict=True)
    ]
    return of(range(len(prompts))) | {"by_language": by_language, "samples": samples}


def _sample(
    prompt: Prompt, run: Continuation, other: Continuation, at: int | None, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Both answers to one prompt, and where they part. reference_gap: the lead of the reference's token, in logits."""
    sample: dict[str, Any] = {
        "prompt": prompt.id,
        "language": prompt.language,
        "question": prompt.question,
        "answer": decode(run.tokens),
        "reference_answer": decode(other.tokens),
        "tokens": len(run.tokens),
        "reference_tokens": len(other.tokens),
        "divergence": None,
    }
    if at is not None:
        sample["divergence"] = {
            "index": at,
            "before": decode(other.tokens[:at]),
            "token": _token(run.tokens[at], decode),
            "reference_token": _token(other.tokens[at], decode),
            "reference_gap": other.gaps[at],
        }
    return sample


def _token(token: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return {"id": token, "text": decode([token])}


def batching_metrics(
    prompts: Sequence[Prompt],
    own: Sequence[Continuation],
    rechecks: Sequence[Recheck],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """`metrics["batching"]`: equal, logit_difference, smallest_gap, within_reach, and the prompts that are not equal.

    within_reach: positions whose lead is at most twice the difference there, so that a difference of that size could
    have changed the token.
    """
    splits = [first_difference(seen.choices, run.tokens) for run, seen in zip(own, rechecks, strict=True)]
    same = np.array([at is None for at in splits])
    gaps = np.concatenate([run.gaps for run in own])
    differences = np.concatenate([seen.differences for seen in rechecks])

    def equal(drawn: Draws) -> float:
        return float(same[drawn].mean())

    return {
        "n": len(prompts),
        "tokens": len(gaps),
        "equal": estimate(draw(len(prompts)), equal),
        "logit_difference": {"value": float(differences.max())},
        "smallest_gap": {"value": float(gaps.min())},
        "within_reach": int((gaps <= 2 * differences).sum()),
        "unequal": [
            {
                "prompt": prompt.id,
                "index": at,
                "token": _token(seen.choices[at], decode),
                "alone_token": _token(run.tokens[at], decode),
                "alone_gap": run.gaps[at],
                "difference": seen.differences[at],
            }
            for prompt, run, seen, at in zip(prompts, own, rechecks, splits, strict=True)
            if at is not None
        ],
    }
