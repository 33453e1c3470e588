"""Per-token scores of a model on windows, alone or beside a reference, and the metrics made of them.

Perplexity is exp(total negative log-likelihood / count), never a mean of window perplexities. Fidelity compares the
next-token distributions of reference p and artifact q: KL(p || q), agreement of the most likely token, and the
probability sum(min(p, q)) that a speculative sampler would accept q's token in place of p's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from quantkit.errors import CheckpointError, NumericsError
from quantkit.evaluate.loader import exactly
from quantkit.evaluate.uncertainty import Draws, draw, estimate

# Rows of logits that are turned into probabilities at a time: 128 rows of a 150,000-word vocabulary are 77 MB.
_ROWS = 128
LARGEST_LOSS = 700.0  # nats; exp of more is no float, and a report holds numbers alone

Array = np.ndarray[Any, Any]
# Logits `[length - 1, vocabulary]` of the window of token ids `[length]`.
Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """Per prediction, `[windows, length - 1]`: nll; with a reference also its nll, and kl, top1 and acceptance."""

    nll: Array
    reference_nll: Array | None = None
    kl: Array | None = None
    top1: Array | None = None
    acceptance: Array | None = None


@torch.no_grad()
def score_windows(
    model: PreTrainedModel,
    ids: torch.Tensor,
    reference: PreTrainedModel | Logits | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Scores:
    """Score each window of `ids` (`[windows, length]`) on its own.

    reference: a model, or what gives the logits of one. Raises NumericsError where a logit, or a score made of it, is
    not finite.
    """
    columns: dict[str, list[Array]] = {}
    beside = partial(window_logits, reference) if isinstance(reference, nn.Module) else reference
    for window in ids:
        logits = window_logits(model, window)
        expected = None if beside is None else beside(window)
        for name, values in score_rows(logits, expected, window[1:]).items():
            if not np.isfinite(values).all():
                raise NumericsError("logits lie further apart than float32 holds", "lower the damage of the recipe")
            columns.setdefault(name, []).append(values)
        progress()
    return Scores(**{name: np.stack(values) for name, values in columns.items()})


def window_logits(model: PreTrainedModel, window: torch.Tensor) -> torch.Tensor:
    """Logits of all predictions of `window` `[length]` but the last, `[length - 1, vocabulary]`, in the model's dtype.

    Raises CheckpointError for a window or a token that the model has no row for, NumericsError for logits that are not
    finite.
    """
    try:
        with exactly(model):  # an expert that one token of the window reaches would take it for a step of decoding
            logits = model(input_ids=window.unsqueeze(0).to(model.device), use_cache=False).logits[0, :-1].cpu()
    except IndexError:
        raise CheckpointError(
            f"the model has no row for one of {len(window)} positions, or for token {int(window.max())}",
            "use shorter windows, or the tokenizer that belongs to this model",
        ) from None
    if not torch.isfinite(logits).all():
        raise NumericsError("the model puts out NaN or infinite logits", "lower the damage, or evaluate in float32")
    return logits


def score_rows(logits: torch.Tensor, expected: torch.Tensor | None, labels: torch.Tensor) -> dict[str, Array]:
    """The fields of `Scores` for rows of logits `[n, vocabulary]` and labels `[n]`, each `[n]`."""
    parts: dict[str, list[torch.Tensor]] = {}
    for start in range(0, len(labels), _ROWS):
        rows = slice(start, start + _ROWS)
        target = labels[rows].unsqueeze(1)
        log_q = torch.log_softmax(logits[rows].float(), dim=-1)
        found = {"nll": -log_q.gather(1, target).squeeze(1)}
        if expected is not None:
            log_p = torch.log_softmax(expected[rows].float(), dim=-1)
            p = log_p.exp()
            found["reference_nll"] = -log_p.gather(1, target).squeeze(1)
            found["kl"] = (p * (log_p - log_q)).sum(-1).clamp_(min=0)
            found["top1"] = log_p.argmax(-1) == log_q.argmax(-1)
            found["acceptance"] = torch.minimum(p, log_q.exp()).sum(-1)
        for name, values in found.items():
            parts.setdefault(name, []).append(values)
    return {name: torch.cat(values).double().numpy() for name, values in parts.items()}


def perplexity_metrics(scores: Scores) -> dict[str, Any]:
    """value, and with a reference: reference and ratio; each {value, low, high}."""
    draws = draw(len(scores.nll))
    metrics: dict[str, Any] = {"value": estimate(draws, lambda windows: _perplexity(scores.nll, windows))}
    reference = scores.reference_nll
    if reference is not None:
        metrics["reference"] = estimate(draws, lambda windows: _perplexity(reference, windows))
        metrics["ratio"] = estimate(draws, lambda windows: _perplexity(scores.nll - reference, windows))
    metrics["tokens"] = int(scores.nll.size)
    return metrics


def fidelity_metrics(scores: Scores) -> dict[str, Any]:
    """kl_mean, kl_p99, top1, acceptance; each {value, low, high}. Raises ValueError for scores without a reference."""
    kl, top1, acceptance = scores.kl, scores.top1, scores.acceptance
    if kl is None or top1 is None or acceptance is None:
        raise ValueError("fidelity needs scores with a reference")
    draws = draw(len(kl))
    return {
        "kl_mean": estimate(draws, _mean_of(kl)),
        "kl_p99": estimate(draws, lambda windows: float(np.quantile(kl[windows], 0.99))),
        "top1": estimate(draws, _mean_of(top1)),
        "acceptance": estimate(draws, _mean_of(acceptance)),
        "tokens": int(kl.size),
    }


def _perplexity(nll: Array, windows: Draws) -> float:
    return float(np.exp(min(nll.mean(axis=1)[windows].mean(), LARGEST_LOSS)))


def _mean_of(values: Array) -> Callable[[Draws], float]:
    means = values.mean(axis=1)
    return lambda windows: float(means[windows].mean())
