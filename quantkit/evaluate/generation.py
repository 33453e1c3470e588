"""What a model writes after a prompt when it takes the likeliest token each time: alone, and among others in a batch.

In the batch every prompt is fed the tokens that it has alone, so both runs see the same prefix at every position, and
the first position with another choice is the one at which a free run would part.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from quantkit.checkpoint import Checkpoint, quiet_transformers
from quantkit.errors import CheckpointError, NumericsError, QuantkitError, first_line
from quantkit.schema import read_json

# Stands where the attention mask hides it, or where a row has ended.
_FILLER = 0


@dataclass(frozen=True)
class Continuation:
    """What a model wrote.

    tokens: its choices, with the one that ends the answer. gaps: the lead of each over the next one, in logits. logits:
    float32 `[tokens, vocabulary]`, or None where they were not to be kept.
    """

    tokens: list[int]
    gaps: list[float]
    logits: torch.Tensor | None = None


@dataclass(frozen=True)
class Recheck:
    """The same prefixes in a batch: the likeliest token at each position, and the largest |logit - logit alone|."""

    choices: list[int]
    differences: list[float]


def continue_alone(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int, stops: Sequence[int], *, keep_logits: bool = False
) -> Continuation:
    """The greedy continuation of token ids, by at most `new_tokens` and up to one of `stops`.

    Raises NumericsError where a logit is not finite, CheckpointError where transformers cannot generate with the model.
    """
    tokens: list[int] = []
    gaps: list[float] = []
    kept: list[torch.Tensor] = []

    def choose(_: int, logits: torch.Tensor) -> list[int]:
        first, second = logits[0].topk(2).values.tolist()
        tokens.append(int(logits[0].argmax()))
        gaps.append(first - second)
        if keep_logits:
            kept.append(logits[0].clone())
        return tokens[-1:]

    _generate(model, [prompt], new_tokens, stops, choose)
    return Continuation(tokens, gaps, torch.stack(kept) if keep_logits else None)


def continue_in_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], alone: Sequence[Continuation]
) -> list[Recheck]:
    """Each prompt in one left-padded batch, fed the tokens that it has alone.

    Prompts whose continuation holds no logits only fill the batch; the others give one result each. Raises as
    `continue_alone`.
    """
    found = [Recheck([], []) for _ in prompts]

    def choose(step: int, logits: torch.Tensor) -> list[int]:
        for row, (run, seen) in enumerate(zip(alone, found, strict=True)):
            if run.logits is not None and step < len(run.tokens):
                seen.choices.append(int(logits[row].argmax()))
                seen.differences.append(float((logits[row] - run.logits[step]).abs().max()))
        return [run.tokens[step] if step < len(run.tokens) else _FILLER for run in alone]

    _generate(model, prompts, max(len(run.tokens) for run in alone), (), choose)
    return [seen for run, seen in zip(alone, found, strict=True) if run.logits is not None]


def forced_logits(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """float32 logits `[n, vocabulary]` after each of `tokens` (n of them), given one at a time after `prompt`.

    Raises as `continue_alone`.
    """
    rows: list[torch.Tensor] = []

    def choose(step: int, logits: torch.Tensor) -> list[int]:
        rows.append(logits[0].clone())
        return [tokens[min(step, len(tokens) - 1)]]

    _generate(model, [prompt], len(tokens) + 1, (), choose)
    # The first logits are those after the prompt, from a forward of many tokens.
    return torch.stack(rows[1:])


def stop_tokens(checkpoint: Checkpoint) -> list[int]:
    """The tokens that end an answer: those of generation_config.json, else of config.json; none where neither says.

    Raises CheckpointError where generation_config.json is no JSON, or its end is no token id.
    """
    path = checkpoint.directory / "generation_config.json"
    action = "correct it, or remove it"
    own = read_json(path, CheckpointError, action) if path.is_file() else {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{path} holds no settings", action)
    found = own.get("eos_token_id")
    if found is None:
        found = getattr(checkpoint.config.get_text_config(), "eos_token_id", None)
    stops = [] if found is None else found if isinstance(found, list) else [found]
    if not all(map(_may_be_token, stops)):
        raise CheckpointError(f"{path}: {str(found)[:40]!r} is no token id to end with", action)
    return stops


def _may_be_token(stop: Any) -> bool:
    # Some models write -1 for none. True is a number in Python, and a larger one than 64 bits fits no tensor.
    return isinstance(stop, int) and not isinstance(stop, bool) and -1 <= stop < 1 << 63


# From a step, counted from 0, and float32 logits `[rows, vocabulary]` to the token of each row.
_Choose = Callable[[int, torch.Tensor], list[int]]


class _Steered(LogitsProcessor):  # type: ignore[misc]
    """Shows the logits of each step to `choose`, and lets the run go on with the tokens that it gives."""

    def __init__(self, choose: _Choose) -> None:
        self.choose = choose
        self.step = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if not torch.isfinite(scores).all():
            raise NumericsError("the model puts out NaN or infinite logits", "lower the damage, or evaluate in float32")
        tokens = torch.tensor(self.choose(self.step, scores.cpu()), device=scores.device)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(1), 0.0)


def _generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, stops: Sequence[int], choose: _Choose
) -> None:
    """Run transformers' own generation, which places padded rows as a server of transformers does."""
    width = max(map(len, prompts))
    ids = torch.tensor([[_FILLER] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=list(stops) or None, pad_token_id=_FILLER
    )
    with quiet_transformers(), _settings(model, settings):
        try:
            model.generate(
                ids.to(model.device),
                attention_mask=mask.to(model.device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([_Steered(choose)]),
            )
        except QuantkitError:
            raise
        except Exception as error:  # a model may bring code of its own, which raises anything
            raise CheckpointError(
                f"the model cannot generate ({first_line(error)})", "leave generation out of the suite"
            ) from None


@contextmanager
def _settings(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """Keep the model's own defaults, such as a penalty on repetition, out of what is measured, and put them back."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own
