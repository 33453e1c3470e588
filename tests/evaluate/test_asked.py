"""A report agrees with its suite and with this quantkit's protocol, or is refused with what differs."""

import copy
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import ReportError
from quantkit.evaluate.asked import refuse_other_protocol
from quantkit.evaluate.protocol import protocol_hash
from quantkit.evaluate.suite import Corpus, Suite
from quantkit.report import REPORT_VERSION, Report, Subject, SuiteRecord
from tests.samples import sample_protocol

PATH = Path("quick.json")
NOTES, MANUAL = {"text": "notes", "windows": 8, "length": 64}, {"text": "manual", "windows": 4, "length": 64}
SUITE = Suite(name="mine", perplexity=[NOTES, MANUAL], fidelity=NOTES | {"windows": 6})


def report(record: dict[str, Any], **changes: Any) -> Report:
    base = Subject(kind="checkpoint", name="base", identity="b" * 64)
    values: dict[str, Any] = {
        "schema_version": REPORT_VERSION, "identity": "a" * 64, "reference": base, "metrics": {}, "notes": [],
        "subject": Subject(kind="artifact", name="artifact", identity="a" * 64),
        "suite": SuiteRecord(name=SUITE.name, sha256=SUITE.sha256, limit=None),
        "protocol": protocol_hash(record), "protocol_record": record, "run": {},
    }  # fmt: skip
    return Report(**values | changes)


def changed(*path: str, value: Any) -> dict[str, Any]:
    """The protocol record of a run of the suite, with one value changed or (None) removed."""
    record = copy.deepcopy(sample_protocol(SUITE))
    place = record
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return record


def test_a_run_of_the_suite_agrees() -> None:
    record = sample_protocol(SUITE)
    assert set(record["texts"]) == {"notes", "manual", "fidelity:notes"}
    refuse_other_protocol(report(record), SUITE, PATH)
    refuse_other_protocol(report(record), SUITE, PATH, protocol_hash(record))


def test_without_a_reference_fidelity_is_not_asked_for() -> None:
    record = changed("texts", "fidelity:notes", value=None)
    refuse_other_protocol(report(record, reference=None), SUITE, PATH)
    with pytest.raises(ReportError, match="scored the texts"):
        refuse_other_protocol(report(record), SUITE, PATH)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("version",), 0, "protocol version 0, this quantkit measures with 1"),
        (("version",), None, "protocol version None"),
        (("bootstrap",), {"resamples": 10, "seed": 1}, "protocol bootstrap"),
        (("texts", "notes", "windows"), 7, "notes with windows 7, the suite asks 8"),
        (("texts", "fidelity:notes", "windows"), 8, "fidelity:notes with windows 8, the suite asks 6"),
        (("texts", "manual", "length"), 512, "manual with length 512, the suite asks 64"),
        (("texts", "manual"), None, "suite mine has"),
        (("texts", "other"), {}, "scored the texts"),
        (("texts", "manual"), "text", "manual with windows None"),
        (("texts",), [], "scored the texts"),
    ],
)
def test_what_was_measured_otherwise_is_refused_by_name(path: tuple[str, ...], value: Any, words: str) -> None:
    with pytest.raises(ReportError, match=r"^quick\.json.*run quantkit eval again") as caught:
        refuse_other_protocol(report(changed(*path, value=value)), SUITE, PATH)
    assert words in caught.value.problem


def test_a_bos_rule_counts_where_the_suite_sets_one() -> None:
    with_bos = SUITE.model_copy(update={"bos": "window"})
    with pytest.raises(ReportError, match="bos none, the suite asks window"):
        refuse_other_protocol(report(sample_protocol(SUITE)), with_bos, PATH)


def test_a_protocol_hash_of_another_record_is_refused() -> None:
    record = sample_protocol(SUITE)
    with pytest.raises(ReportError, match="its protocol hash is not that of its protocol record"):
        refuse_other_protocol(report(record, protocol="c" * 64), SUITE, PATH)


def test_a_pinned_protocol_tells_an_edited_text_from_the_one_that_was_meant() -> None:
    pinned = protocol_hash(sample_protocol(SUITE))
    edited = changed("texts", "notes", "text_sha256", value="e" * 64)
    refuse_other_protocol(report(edited), SUITE, PATH)
    with pytest.raises(ReportError, match=f"the policy requires {pinned[:12]}"):
        refuse_other_protocol(report(edited), SUITE, PATH, pinned)


def test_a_fidelity_corpus_that_is_a_perplexity_entry_is_scored_with_it() -> None:
    shared = Suite(name="shared", perplexity=[NOTES], fidelity=NOTES)
    assert shared.corpora(with_reference=True) == {"notes": Corpus(**NOTES)}
    assert list(SUITE.corpora(with_reference=True)) == ["notes", "manual", "fidelity:notes"]
    assert list(SUITE.corpora(with_reference=False)) == ["notes", "manual"]
