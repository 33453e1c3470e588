"""How far decoding with packed kernels is from exact decoding: the same tokens, one step at a time, both ways."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from quantkit.evaluate.generation import forced_logits
from quantkit.evaluate.loader import exactly, fast_layers
from quantkit.evaluate.scoring import score_rows

# Tokens before the first step, and steps: few, for exact steps unpack every layer each time.
_PROMPT, _STEPS = 64, 16


def takes_kernels(model: PreTrainedModel) -> bool:
    """Whether any layer of `model` decodes with a packed kernel."""
    return any(layer.kernel() is not None for layer in fast_layers(model))


def compared_steps(model: PreTrainedModel, windows: Sequence[torch.Tensor]) -> int:
    """How many steps `decoding_metrics` will compare on `windows`, each `[length]`; none where nothing is fast."""
    return sum(len(_steps(window)) - 1 for window in windows) if takes_kernels(model) else 0


@torch.no_grad()
def decoding_metrics(
    model: PreTrainedModel, windows: Sequence[torch.Tensor], progress: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Fast steps beside exact ones, on the tokens of `windows`, each `[length]`.

    Returns `tokens`; `largest_difference` of any logit; `kl_mean`, KL(exact, fast) in nats; `top1`, the share of steps
    with the same most likely token. The steps of each way see the keys and values of that way. At least one window has
    a step: one of two tokens has none.
    """
    fast, exact, labels = [], [], []
    for window in windows:
        prompt, steps = window[: _prompt(window)], _steps(window)
        if len(steps) < 2:
            continue
        asked = prompt.tolist(), steps[:-1].tolist()
        fast.append(forced_logits(model, *asked))
        with exactly(model):
            exact.append(forced_logits(model, *asked))
        labels.append(steps[1:])
        for _ in labels[-1]:
            progress()
    found, expected = torch.cat(fast), torch.cat(exact)
    rows = score_rows(found, expected, torch.cat(labels))
    return {
        "tokens": len(found),
        "largest_difference": (found - expected).abs().max().item(),
        "kl_mean": float(rows["kl"].mean()),
        "top1": float(rows["top1"].mean()),
    }


def _prompt(window: torch.Tensor) -> int:
    return min(_PROMPT, len(window) // 2)


def _steps(window: torch.Tensor) -> torch.Tensor:
    """The tokens of the steps, and one more: the last has no step of its own."""
    return window[_prompt(window) :][: _STEPS + 1]
