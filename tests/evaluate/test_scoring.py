"""Scores against closed forms and float64 numpy: a bigram model's logits are a table, so all of it can be written."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from quantkit.errors import NumericsError
from quantkit.evaluate.scoring import Scores, fidelity_metrics, perplexity_metrics, score_windows

VOCABULARY = 40


@dataclass
class Output:
    logits: torch.Tensor


class Bigram(nn.Module):
    """The next token depends on the last one only: logits are a row of `table`."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Output:
        assert not use_cache
        return Output(self.table[input_ids])


def bigram(seed: int, spread: float = 2.0) -> Bigram:
    return Bigram(spread * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)))


# Longer than the piece of rows that is turned into probabilities at a time.
IDS = torch.randint(0, VOCABULARY, (5, 300), generator=torch.Generator().manual_seed(9))


def textbook(model: Bigram, ids: torch.Tensor = IDS) -> tuple[np.ndarray, np.ndarray]:
    """Log probabilities [windows, length - 1, vocabulary] and negative log-likelihoods, in float64."""
    logits = model.table.double().numpy()[ids[:, :-1].numpy()]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p, -np.take_along_axis(log_p, ids[:, 1:].numpy()[..., None], -1)[..., 0]


def test_perplexity_of_a_bigram_model_is_the_formula() -> None:
    _, nll = textbook(bigram(0))
    found = perplexity_metrics(score_windows(bigram(0), IDS))
    assert found["value"]["value"] == pytest.approx(np.exp(nll.sum() / nll.size), rel=1e-6)
    assert found["value"]["low"] < found["value"]["value"] < found["value"]["high"]
    assert found["tokens"] == 5 * 299
    assert found.keys() == {"value", "tokens"}


def test_a_uniform_model_has_the_vocabulary_as_perplexity_and_no_uncertainty() -> None:
    found = perplexity_metrics(score_windows(Bigram(torch.zeros(VOCABULARY, VOCABULARY)), IDS))["value"]
    assert found == pytest.approx({"value": VOCABULARY, "low": VOCABULARY, "high": VOCABULARY}, rel=1e-6)


def test_perplexity_is_not_a_mean_of_window_perplexities() -> None:
    scores = Scores(nll=np.array([[0.0, 0.0], [4.0, 4.0]]))
    found = perplexity_metrics(scores)["value"]["value"]
    assert found == pytest.approx(np.exp(2.0))
    assert found != pytest.approx((1 + np.exp(4.0)) / 2)


def test_each_window_is_scored_on_its_own_and_the_first_token_never() -> None:
    other_start = IDS.clone()
    other_start[0, 0] = (other_start[0, 0] + 1) % VOCABULARY
    first, second = score_windows(bigram(0), IDS).nll, score_windows(bigram(0), other_start).nll
    assert first.shape == (5, 299)
    assert first[0, 0] != second[0, 0]
    assert np.array_equal(first[0, 1:], second[0, 1:])
    assert np.array_equal(first[1:], second[1:])


def test_the_ratio_is_paired_and_is_the_quotient_of_the_perplexities() -> None:
    (_, nll), (_, reference) = textbook(bigram(0)), textbook(bigram(1))
    found = perplexity_metrics(score_windows(bigram(0), IDS, bigram(1)))
    assert found["reference"]["value"] == pytest.approx(np.exp(reference.mean()), rel=1e-6)
    assert found["ratio"]["value"] == pytest.approx(np.exp(nll.mean() - reference.mean()), rel=1e-6)
    assert found["ratio"]["value"] == pytest.approx(found["value"]["value"] / found["reference"]["value"])


def test_the_ratio_of_a_model_with_itself_is_certainly_one() -> None:
    found = perplexity_metrics(score_windows(bigram(0), IDS, bigram(0)))
    assert found["ratio"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["value"]["low"] < found["value"]["high"]


def test_fidelity_of_a_model_with_itself_is_perfect() -> None:
    found = fidelity_metrics(score_windows(bigram(0), IDS, bigram(0)))
    perfect = {"value": 1.0, "low": 1.0, "high": 1.0}
    assert found["kl_mean"] == found["kl_p99"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["top1"] == perfect
    assert found["acceptance"] == pytest.approx(perfect, abs=1e-6)


@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_fidelity_equals_the_float64_definitions(spread: float) -> None:
    (log_q, _), (log_p, _) = textbook(bigram(0, spread)), textbook(bigram(1, spread))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    found = fidelity_metrics(score_windows(bigram(0, spread), IDS, bigram(1, spread)))
    assert found["kl_mean"]["value"] == pytest.approx(kl.mean(), rel=1e-5, abs=1e-6)
    assert found["kl_p99"]["value"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-5, abs=1e-6)
    assert found["top1"]["value"] == pytest.approx((log_p.argmax(-1) == log_q.argmax(-1)).mean())
    acceptance = np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    assert found["acceptance"]["value"] == pytest.approx(acceptance.mean(), rel=1e-5)
    assert found["tokens"] == 5 * 299
    for name in ("kl_mean", "kl_p99", "top1", "acceptance"):
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]


def test_kl_is_measured_from_the_reference() -> None:
    (log_q, _), (log_p, _) = textbook(bigram(0)), textbook(bigram(1, 0.5))
    forward = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    backward = (np.exp(log_q) * (log_q - log_p)).sum(-1).mean()
    found = fidelity_metrics(score_windows(bigram(0), IDS, bigram(1, 0.5)))["kl_mean"]["value"]
    assert found == pytest.approx(forward, rel=1e-5)
    assert abs(forward - backward) > 0.1


def test_fidelity_without_a_reference_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="reference"):
        fidelity_metrics(score_windows(bigram(0), IDS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["model", "reference"])
def test_logits_that_are_not_finite_are_an_error(which: str, value: float) -> None:
    broken = bigram(0)
    broken.table[IDS[3, 5], 7] = value
    models = (broken, bigram(1)) if which == "model" else (bigram(1), broken)
    with pytest.raises(NumericsError, match="NaN or infinite logits"):
        score_windows(models[0], IDS, models[1])


def test_large_logits_do_not_overflow() -> None:
    found = score_windows(bigram(0, 1e4), IDS, bigram(1, 1e4))
    for values in (found.nll, found.reference_nll, found.kl, found.acceptance):
        assert np.isfinite(values).all()


@pytest.mark.parametrize("reference", [False, True])
def test_finite_logits_whose_scores_are_not_are_an_error(reference: bool) -> None:
    broken = bigram(0)
    broken.table[:, ::2], broken.table[:, 1::2] = 3e38, -3e38
    models = (bigram(1), broken) if reference else (broken, None)
    with pytest.raises(NumericsError, match="further apart than float32"):
        score_windows(models[0], IDS, models[1])


def test_a_loss_beyond_every_float_is_a_large_finite_perplexity() -> None:
    """A broken model must fail a gate, not the writing of its report."""
    found = perplexity_metrics(Scores(nll=np.full((3, 4), 1e5), reference_nll=np.full((3, 4), 2.0)))
    for name in ("value", "ratio"):
        assert all(1e300 < found[name][end] < float("inf") for end in ("value", "low", "high"))


def test_scores_in_half_precision_are_taken_in_float32() -> None:
    halved = Bigram(bigram(0).table.bfloat16())
    exact = Bigram(halved.table.float())
    assert np.array_equal(score_windows(halved, IDS).nll, score_windows(exact, IDS).nll)


def test_progress_is_told_once_a_window() -> None:
    told: list[int] = []
    score_windows(bigram(0), IDS, progress=lambda: told.append(1))
    assert len(told) == 5


def test_scoring_keeps_no_graph_and_leaves_gradients_enabled() -> None:
    model = bigram(0)
    model.table.requires_grad_(True)
    assert isinstance(score_windows(model, IDS).nll, np.ndarray)
    assert torch.is_grad_enabled()
