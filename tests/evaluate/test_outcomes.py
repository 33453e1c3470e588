"""Metrics of tasks from what models did on each document: values, paired drops, flips and decision margins."""

import math
from typing import Any

import numpy as np
import pytest

from quantkit.evaluate.outcomes import Outcome, Rule, task_metrics
from quantkit.evaluate.uncertainty import draw


def mean(items: Any) -> float:
    return sum(items) / len(items)


def perplexity(items: Any) -> float:
    return math.exp(-mean(items))


UP, DOWN = Rule(mean, True), Rule(mean, False)
BEFORE = [1, 1, 1, 0, 0, 1, 0, 1]
AFTER = [1, 0, 0, 0, 1, 1, 0, 1]


def outcome(options: list[list[float]] | None = None, **items: list[Any]) -> Outcome:
    size = len(options or next(iter(items.values())))
    return Outcome([f"document {n}" for n in range(size)], items, options)


def test_a_drop_is_that_of_pairs_and_flips_are_counted_both_ways() -> None:
    found = task_metrics(outcome(acc=AFTER), outcome(acc=BEFORE), {"acc": UP}, {})
    assert found["n"] == 8
    metric = found["acc"]
    assert (metric["value"]["value"], metric["reference"]["value"], metric["drop"]["value"]) == (0.5, 0.625, 0.125)
    assert (metric["lost"], metric["gained"]) == (2, 1)
    drops = (np.array(BEFORE) - np.array(AFTER))[draw(8)].mean(axis=1)
    assert [metric["drop"]["low"], metric["drop"]["high"]] == pytest.approx(np.quantile(drops, [0.025, 0.975]))


def test_a_drop_is_positive_where_the_artifact_is_worse_whichever_way_the_metric_counts() -> None:
    found = task_metrics(outcome(errors=AFTER), outcome(errors=BEFORE), {"errors": DOWN}, {})["errors"]
    assert found["drop"]["value"] == -0.125
    assert (found["lost"], found["gained"]) == (1, 2)


def test_no_difference_is_zero() -> None:
    found = task_metrics(outcome(acc=AFTER), outcome(acc=AFTER), {"acc": DOWN}, {})["acc"]
    assert str(found["drop"]["value"]) == "0.0"
    assert found["drop"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert (found["lost"], found["gained"]) == (0, 0)


def test_without_a_reference_there_are_values_only() -> None:
    found = task_metrics(outcome(options=[[-1.0, -3.0]] * 8, acc=AFTER), None, {"acc": UP}, {})
    assert found["acc"].keys() == found["margin"].keys() == {"value"}


def test_other_aggregates_than_the_mean_are_resampled_too() -> None:
    values = [-0.5, -1.0, -2.0, -0.1]
    found = task_metrics(outcome(ppl=values), outcome(ppl=[-0.5] * 4), {"ppl": Rule(perplexity, False)}, {})["ppl"]
    assert found["value"]["value"] == pytest.approx(math.exp(0.9))
    assert found["drop"]["value"] == pytest.approx(math.exp(0.9) - math.exp(0.5))
    assert found["value"]["low"] < found["value"]["value"] < found["value"]["high"]
    assert "lost" not in found


def test_items_of_several_numbers_reach_their_aggregate_as_they_are() -> None:
    weighted = Rule(lambda items: sum(total for total, _ in items) / sum(words for _, words in items), False)
    found = task_metrics(outcome(rate=[(4.0, 2), (6.0, 3), (1.0, 5)]), None, {"rate": weighted}, {})["rate"]
    assert found["value"]["value"] == pytest.approx(1.1)
    assert "low" in found["value"]


def test_an_aggregate_of_texts_has_no_interval() -> None:
    same = Rule(lambda items: mean([left == right for left, right in items]), True)
    items = [("a", "a"), ("b", "c")]
    found = task_metrics(outcome(same=items), outcome(same=items), {"same": same}, {})["same"]
    assert found == {"value": {"value": 0.5}, "reference": {"value": 0.5}, "drop": {"value": 0.0}}


def test_documents_without_the_metric_are_left_out_of_it() -> None:
    found = task_metrics(outcome(acc=[1, None, 0, 1]), None, {"acc": UP}, {})["acc"]
    assert found == {"value": {"value": pytest.approx(2 / 3)}}


def test_a_metric_that_the_reference_never_has_is_a_value_alone() -> None:
    found = task_metrics(outcome(acc=[1, 0]), outcome(other=[1, 0]), {"acc": UP}, {})["acc"]
    assert found == {"value": {"value": 0.5}}


@pytest.mark.parametrize("items", [[-1000.0, -900.0], [float("nan"), 1.0], ["text", "more"]])
def test_what_is_no_finite_number_is_no_metric(items: list[Any]) -> None:
    assert "ppl" not in task_metrics(outcome(ppl=items), None, {"ppl": Rule(perplexity, False)}, {})


def test_a_number_whose_resamples_are_none_has_no_interval() -> None:
    """exp of the mean loss is finite here, of the worst document alone it is not."""
    found = task_metrics(outcome(ppl=[-800.0, -1.0]), None, {"ppl": Rule(perplexity, False)}, {})["ppl"]
    assert found == {"value": {"value": pytest.approx(math.exp(400.5))}}


def test_one_document_has_no_interval() -> None:
    assert task_metrics(outcome(acc=[1]), outcome(acc=[0]), {"acc": UP}, {})["acc"]["drop"] == {"value": -1.0}


# Margins


def test_a_margin_is_the_best_options_lead_over_the_next() -> None:
    base = [[-1.0, -3.0, -9.0], [-4.0, -2.5, -2.0]]  # leads 2 and 0.5
    packed = [[-1.0, -2.0, -9.0], [-4.0, -2.0, -2.4]]  # leads 1 and 0.4; the second prefers another option
    margin = task_metrics(outcome(packed, acc=[1, 0]), outcome(base, acc=[1, 1]), {"acc": UP}, {})["margin"]
    assert margin["value"]["value"] == pytest.approx(0.7)
    assert margin["reference"]["value"] == pytest.approx(1.25)
    assert margin["drop"]["value"] == pytest.approx(0.55)
    assert margin["ratio"]["value"] == pytest.approx(0.56)
    # The option that the base holds best: ahead by 1, then behind by 0.4.
    assert margin["kept"]["value"] == pytest.approx(0.3 / 1.25)


def test_a_model_beside_itself_keeps_its_margin() -> None:
    scores = [[-1.0, -3.0], [-5.0, -2.0], [-1.0, -1.5]]
    margin = task_metrics(outcome(scores), outcome(scores), {}, {})["margin"]
    assert margin["ratio"] == margin["kept"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_ties_of_the_reference_alone_make_no_ratio() -> None:
    for size in (1, 4):
        margin = task_metrics(outcome([[-1.0, -2.0]] * size), outcome([[-1.0, -1.0]] * size), {}, {})["margin"]
        assert margin.keys() == {"value", "reference", "drop"}


def test_a_tie_among_many_documents_keeps_the_ratio_of_all() -> None:
    """A model in bfloat16 ties often; a gate must not lose the metric for one document of hundreds."""
    base = [[-1.0, -1.0], *[[-1.0, -3.0]] * 15]
    packed = [[-1.0, -2.0], *[[-1.0, -2.0]] * 15]
    margin = task_metrics(outcome(packed), outcome(base), {}, {})["margin"]
    assert margin["ratio"]["value"] == pytest.approx(16 / 30)
    assert margin["kept"]["value"] == pytest.approx(16 / 30)
    assert margin["ratio"]["low"] < margin["ratio"]["value"] < margin["ratio"]["high"]


def test_ties_that_a_resample_can_be_made_of_leave_a_ratio_without_interval() -> None:
    base = [[-1.0, -1.0], [-1.0, -3.0], [-1.0, -1.0]]
    margin = task_metrics(outcome([[-1.0, -2.0]] * 3), outcome(base), {}, {})["margin"]
    assert margin["ratio"] == {"value": pytest.approx(1.5)}


# Parts


def test_parts_are_measured_on_their_documents_alone() -> None:
    options = [[-1.0, -2.0 - n] for n in range(8)]
    parts = {"by_language": {"en": [0, 2, 4, 6], "zh": [1, 3, 5, 7]}}
    found = task_metrics(outcome(options, acc=AFTER), outcome(options, acc=BEFORE), {"acc": UP}, parts)
    english, chinese = found["by_language"]["en"], found["by_language"]["zh"]
    assert (english["n"], chinese["n"]) == (4, 4)
    assert (english["acc"]["value"]["value"], chinese["acc"]["value"]["value"]) == (0.5, 0.5)
    assert (english["acc"]["drop"]["value"], chinese["acc"]["drop"]["value"]) == (0.0, 0.25)
    assert english["acc"]["lost"] + chinese["acc"]["lost"] == found["acc"]["lost"]
    assert english["margin"]["value"]["value"] == pytest.approx(4.0)


def test_outcomes_on_other_documents_are_not_paired() -> None:
    other = Outcome(["another"], {"acc": [1]})
    with pytest.raises(ValueError, match="different documents"):
        task_metrics(outcome(acc=[1]), other, {"acc": UP}, {})
