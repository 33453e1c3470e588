"""How many single tamperings of an artifact and its ledger are found, and whether releases at once lose an entry.

    python benchmarks/tamper.py             a minute on two cores; writes the JSON and docs/reliability.md

A random model is converted twice, measured and released; then each file in turn gets one byte changed, added or
removed, one value of its document changed, or one line of the ledger dropped, swapped or cut, and is restored. Exit
code 1 where anything was missed, or anything was found in what nobody touched.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from doc_tables import publish
from rtn_table import ROOT

from quantkit.artifact import REPORTS
from quantkit.entries import RECORDS, Stamp
from quantkit.ledger import check_ledger
from quantkit.manifest import component_of
from quantkit.release import promote

sys.path.insert(0, str(ROOT))
from tests.tampering import STAMP, Scene, findings, names, scene, tamper, tamperings

RESULT = Path("benchmarks/results/tamper.json")
SEED = 2026
PROCESSES, ROUNDS = 8, 25
# One untouched check after so many tamperings: what it finds would be a false alarm.
CONTROL_EVERY = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="how many tamperings")
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        released = scene(Path(folder) / "scene")
        rows, controls, alarms = measure(released, arguments.count)
        entries = race(released)
    result = {
        "what": "single tamperings of an artifact of a random model and of its ledger, by file: tried, found, named",
        "command": f"python benchmarks/tamper.py --count {arguments.count}",
        "seed": SEED,
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "rows": rows,
        "untouched": {"checks": controls, "alarms": alarms},
        "releases_at_once": {"processes": PROCESSES, "each": ROUNDS, "entries": entries},
    }
    if not arguments.no_write:
        publish(result, RESULT, "docs/reliability.md", "tamper", markdown(result))
    print(markdown(result))
    missed = any(row["tried"] != row["found"] for row in rows) or alarms
    return 1 if missed or entries != PROCESSES * ROUNDS else 0


def measure(released: Scene, count: int) -> tuple[list[dict[str, Any]], int, int]:
    """A row for each kind of file, and how many checks of the untouched files there were and found something."""
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    named: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    controls = alarms = 0
    for number, tampering in enumerate(tamperings(released, count, SEED), 1):
        group = group_of(tampering.path, released)
        problems = tamper(tampering, released)
        tried[group] += 1
        found[group] += bool(problems)
        named[group] += names(tampering.path, problems)
        kinds.setdefault(group, Counter())[tampering.kind] += 1
        if number % CONTROL_EVERY == 0:
            controls += 1
            alarms += bool(findings(released))
    rows = [
        {"file": group, "tried": tried[group], "found": found[group], "named": named[group], "kinds": kinds[group]}
        for group in sorted(tried, key=lambda name: (name.startswith("ledger"), name))
    ]
    return rows, controls, alarms


def group_of(path: Path, released: Scene) -> str:
    """What a file is, in the words of the table."""
    if path.is_relative_to(released.ledger):
        return f"ledger: {RECORDS}/" if path.parent.name == RECORDS else f"ledger: {path.name}"
    name = path.relative_to(released.artifact).as_posix()
    if name.startswith(f"{REPORTS}/"):
        return f"{REPORTS}/*{path.suffix}"
    return name if name in {"manifest.json", "run.json"} else f"component {component_of(name)}"


def race(released: Scene) -> int:
    """Entries after several processes have released at once, each several times; 0 where one failed or one was lost."""
    before = len(check_ledger(released.ledger).entries)
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(PROCESSES)
    processes = [fork.Process(target=release, args=(released, start, number)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    after = check_ledger(released.ledger)
    failed = after.problems or any(process.exitcode for process in processes)
    return 0 if failed else len(after.entries) - before


def release(released: Scene, start: Any, number: int) -> None:
    start.wait()
    for n in range(ROUNDS):
        artifact = (released.artifact, released.other)[(number + n) % 2]
        stamp = Stamp(by=f"process {number}", at=STAMP.at)
        promoted = promote(artifact, f"channel-{number % 3}", released.policy, released.ledger, stamp)
        assert promoted.entry is not None


def markdown(result: dict[str, Any]) -> str:
    lines = ["| file | tampered with | found | file named |", "|---|---|---|---|"]
    rows = result["rows"]
    lines += [f"| {row['file']} | {row['tried']} | {row['found']} | {row['named']} |" for row in rows]
    total = {key: sum(row[key] for row in rows) for key in ("tried", "found", "named")}
    lines.append(f"| **all** | **{total['tried']}** | **{total['found']}** | **{total['named']}** |")
    kinds = sum((Counter(row["kinds"]) for row in rows), Counter())
    untouched, at_once = result["untouched"], result["releases_at_once"]
    lines += [
        "",
        "By kind: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) + ".",
        f"Checks of the untouched files in between: {untouched['checks']}, which found {untouched['alarms']} times "
        f"something. Releases by {at_once['processes']} processes at once, {at_once['each']} each: "
        f"{at_once['entries']} new entries of {at_once['processes'] * at_once['each']}, and the ledger whole.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
