"""Where an artifact departs from its reference: by corpus, language, class of token, position, and window.

Pure functions on score arrays and token texts. Every group of predictions gets the same three numbers: the mean KL, the
agreement of the most likely token, and the ratio of perplexities. Intervals are those of the paired bootstrap over
windows, drawn inside each corpus, since which texts are scored is not a matter of chance.
"""

import math
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from quantkit.evaluate.scoring import LARGEST_LOSS, Array, Scores
from quantkit.evaluate.uncertainty import LEVEL, SEED, Draws, draw

# The first number of preceding tokens of each position bucket; the last one is open. No suite moves them, so that a
# policy may name a bucket.
POSITIONS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
CLASSES = ("digits", "cjk", "letters", "punctuation", "special")
# Four bins a decade, from 1e-6 to 10 nats.
KL_EDGES = tuple(float(f"{10 ** (step / 4):.6g}") for step in range(-24, 5))
WORST = 8
OPENING = 80

# Characters that belong to one script of East Asia: radicals, kana, Han, Hangul, their extensions and narrow forms.
_CJK = (
    (0x1100, 0x11FF),
    (0x2E80, 0x2FDF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x3130, 0x318F),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xA960, 0xA97F),
    (0xAC00, 0xD7FF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFFDC),
    (0x20000, 0x3FFFF),
)
_BROKEN = "\ufffd"  # what a decoder writes for bytes that spell no character
# A character has at most four bytes, and tokens at both ends of a run may hold a part of a neighbour.
_LONGEST_RUN = 8


@dataclass(frozen=True)
class Part:
    """One corpus: its scores `[windows, length - 1]` with a reference, and what its tokens say.

    classes: index into CLASSES of each predicted token, int64 `[windows, length - 1]`. openings: first words.
    """

    name: str
    language: str
    scores: Scores
    classes: Array
    openings: list[str]


def read_part(
    name: str,
    language: str,
    scores: Scores,
    ids: Sequence[Sequence[int]],
    decode: Callable[[list[int]], str],
    special: frozenset[int],
) -> Part:
    """The part of a corpus whose windows are `ids` (`[windows, length]`). special: ids that stand for no text."""
    classes, openings = [], []
    remembered = cache(lambda tokens: decode(list(tokens)))
    for window in ids:
        texts = spelled(window, remembered, special)
        classes.append([CLASSES.index(token_class(text)) for text in texts[1:]])
        whole = decode([token for token in window if token not in special]).strip(_BROKEN)
        openings.append(" ".join(whole.split())[:OPENING])
    return Part(name, language, scores, np.array(classes), openings)


def spelled(
    window: Sequence[int], decode: Callable[[tuple[int, ...]], str], special: frozenset[int] = frozenset()
) -> list[str]:
    """The text of each token; tokens that only together spell their characters all get the text of their run.

    A byte-level vocabulary writes a rare character as several tokens, none of which means anything alone. Special
    tokens, and bytes at the cut of a window that spell nothing, get the empty text.
    """
    texts = ["" if token in special else decode((token,)) for token in window]
    start = 0
    while start < len(texts):
        if _BROKEN not in texts[start]:
            start += 1
            continue
        for end in range(start + 2, min(start + _LONGEST_RUN, len(texts)) + 1):
            run = decode(tuple(window[start:end]))
            if _BROKEN not in run:
                texts[start:end] = [run] * (end - start)
                start = end
                break
        else:
            texts[start] = texts[start].replace(_BROKEN, "")
            start += 1
    return texts


def token_class(text: str) -> str:
    """The first of CLASSES of which `text` holds a character; `special` where it holds none but white space."""
    found = {_character_class(character) for character in text}
    return next(name for name in CLASSES if name in found or name == "special")


def _character_class(character: str) -> str:
    if any(first <= ord(character) <= last for first, last in _CJK):
        return "cjk"
    category = unicodedata.category(character)[0]
    return {"N": "digits", "L": "letters", "M": "letters", "P": "punctuation", "S": "punctuation"}.get(
        category, "special"
    )


def breakdown(parts: Sequence[Part]) -> dict[str, Any]:
    """`metrics["breakdown"]` of a report: groups by corpus, language, class and position, worst windows, KL histogram.

    A group without predictions is left out. Raises ValueError for scores without a reference.
    """
    groups = _Groups(parts)
    found: dict[str, Any] = {"all": groups.metrics([np.ones(part.classes.shape, dtype=bool) for part in parts])}
    for kind, name, masks in _kinds(parts):
        if any(mask.any() for mask in masks):
            found.setdefault(kind, {})[name] = groups.metrics(masks)
    return found | {"worst_windows": _worst_windows(parts), "kl_histogram": _histogram(parts)}


def _kinds(parts: Sequence[Part]) -> Iterator[tuple[str, str, list[Array]]]:
    """Every group as (kind, name, a mask `[windows, length - 1]` for each part)."""
    for name in dict.fromkeys(part.name for part in parts):
        yield "corpus", name, [np.full(part.classes.shape, part.name == name) for part in parts]
    for name in dict.fromkeys(part.language for part in parts):
        yield "language", name, [np.full(part.classes.shape, part.language == name) for part in parts]
    for number, name in enumerate(CLASSES):
        yield "class", name, [part.classes == number for part in parts]
    for first, after in zip(POSITIONS, [*POSITIONS[1:], None], strict=True):
        name = f"{first}+" if after is None else f"{first}-{after - 1}"
        # Prediction n of a window has n + 1 tokens before it.
        before = [np.broadcast_to(np.arange(1, part.classes.shape[1] + 1), part.classes.shape) for part in parts]
        yield "position", name, [(count >= first) & (after is None or count < after) for count in before]


class _Groups:
    """The score arrays of all parts, and the draws of windows that every group shares."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.columns: dict[str, list[Array]] = {"kl": [], "top1": [], "loss": []}
        for part in parts:
            scores = part.scores
            if scores.kl is None or scores.top1 is None or scores.reference_nll is None:
                raise ValueError("a breakdown needs scores with a reference")
            self.columns["kl"].append(scores.kl)
            self.columns["top1"].append(scores.top1)
            self.columns["loss"].append(scores.nll - scores.reference_nll)
        self.draws = _stratified([len(part.classes) for part in parts])

    def metrics(self, masks: list[Array]) -> dict[str, Any]:
        """kl_mean, top1, ratio and tokens of the predictions that are masked."""
        counts = np.concatenate([mask.sum(axis=1) for mask in masks])

        def mean(column: str) -> dict[str, float]:
            sums = [(values * mask).sum(axis=1) for values, mask in zip(self.columns[column], masks, strict=True)]
            return _mean_estimate(np.concatenate(sums), counts, self.draws)

        return {
            "kl_mean": mean("kl"),
            "top1": mean("top1"),
            "ratio": {end: math.exp(min(value, LARGEST_LOSS)) for end, value in mean("loss").items()},
            "tokens": int(counts.sum()),
        }


def _stratified(windows: list[int]) -> Draws | None:
    """Indices `[resamples, all windows]`, drawn inside each part; None where a part has one window and no spread."""
    if min(windows) < 2:
        return None
    starts = np.cumsum([0, *windows[:-1]])
    # A seed for each part: with one for all, windows of two corpora would be drawn together.
    drawn = [draw(count, seed=SEED + n) + start for n, (count, start) in enumerate(zip(windows, starts, strict=True))]
    return np.concatenate(drawn, axis=1)


def _mean_estimate(sums: Array, counts: Array, draws: Draws | None) -> dict[str, float]:
    """The mean over tokens of which window w holds counts[w] with sum sums[w]: {value, low, high}.

    Without draws, or where a resample holds none of the tokens, there is a value alone.
    """
    value = float(sums.sum() / counts.sum())
    if draws is None:
        return {"value": value}
    totals = counts[draws].sum(axis=1)
    if not totals.all():
        return {"value": value}
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(sums[draws].sum(axis=1) / totals, [tail, 1 - tail])
    return {"value": value, "low": float(low), "high": float(high)}


def _worst_windows(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The WORST windows of largest mean KL, worst first, each with its corpus, index and first words."""
    found = [
        (float(kl), {"corpus": part.name, "window": index, "kl_mean": float(kl), "opening": part.openings[index]})
        for part in parts
        if part.scores.kl is not None
        for index, kl in enumerate(part.scores.kl.mean(axis=1))
    ]
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])[:WORST]]


def _histogram(parts: Sequence[Part]) -> dict[str, list[Any]]:
    """How many predictions have a KL below the first edge, between each two edges, and from the last edge on."""
    values = np.concatenate([part.scores.kl.ravel() for part in parts if part.scores.kl is not None])
    counts = np.bincount(np.digitize(values, KL_EDGES), minlength=len(KL_EDGES) + 1)
    return {"edges": list(KL_EDGES), "counts": counts.tolist()}
