"""Where it breaks: every group is the plain mean over its predictions, and tokens are told apart by what they say."""

import json

import numpy as np
import pytest

from quantkit.evaluate.breakdown import (
    CLASSES,
    KL_EDGES,
    OPENING,
    WORST,
    Part,
    breakdown,
    read_part,
    spelled,
    token_class,
)
from quantkit.evaluate.scoring import Scores, fidelity_metrics
from quantkit.evaluate.uncertainty import SEED, draw
from tests.zoo import byte_tokenizer

TOKENIZER = byte_tokenizer()
SPECIAL = frozenset(TOKENIZER.all_special_ids)


def scores(windows: int, length: int, seed: int = 0) -> Scores:
    random = np.random.default_rng(seed)
    shape = (windows, length - 1)
    nll, reference = random.exponential(3, shape), random.exponential(2, shape)
    return Scores(nll, reference, random.exponential(0.3, shape), random.random(shape) < 0.7, random.random(shape))


def part(windows: int, length: int, seed: int = 0, **changes: object) -> Part:
    classes = np.random.default_rng(seed + 100).integers(0, len(CLASSES), (windows, length - 1))
    values = {"name": "a", "language": "en", "scores": scores(windows, length, seed), "classes": classes}
    openings = [f"window {n}" for n in range(windows)]
    return Part(**values | {"openings": openings} | changes)  # type: ignore[arg-type]


# Tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 42", "digits"),
        ("EV-0142", "digits"),
        ("３", "digits"),
        ("½", "digits"),
        ("3年", "digits"),
        ("阀", "cjk"),
        ("ひらがな", "cjk"),
        ("한", "cjk"),
        ("\u1112\u1161\u11ab", "cjk"),  # the same, spelled in its parts
        ("ㄱ", "cjk"),
        ("ｶﾞ", "cjk"),
        ("々", "cjk"),
        ("〇", "cjk"),
        ("ＡＢ", "letters"),
        ("𠀀", "cjk"),
        ("A阀", "cjk"),
        (" valve", "letters"),
        ("é", "letters"),
        ("е́", "letters"),
        ("'s", "letters"),
        (", ", "punctuation"),
        ("。", "punctuation"),
        ("，", "punctuation"),
        ("€", "punctuation"),
        (" ", "special"),
        ("\n\n", "special"),
        ("", "special"),
        ("\u200b", "special"),
    ],
)
def test_a_token_belongs_to_the_class_of_what_it_says(text: str, expected: str) -> None:
    assert token_class(text) == expected


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_tokens_that_spell_a_character_only_together_all_get_it() -> None:
    text = "a阀é b"
    assert spelled(ids(text), TOKENIZER.decode) == ["a", "阀", "阀", "阀", "é", "é", " ", "b"]


def test_bytes_at_the_cut_of_a_window_say_nothing() -> None:
    window = ids("阀门 1 阀")[1:-1]
    assert spelled(window, TOKENIZER.decode) == ["", "", "门", "门", "门", " ", "1", " ", "", ""]


def test_special_tokens_say_nothing() -> None:
    window = [TOKENIZER.bos_token_id, *ids("ab")]
    assert spelled(window, TOKENIZER.decode, SPECIAL) == ["", "a", "b"]


def test_tokens_that_hold_parts_of_two_characters_are_spelled_as_one_run() -> None:
    pieces = [b"\xe9\x98", b"\x80\xe9", b"\x97\xa8", b"x"]  # two characters cut into three tokens

    def decode(tokens: tuple[int, ...]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    assert spelled([0, 1, 2, 3], decode) == ["阀门", "阀门", "阀门", "x"]


def test_a_part_is_read_from_the_windows_that_were_scored() -> None:
    text = "The  valve\nopens at 3 MPa. " + "阀" * 30 + "x" * 100
    window = [TOKENIZER.bos_token_id, *ids(text)]
    found = read_part("a", "en", scores(1, len(window)), [window], TOKENIZER.decode, SPECIAL)
    assert found.classes.shape == (1, len(window) - 1)
    names = [CLASSES[number] for number in found.classes[0]]
    assert names[:3] == ["letters"] * 3
    assert names[ids(text).index(ord("3"))] == "digits"
    assert names.count("cjk") == 90
    assert found.openings[0].startswith("The valve opens at 3 MPa. 阀阀")
    assert len(found.openings[0]) == OPENING


def test_an_opening_leaves_out_the_bytes_of_a_cut_character() -> None:
    window = ids("阀门opens")[1:]
    assert read_part("a", "en", scores(1, len(window)), [window], TOKENIZER.decode, SPECIAL).openings == ["门opens"]


# Groups


def test_every_group_is_the_plain_mean_over_its_predictions() -> None:
    parts = [part(5, 40), part(3, 70, 1, name="b", language="zh"), part(4, 10, 2, name="c", language="zh")]
    found = breakdown(parts)
    rows = [
        (p.name, p.language, CLASSES[p.classes[w, n]], n + 1, p.scores.kl[w, n], p.scores.top1[w, n],
         p.scores.nll[w, n] - p.scores.reference_nll[w, n])
        for p in parts for w in range(p.classes.shape[0]) for n in range(p.classes.shape[1])
    ]  # fmt: skip

    def bucket(before: int) -> str:
        return "1-7" if before < 8 else "8-31" if before < 32 else "32-127"

    kinds = {"corpus": 0, "language": 1, "class": 2, "position": 3}
    for kind, column in kinds.items():
        for name, group in found[kind].items():
            mine = [row for row in rows if (bucket(row[3]) if kind == "position" else row[column]) == name]
            assert group["tokens"] == len(mine)
            assert group["kl_mean"]["value"] == pytest.approx(np.mean([row[4] for row in mine]))
            assert group["top1"]["value"] == pytest.approx(np.mean([row[5] for row in mine]))
            assert group["ratio"]["value"] == pytest.approx(np.exp(np.mean([row[6] for row in mine])))
            for metric in ("kl_mean", "top1", "ratio"):
                assert group[metric]["low"] <= group[metric]["value"] <= group[metric]["high"]
        assert sum(group["tokens"] for group in found[kind].values()) == len(rows) == found["all"]["tokens"]
    assert list(found["position"]) == ["1-7", "8-31", "32-127"]
    assert list(found["language"]) == ["en", "zh"]
    json.dumps(found, allow_nan=False)


def test_a_corpus_alone_has_the_interval_of_the_fidelity_metrics() -> None:
    one = part(6, 50)
    found, expected = breakdown([one])["corpus"]["a"], fidelity_metrics(one.scores)
    for metric in ("kl_mean", "top1"):
        assert found[metric] == pytest.approx(expected[metric])


def test_windows_of_two_texts_are_drawn_apart() -> None:
    same = part(6, 50)
    found = breakdown([same, part(6, 50, name="b")])["all"]["kl_mean"]
    one = breakdown([same])["all"]["kl_mean"]
    assert found["value"] == pytest.approx(one["value"])
    # The mean of two independent samples spreads less than that of one; drawn together it would spread as much.
    assert found["high"] - found["low"] < 0.85 * (one["high"] - one["low"])
    assert not np.array_equal(draw(6), draw(6, seed=SEED + 1))


def test_a_class_that_a_resample_can_miss_has_no_interval() -> None:
    classes = np.full((4, 9), CLASSES.index("letters"))
    classes[2, 5] = CLASSES.index("digits")
    found = breakdown([part(4, 10, classes=classes)])["class"]
    assert found.keys() == {"digits", "letters"}
    assert found["digits"]["kl_mean"].keys() == {"value"}
    assert found["digits"]["tokens"] == 1
    assert found["letters"]["kl_mean"].keys() == {"value", "low", "high"}


def test_a_text_of_one_window_leaves_no_interval() -> None:
    found = breakdown([part(5, 10), part(1, 10, 1, name="b")])
    assert found["all"]["kl_mean"].keys() == {"value"}
    assert found["corpus"]["a"]["top1"].keys() == {"value"}


def test_a_loss_beyond_every_float_is_a_large_finite_ratio() -> None:
    huge = Scores(np.full((2, 3), 1e5), np.zeros((2, 3)), np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3)))
    assert breakdown([part(2, 4, scores=huge)])["all"]["ratio"]["value"] > 1e300


def test_scores_without_a_reference_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="reference"):
        breakdown([part(2, 4, scores=Scores(np.ones((2, 3))))])


# Windows and histogram


def test_the_worst_windows_come_first_with_their_place_and_words() -> None:
    parts = [part(9, 20), part(9, 20, 1, name="b")]
    found = breakdown(parts)["worst_windows"]
    every = sorted(((p.scores.kl[w].mean(), p.name, w) for p in parts for w in range(9)), reverse=True)
    assert len(found) == WORST
    for row, (kl, name, window) in zip(found, every, strict=False):
        assert (row["corpus"], row["window"], row["opening"]) == (name, window, f"window {window}")
        assert row["kl_mean"] == pytest.approx(kl)


def test_the_histogram_counts_every_prediction_once_in_bins_that_never_move() -> None:
    kl = np.array([[0.0, 9e-7, 1e-6, 0.1, 0.11, 9.9, 10.0, 50.0]])
    one = Scores(np.zeros((1, 8)), np.zeros((1, 8)), kl, np.ones((1, 8)), np.ones((1, 8)))
    found = breakdown([part(1, 9, scores=one)])["kl_histogram"]
    assert found["edges"] == list(KL_EDGES)
    assert (found["edges"][0], found["edges"][4], found["edges"][-1]) == (1e-6, 1e-5, 10.0)
    assert len(found["counts"]) == len(KL_EDGES) + 1
    filled = {n: count for n, count in enumerate(found["counts"]) if count}
    tenth = KL_EDGES.index(0.1)
    assert filled == {0: 2, 1: 1, tenth + 1: 2, len(KL_EDGES) - 1: 1, len(KL_EDGES): 2}
