"""Whatever is changed in a released artifact or in its ledger is found, and the file named."""

from collections import Counter
from pathlib import Path

import pytest

from tests.tampering import Scene, findings, names, scene, tamper, tamperings

COUNT = 200


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene(tmp_path_factory.mktemp("tamper"))


def test_two_hundred_tamperings_over_all_files_are_all_found_and_the_file_named(released: Scene) -> None:
    assert findings(released) == []
    tried: Counter[Path] = Counter()
    kinds: Counter[str] = Counter()
    for tampering in tamperings(released, COUNT, seed=11):
        assert names(tampering.path, tamper(tampering, released)), tampering
        tried[tampering.path] += 1
        kinds[tampering.kind] += 1
    assert tried.total() == COUNT
    assert set(tried) == set(released.files)
    assert min(tried.values()) >= COUNT // len(released.files)
    assert set(kinds) == {
        "byte changed", "byte added", "byte removed", "value", "line dropped", "lines swapped", "tail cut",
    }  # fmt: skip
    assert findings(released) == [], "the check itself changes nothing"


def test_the_same_seed_gives_the_same_tamperings(released: Scene) -> None:
    first, second = (list(tamperings(released, 50, seed=3)) for _ in range(2))
    assert first == second
    assert first != list(tamperings(released, 50, seed=4))
    assert all(tampering.data != tampering.path.read_bytes() for tampering in first)


def test_a_removed_file_is_found_wherever_it_stood_unless_it_is_evidence_outside_the_identity(
    released: Scene,
) -> None:
    for path in released.files:
        kept = path.read_bytes()
        path.unlink()
        found = findings(released)
        path.write_bytes(kept)
        # Reports and the run record may be removed: a gate then has nothing to judge, and the ledger keeps its copy.
        outside = path.name == "run.json" or path.parent.name == "evals"
        assert names(path, found) != outside, path
