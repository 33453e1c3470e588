"""What a model did on the documents of a task, and the metrics made of it, alone or paired with a reference.

Documents are the unit that the bootstrap draws; the draws are the same for artifact and reference, so that the interval
of a drop or a ratio is that of pairs. A drop is positive where the artifact is worse, whichever way the metric counts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from quantkit.evaluate.uncertainty import Draws, draw, estimate

Aggregate = Callable[[Any], Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Rule:
    """How a metric's items, one a document, become a number, and whether a larger number is better."""

    aggregate: Aggregate
    higher_is_better: bool


@dataclass(frozen=True)
class Outcome:
    """One model on one task.

    documents: a hash of each document with its prompts. items: for each metric one item a document (a number, or what
    the metric's rule takes), None where the document has none. options: for a choice task the log-likelihoods of the
    options of each document, in nats.
    """

    documents: list[str]
    items: dict[str, list[Any]]
    options: list[list[float]] | None = None

    def of(self, indices: Sequence[int]) -> "Outcome":
        """The same on some of the documents."""
        options = None if self.options is None else [self.options[index] for index in indices]
        items = {name: [values[index] for index in indices] for name, values in self.items.items()}
        return Outcome([self.documents[index] for index in indices], items, options)


def task_metrics(
    outcome: Outcome,
    reference: Outcome | None,
    rules: Mapping[str, Rule],
    parts: Mapping[str, Mapping[str, Sequence[int]]],
) -> dict[str, Any]:
    """`n`, every metric, `margin` for a choice task, and the same for each part: `{by_language: {en: {...}}}`.

    parts: for each key of the result the names of its parts, and the indices of their documents.
    Raises ValueError where the reference was not asked the same.
    """
    if reference is not None and reference.documents != outcome.documents:
        raise ValueError("artifact and reference were asked different documents")
    metrics = _metrics(outcome, reference, rules)
    for key, indices in parts.items():
        metrics[key] = {
            part: _metrics(outcome.of(rows), None if reference is None else reference.of(rows), rules)
            for part, rows in indices.items()
        }
    return metrics


def _metrics(outcome: Outcome, reference: Outcome | None, rules: Mapping[str, Rule]) -> dict[str, Any]:
    size = len(outcome.documents)
    metrics: dict[str, Any] = {"n": size}
    draws = draw(size)
    for name, rule in rules.items():
        before = None if reference is None else reference.items.get(name, [None] * size)
        found = _metric(draws, rule, outcome.items[name], before)
        if found:
            metrics[name] = found
    if outcome.options is not None:
        metrics["margin"] = _margin(draws, outcome.options, None if reference is None else reference.options)
    return metrics


def _metric(draws: Draws, rule: Rule, items: list[Any], reference: list[Any] | None) -> dict[str, Any]:
    """value, and with a reference: reference, drop, and for a 0/1 metric lost and gained. Empty for no number."""
    value = _statistic(rule, items)
    if reference is None:
        return _present({"value": _estimate(draws, value, _can_be_drawn(items))})
    expected = _statistic(rule, reference)
    sign = 1.0 if rule.higher_is_better else -1.0
    drawn = _can_be_drawn(items) and _can_be_drawn(reference)
    found = _present(
        {
            "value": _estimate(draws, value, drawn),
            "reference": _estimate(draws, expected, drawn),
            # + 0.0: no drop at all is zero, not minus zero
            "drop": _estimate(draws, lambda rows: sign * (expected(rows) - value(rows)) + 0.0, drawn),
        }
    )
    if _is_binary(items) and _is_binary(reference):
        right, wrong = (1, 0) if rule.higher_is_better else (0, 1)
        pairs = list(zip(reference, items, strict=True))
        found |= {"lost": pairs.count((right, wrong)), "gained": pairs.count((wrong, right))}
    return found


def _margin(draws: Draws, options: list[list[float]], reference: list[list[float]] | None) -> dict[str, Any]:
    """value, and with a reference: reference, drop, ratio and kept.

    A model's margin is the score of its best option minus that of the next, so it is never negative. `kept` follows the
    option that the reference holds best: its score minus that of the best other one, negative where the artifact
    prefers another, over the reference's margin.
    """
    own = np.array([_lead(scores, _best(scores)) for scores in options])
    found: dict[str, Any] = {"value": estimate(draws, lambda rows: float(own[rows].mean()))}
    if reference is None:
        return found
    expected = np.array([_lead(scores, _best(scores)) for scores in reference])
    held = np.array([_lead(scores, _best(before)) for scores, before in zip(options, reference, strict=True)])
    found["reference"] = estimate(draws, lambda rows: float(expected[rows].mean()))
    found["drop"] = estimate(draws, lambda rows: float(expected[rows].mean() - own[rows].mean()))
    for name, leads in (("ratio", own), ("kept", held)):
        share = _estimate(draws, _share_of(leads, expected), drawn=True)
        if share is not None:
            found[name] = share
    return found


def _share_of(leads: Array, expected: Array) -> Callable[[Draws], float]:
    """Mean over mean. Python's division: documents that are all ties divide by zero, which is no number."""
    return lambda rows: float(leads[rows].mean()) / float(expected[rows].mean())


def _best(scores: Sequence[float]) -> int:
    return int(np.argmax(scores))


def _lead(scores: Sequence[float], option: int) -> float:
    """How far an option stands above the best of the others."""
    return scores[option] - max(score for index, score in enumerate(scores) if index != option)


def _statistic(rule: Rule, items: list[Any]) -> Callable[[Draws], float]:
    """The aggregate of the documents at the given indices; documents without the metric are left out."""
    if all(map(_is_number, items)):
        values: Array = np.array(items, dtype=np.float64)
        return lambda rows: float(rule.aggregate(values[rows]))
    return lambda rows: float(rule.aggregate([items[row] for row in rows if items[row] is not None]))


def _estimate(draws: Draws, statistic: Callable[[Draws], float], drawn: bool) -> dict[str, float] | None:
    """The statistic, with its interval where every draw has a number; None where it is no finite one, as exp(1000)."""
    ways: list[Callable[[], dict[str, float]]] = [lambda: estimate(draws, statistic)] if drawn else []
    ways.append(lambda: {"value": float(statistic(np.arange(draws.shape[1])))})
    for way in ways:
        with suppress(ArithmeticError, ValueError, TypeError), np.errstate(invalid="ignore"):
            found = way()
            if all(map(math.isfinite, found.values())):
                return found
    return None


def _can_be_drawn(items: list[Any]) -> bool:
    """Whether every document has the metric, in numbers: aggregates of texts (a corpus BLEU) are too slow to repeat."""
    return all(all(map(_is_number, np.ravel(item))) if _is_row(item) else _is_number(item) for item in items)


def _is_row(item: Any) -> bool:
    return isinstance(item, tuple | list | np.ndarray)


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float | np.number | np.bool_)


def _is_binary(items: list[Any]) -> bool:
    return all(_is_number(item) and item in (0, 1) for item in items)


def _present(found: dict[str, dict[str, float] | None]) -> dict[str, Any]:
    """Without what could not be estimated; nothing at all where the value itself could not."""
    return {name: metric for name, metric in found.items() if metric is not None} if found["value"] else {}
