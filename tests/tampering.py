"""Single tamperings of an artifact and of a ledger, by a seed: one byte, one value of a document, or one line.

What makes them (`scene`, `tamperings`) and what must find them (`findings`) serve the test and `benchmarks/tamper.py`.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import CARD_FILE
from quantkit.canonical import canonical_json
from quantkit.checkpoint import open_checkpoint
from quantkit.entries import Stamp
from quantkit.errors import QuantkitError
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.suite import load_suite
from quantkit.gates import Policy
from quantkit.ledger import check_ledger
from quantkit.pages import write_report_page
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.release import promote, rollback
from quantkit.report import write_report
from quantkit.verification import verify_components
from tests import zoo

STAMP = Stamp(by="ana", at="2026-01-31T09:00:00Z")
# Files that are there to be locked, and hold nothing.
_EMPTY = {".ledger.lock"}


@dataclass(frozen=True)
class Scene:
    """A measured artifact with its reports, and the ledger on which it and another were released."""

    artifact: Path
    other: Path
    ledger: Path
    policy: Policy

    @property
    def files(self) -> list[Path]:
        """All but the model card: it lies outside the identity, and people may edit it."""
        found = {*self.artifact.rglob("*"), *self.ledger.rglob("*")} - {self.artifact / CARD_FILE}
        return sorted(path for path in found if path.is_file() and path.name not in _EMPTY)


@dataclass(frozen=True)
class Tampering:
    """One change: the file, what kind of change, and the bytes that then stand in it."""

    path: Path
    kind: str
    data: bytes


def scene(root: Path) -> Scene:
    """Convert a random model twice, measure both, and release them: canary, production, production, and back."""
    source = zoo.save("llama", root / "llama")
    (root / "notes.txt").write_text("The valve opens at 3.5 MPa and closes at 3.1 MPa. " * 8)
    corpus = f"{{text: {root / 'notes.txt'}, windows: 4, length: 48}}"
    (root / "tiny.yaml").write_text(f"name: tiny\nperplexity: [{corpus}]\nfidelity: {corpus}\n")
    limit = {"metric": "fidelity.kl_mean", "max": 1}
    policy = Policy(name="tiny", suite=str(root / "tiny.yaml"), limits=[limit])
    made = []
    for recipe in ("rtn-g64", "rtn-int8"):
        plan = make_plan(open_checkpoint(str(source)), load_recipe(recipe))
        path = convert(plan, root / recipe, shard_bytes=60_000).path
        report = evaluate(str(path), load_suite(policy.suite))
        write_report(report, path / "evals" / "tiny.json")
        write_report_page(report, str(path), path / "evals" / "tiny.json")
        made.append(path)
    ledger = root / "manifests"
    for path, channel in ((made[0], "canary"), (made[0], "production"), (made[1], "production")):
        assert promote(path, channel, policy, ledger, STAMP).entry is not None
    rollback("production", ledger, STAMP)
    return Scene(made[0], made[1], ledger, policy)


def findings(found: Scene) -> list[str]:
    """What `quantkit verify` and `quantkit ledger verify` say; empty where all is as it was written."""
    problems = []
    for check in (lambda: verify_components(found.artifact).problems, lambda: check_ledger(found.ledger).problems):
        try:
            problems += check()
        except QuantkitError as error:
            problems.append(error.problem)
    return problems


def names(path: Path, problems: list[str]) -> bool:
    """Whether a finding names the file, and not one whose name ends like it."""
    return any(re.search(rf"(^|[^\w.-]){re.escape(path.name)}", problem) for problem in problems)


def tamperings(found: Scene, count: int, seed: int) -> Iterator[Tampering]:
    """`count` tamperings: the files in turn, and for each file its kinds in turn; the caller restores the file."""
    draw = random.Random(seed)
    files = found.files
    for number in range(count):
        path = files[number % len(files)]
        kinds = _kinds(path)
        kind = list(kinds)[number // len(files) % len(kinds)]
        yield Tampering(path, kind, kinds[kind](path.read_bytes(), draw))


def tamper(tampering: Tampering, found: Scene) -> list[str]:
    """The findings while the file holds the other bytes; it is as before then."""
    kept = tampering.path.read_bytes()
    tampering.path.write_bytes(tampering.data)
    try:
        return findings(found)
    finally:
        tampering.path.write_bytes(kept)


_Change = Callable[[bytes, random.Random], bytes]


def _kinds(path: Path) -> dict[str, _Change]:
    kinds: dict[str, _Change] = {"byte changed": _other_byte, "byte added": _added_byte, "byte removed": _removed_byte}
    if path.name == "ledger.jsonl":
        kinds |= {"value": _value_of_a_line, "line dropped": _dropped, "lines swapped": _swapped, "tail cut": _cut}
    elif path.suffix in {".json", ".head"}:
        kinds["value"] = _value
    return kinds


def _other_byte(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + bytes([data[place] ^ draw.randrange(1, 256)]) + data[place + 1 :]


def _added_byte(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + bytes([draw.randrange(256)]) + data[place:]


def _removed_byte(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    return data[:place] + data[place + 1 :]


def _value(data: bytes, draw: random.Random) -> bytes:
    """One value changed, the document written again exactly as its writer writes it."""
    values = json.loads(data)
    changed = _other_value(values, draw)
    if canonical_json(values) == data:
        return canonical_json(changed)
    sort = json.dumps(values, sort_keys=True) == json.dumps(values)
    for ascii_only in (False, True):
        form = {"indent": 2, "sort_keys": sort, "ensure_ascii": ascii_only}
        if json.dumps(values, **form).encode().strip() == data.strip():
            return json.dumps(changed, **form).encode() + data[len(data.rstrip()) :]
    return json.dumps(changed, ensure_ascii=False).encode()


def _value_of_a_line(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    lines[number] = _value(lines[number], draw)
    return b"".join(lines)


def _dropped(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[draw.randrange(len(lines))]
    return b"".join(lines)


def _swapped(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    a, b = draw.sample(range(len(lines)), 2)
    lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def _cut(data: bytes, draw: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: draw.randrange(len(lines))])


def _other_value(values: Any, draw: random.Random) -> Any:
    """A copy with one leaf, drawn among all, changed."""
    result = copy.deepcopy(values)
    holder, key = draw.choice(_leaves(result))
    holder[key] = _other(holder[key])
    return result


def _leaves(values: Any) -> list[tuple[Any, Any]]:
    """The place of every leaf: the dict or list that holds it, and its key or index there."""
    found = []
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        found += _leaves(value) if isinstance(value, dict | list) and value else [(values, key)]
    return found


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 if value else 1.0
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + ("0" if not value.endswith("0") else "1")
    return 0 if value is None else [0]
