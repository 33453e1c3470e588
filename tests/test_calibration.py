"""Calibration sets: what is asked, used and skipped is accounted for, and too little is an error."""

import json
from pathlib import Path

import pytest
import torch

from quantkit.calibration import CalibrationSet, Part, calibrate_from, load_set, recipe_calibration
from quantkit.canonical import sha256_bytes
from quantkit.checkpoint import open_checkpoint
from quantkit.data import shipped_names
from quantkit.errors import CalibrationError, SchemaError, TextError
from quantkit.recipe import load_recipe
from tests.zoo import CHAT_TEMPLATE, byte_tokenizer


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "notes.jsonl"
    path.write_text(
        "".join(f'{{"text": "note {n}: valve {n * 7} was tested"}}\n' for n in range(40)) + '{"text": " "}\n'
    )
    return path


def _set(*parts: tuple[str, float]) -> CalibrationSet:
    return CalibrationSet(name="test", bos="none", parts=[Part(text=text, share=share) for text, share in parts])


def test_every_shipped_set_is_well_formed() -> None:
    for name in shipped_names("calib"):
        assert load_set(name).name == name


def test_samples_are_full_windows_and_the_account_adds_up(notes: Path) -> None:
    found = calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 5, 64)
    assert found.ids.shape == (5, 64)
    part = found.account["parts"][0]
    assert part["skipped"]["blank_documents"] == 1
    assert part["samples_used"] == found.account["samples_used"] == 5
    assert found.account["tokens_used"] == 320
    total = 64 * (5 + part["skipped"]["windows_not_needed"]) + part["skipped"]["tokens_in_unfilled_last_window"]
    text = "\n\n".join(f"note {n}: valve {n * 7} was tested" for n in range(40))
    assert total == len(text)


def test_samples_are_spread_over_the_text(notes: Path) -> None:
    few = calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 2, 64).ids
    all_of_them = calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 18, 64).ids
    assert torch.equal(few[0], all_of_them[0])
    assert torch.equal(few[1], all_of_them[9])


def test_shares_become_whole_samples_that_add_up(notes: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("安全阀在 3.5 MPa 起跳。" * 60)
    account = calibrate_from(_set((str(notes), 0.67), (str(other), 0.33)), byte_tokenizer(), 10, 32).account
    assert [part["samples_used"] for part in account["parts"]] == [7, 3]


def test_fewer_samples_than_asked_is_an_error_unless_allowed(notes: Path) -> None:
    with pytest.raises(CalibrationError, match=r"gives 18 samples of 64 tokens, 500 are asked.*allow-short"):
        calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 500, 64)
    short = calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 500, 64, allow_short=True)
    assert (short.account["samples_asked"], short.account["samples_used"]) == (500, 18)


def test_a_bos_token_opens_every_window_when_asked(notes: Path) -> None:
    chosen = CalibrationSet(name="test", bos="window", parts=[Part(text=str(notes), share=1.0)])
    found = calibrate_from(chosen, byte_tokenizer(), 4, 64)
    assert bool((found.ids[:, 0] == 1).all())
    assert found.account["bos"] == "window"


@pytest.mark.parametrize("text", ["aaaa" * 100, " \n\n "])
def test_constant_or_empty_text_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(text)
    with pytest.raises((CalibrationError, TextError)):
        calibrate_from(_set((str(path), 1.0)), byte_tokenizer(), 2, 16)


def test_a_missing_set_names_those_that_exist() -> None:
    with pytest.raises(SchemaError, match=r"nothing named 'defalt'.*default"):
        load_set("defalt")


def test_shares_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.yaml"
    path.write_text("name: half\nparts: [{text: a.txt, share: 0.5}]\n")
    with pytest.raises(SchemaError, match=r"add up to 0\.5"):
        load_set(str(path))


def test_a_set_for_a_data_free_recipe_is_refused(zoo, notes: Path) -> None:  # type: ignore[no-untyped-def]
    checkpoint = open_checkpoint(str(zoo("llama")))
    with pytest.raises(CalibrationError, match="uses no calibration data"):
        recipe_calibration(load_recipe("rtn-g64"), checkpoint, str(notes))


def test_the_same_set_gives_the_same_tokens_and_hash(notes: Path) -> None:
    first, second = (calibrate_from(_set((str(notes), 1.0)), byte_tokenizer(), 6, 32) for _ in range(2))
    assert first.account == second.account
    assert torch.equal(first.ids, second.ids)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [[{"role": "user", "content": f"Set pressure of PSV-{n}? 压力"}] for n in range(40)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in [*rows, []]))
    return path


def test_chat_messages_are_rendered_and_the_account_says_how(chats: Path) -> None:
    found = calibrate_from(load_set(str(chats)), byte_tokenizer(), 5, 64)
    part = found.account["parts"][0]
    rendered = "".join(f"user: Set pressure of PSV-{n}? 压力\n" for n in range(40)).encode()
    assert part["chat"] == {"template_sha256": sha256_bytes(CHAT_TEMPLATE.encode()), "joined_with": "", "bos": "none"}
    assert part["text_sha256"] == sha256_bytes(rendered)
    assert part["skipped"]["blank_documents"] == 1
    assert bytes(found.ids[0].tolist()) == rendered[:64]


def test_plain_text_has_no_account_of_a_template(notes: Path, chats: Path) -> None:
    account = calibrate_from(_set((str(notes), 0.5), (str(chats), 0.5)), byte_tokenizer(), 6, 64).account
    assert ["chat" in part for part in account["parts"]] == [False, True]


def test_a_bos_that_the_template_writes_is_not_doubled(chats: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    chosen = CalibrationSet(name="test", bos="window", parts=[Part(text=str(chats), share=1.0)])
    found = calibrate_from(chosen, tokenizer, 10, 36)
    assert bool((found.ids[:, 0] == 1).all())
    assert not bool(((found.ids[:, 1:] == 1) & (found.ids[:, :-1] == 1)).any())
    assert (found.account["bos"], found.account["parts"][0]["chat"]["bos"]) == ("window", "once")


def test_messages_for_a_tokenizer_without_a_template_are_refused(chats: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CalibrationError, match=r"no chat template.*calibrate on plain text"):
        calibrate_from(load_set(str(chats)), tokenizer, 5, 64)


def test_a_short_chat_is_an_error_like_any_short_text(chats: Path) -> None:
    with pytest.raises(CalibrationError, match=r"text chats\.jsonl gives \d+ samples of 64 tokens, 500 are asked"):
        calibrate_from(load_set(str(chats)), byte_tokenizer(), 500, 64)
