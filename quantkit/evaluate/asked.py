"""Whether a report measured what its suite asks, by the protocol of this quantkit: read off its protocol record."""

from pathlib import Path
from typing import Any

from quantkit.errors import ReportError
from quantkit.evaluate.protocol import PROTOCOL_VERSION, protocol_hash
from quantkit.evaluate.suite import Corpus, Suite
from quantkit.evaluate.uncertainty import BOOTSTRAP
from quantkit.report import Report

_AGAIN = "run quantkit eval again, with the policy's suite"


def refuse_other_protocol(report: Report, suite: Suite, path: Path, pinned: str | None = None) -> None:
    """Raises ReportError, naming what differs, where the report at `path` was not measured as `suite` asks today.

    pinned: the only protocol hash to accept. The record cannot say what a text is *now*: a text file that was edited
    since gives another hash, which only a pin can tell.
    """
    record = report.protocol_record
    if protocol_hash(record) != report.protocol:
        raise ReportError(f"{path}: its protocol hash is not that of its protocol record", _AGAIN)
    if pinned is not None and report.protocol != pinned:
        raise ReportError(
            f"{path} was measured by protocol {report.protocol[:12]}, the policy requires {pinned[:12]}",
            "evaluate the base and texts that the policy is for, or correct require.protocol",
        )
    for name, found, expected in (
        ("version", record.get("version"), PROTOCOL_VERSION),
        ("bootstrap", record.get("bootstrap"), BOOTSTRAP),
    ):
        if found != expected:
            raise ReportError(f"{path}: protocol {name} {found}, this quantkit measures with {expected}", _AGAIN)
    _refuse_other_texts(_members(record.get("texts")), suite.corpora(report.reference is not None), suite, path)


def _refuse_other_texts(texts: dict[str, Any], corpora: dict[str, Corpus], suite: Suite, path: Path) -> None:
    if set(texts) != set(corpora):
        raise ReportError(f"{path} scored the texts {sorted(texts)}, suite {suite.name} has {sorted(corpora)}", _AGAIN)
    for key, corpus in corpora.items():
        rules = _members(texts[key])
        asked: dict[str, int | str] = {"windows": corpus.windows, "length": corpus.length}
        if suite.bos != "auto":
            asked["bos"] = suite.bos
        for name, value in asked.items():
            if rules.get(name) != value:
                raise ReportError(f"{path}: {key} with {name} {rules.get(name)}, the suite asks {value}", _AGAIN)


def _members(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
