"""Answers side by side for a page: what a report's samples hold, split where they part, and cut to what fits.

A report is read as it comes: what is missing or no text is empty, never an error.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from quantkit.grids import Grid, count, fixed, members, span
from quantkit.report import Report, as_metric

# Characters of a question and of an answer that a page shows.
QUESTION, ANSWER = 600, 800
# Of what two answers share, the last words say enough.
SHARED = 400

_GENERATION = ("identical", 3), ("prefix_mean", 1), ("prefix_median", 1), ("prefix_share", 3)
# For each metric the words that say what it is, and its digits.
_BATCHING = (
    ("equal", "prompts with the same tokens", 3),
    ("logit_difference", "largest difference of a logit", 6),
    ("smallest_gap", "smallest lead of the likeliest token, in logits", 6),
    ("within_reach", "positions where the difference could reach that lead", 0),
    ("tokens", "positions compared", 0),
)
_DECODING = (
    ("kl_mean", "mean KL from exact to fast, in nats", 6),
    ("top1", "steps with the same most likely token", 3),
    ("largest_difference", "largest difference of a logit", 6),
    ("tokens", "steps compared", 0),
)


@dataclass(frozen=True)
class Transcript:
    """One question and its two answers: what both begin with, and how each goes on. Each is cut with a note.

    index: tokens before the first that differs, None for the same tokens.
    """

    prompt: str
    language: str
    index: int | None
    question: str
    shared: str
    answer: str
    reference: str


def transcripts(report: Report) -> list[Transcript]:
    """The samples of a report, those that part first at the top, and those that never do at the end."""
    found = [_transcript(sample) for sample in _samples(report)]
    return sorted(found, key=lambda one: (one.index is None, one.index or 0))


def generation_grid(report: Report) -> Grid:
    """How long the answers stay the same, over all prompts and in each language."""
    found = members(report.metrics.get("generation"))
    groups = {"all": found} if found else {}
    rows = []
    for name, group in (groups | members(found.get("by_language"))).items():
        metrics = [(as_metric(members(group).get(key)), digits) for key, digits in _GENERATION]
        cells = [cell for metric, digits in metrics for cell in (fixed(metric, digits), span(metric, digits))]
        rows.append([name, count(members(group).get("n")), *cells])
    heads = ["identical", "tokens before, mean", "median", "share of the answer"]
    return Grid(
        ["", "prompts", *(head for name in heads for head in (name, "95% interval"))], rows, quiet={1, 3, 5, 7, 9}
    )


def divergence_grid(report: Report) -> Grid:
    """The first token that differs, for each prompt that has one; in the order of the transcripts."""
    rows = []
    for sample in _samples(report):
        found = members(sample.get("divergence"))
        if not found:
            continue
        tokens = [_token(found.get(key)) for key in ("reference_token", "token")]
        gap = fixed(as_metric(found.get("reference_gap")), 3)
        rows.append((_index(sample), [_text(sample, "prompt"), count(found.get("index")), *tokens, gap]))
    heads = ["prompt", "tokens before", "base goes on with", "artifact with", "lead of the base's"]
    return Grid(heads, [row for _, row in sorted(rows, key=lambda pair: pair[0] or 0)], left={0, 2, 3})


def batching_grid(report: Report) -> Grid:
    """Each answer in a padded batch against the same answer alone."""
    return _named_grid(report, "batching", _BATCHING)


def decoding_grid(report: Report) -> Grid:
    """Steps with packed kernels against exact ones."""
    return _named_grid(report, "decoding", _DECODING)


def unequal_grid(report: Report) -> Grid:
    """The first token that differs in the batch, for each prompt that has one."""
    listed = members(report.metrics.get("batching")).get("unequal")
    rows = [
        [
            _text(row, "prompt"), count(row.get("index")), _token(row.get("alone_token")), _token(row.get("token")),
            fixed(as_metric(row.get("alone_gap")), 6), fixed(as_metric(row.get("difference")), 6),
        ]
        for row in map(members, listed if isinstance(listed, list) else [])
    ]  # fmt: skip
    heads = ["prompt", "tokens before", "alone", "in a batch", "lead alone", "largest difference there"]
    return Grid(heads, rows, left={0, 2, 3})


def _named_grid(report: Report, part: str, names: tuple[tuple[str, str, int], ...]) -> Grid:
    """The metrics of a part that it has, each with the words that say what it is."""
    found = members(report.metrics.get(part))
    rows = [
        [words, fixed(metric, digits), span(metric, digits)]
        for name, words, digits in names
        if (metric := as_metric(found.get(name))) is not None
    ]
    return Grid(["metric", "value", "95% interval"], rows, quiet={2})


def _samples(report: Report) -> list[dict[str, Any]]:
    listed = members(report.metrics.get("generation")).get("samples")
    return [members(sample) for sample in (listed if isinstance(listed, list) else [])]


def _transcript(sample: dict[str, Any]) -> Transcript:
    answer, expected = _text(sample, "answer"), _text(sample, "reference_answer")
    # By characters, not tokens: a token may hold a part of one.
    same = takewhile(lambda pair: pair[0] == pair[1], zip(answer, expected, strict=False))
    shared = "".join(character for character, _ in same)
    return Transcript(
        prompt=_text(sample, "prompt"),
        language=_text(sample, "language"),
        index=_index(sample),
        question=cut(_text(sample, "question"), QUESTION),
        shared=cut_start(shared, SHARED),
        answer=cut(answer[len(shared) :], ANSWER),
        reference=cut(expected[len(shared) :], ANSWER),
    )


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, with a note of how many more there are."""
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit:,} more characters)"


def cut_start(text: str, limit: int) -> str:
    """The last `limit` characters, with a note of how many stood before them."""
    return text if len(text) <= limit else f"({len(text) - limit:,} characters before) … {text[-limit:]}"


def _index(sample: dict[str, Any]) -> int | None:
    index = members(sample.get("divergence")).get("index")
    return index if isinstance(index, int) else None


def _token(value: Any) -> str:
    """A token as it would be written in a program, so that white space and unprintable bytes are seen."""
    found = members(value)
    text = found.get("text")
    return f"{text!r} ({found.get('id')})" if isinstance(text, str) else ""


def _text(value: dict[str, Any], key: str) -> str:
    found = value.get(key)
    return found if isinstance(found, str) else ""
