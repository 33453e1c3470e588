"""Tables on a terminal: names out of models and reports are shown, and do nothing."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quantkit.errors import printable
from quantkit.gates import Row, Verdict, load_policy
from quantkit.tables import inspection_tables, pairs, report_table, verdict_table

NASTY = "[/x] [red]a[/red] \x1b[2J\x07 \ud800 层"


def shown(table: Any, width: int = 400) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system=None).print(table)
    return stream.getvalue()


def test_markup_and_control_characters_in_names_are_shown_as_they_are() -> None:
    verdict = Verdict("0" * 64, load_policy("smoke"), [Row(NASTY, NASTY, NASTY, NASTY, "fail")])
    for table in (pairs(NASTY, {NASTY: NASTY}), verdict_table(verdict)):
        text = shown(table)
        assert "[/x] [red]a[/red] \\x1b[2J\\x07 \\ud800 层" in text
        assert "\x1b[2J" not in text
        assert "\x07" not in text


def test_a_name_that_a_narrow_log_has_no_room_for_is_folded_and_not_cut() -> None:
    name = "tasks.a_task_of_a_long_name.metric_of_a_long_name.reference"
    verdict = Verdict("0" * 64, load_policy("smoke"), [Row(name, ">= 0.5", "0.25", "-0.25", "fail")])
    metrics = {name: {"value": 0.5, "low": 0.4, "high": 0.6}}
    report = SimpleNamespace(subject=SimpleNamespace(name="a"), identity="0" * 64, metrics=metrics)
    for table in (verdict_table(verdict), report_table(report)):
        first = "".join(line.split("│")[1].strip() for line in shown(table, 60).splitlines() if "│" in line)
        assert name in first


def test_a_hostile_fallback_of_a_manifest_is_shown() -> None:
    found = {
        "kind": "artifact", "name": NASTY, "identity": "i", "source": NASTY, "recipe": NASTY, "layers": [], "kept": [],
        "dropped": [], "fallbacks": [{"layer": NASTY, "kind": "kept", "detail": NASTY}], "notes": [NASTY],
        "readers": {NASTY: NASTY},
        "totals": {
            "quantised_parameters": 0, "bits_per_weight": None, "bits_per_parameter": 1.0, "weight_bytes": 1,
            "source_weight_bytes": 1,
        },
    }  # fmt: skip
    text = "".join(shown(table) for table in inspection_tables(found))
    assert "\\x1b[2J" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain é 层", "plain é 层"),
        ("a\x1b[1mb", "a\\x1b[1mb"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
        ("a\tb", "a\\tb"),
    ],
)
def test_what_a_terminal_would_obey_becomes_an_escape(text: str, safe: str) -> None:
    assert printable(text) == safe
    printable(text).encode()
