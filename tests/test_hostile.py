"""Broken and hostile files: only typed errors, no hang, no memory blow-up, nothing outside the folder, no code."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.hostile import JSON_TARGETS, TARGETS, Target, changed, damaged

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
# QUANTKIT_FUZZ=20 tries twenty times as many, and other ones each time.
_MORE = int(os.environ.get("QUANTKIT_FUZZ", "1"))
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def fuzz(examples: int) -> settings:
    return settings(
        max_examples=examples * _MORE,
        deadline=None,
        suppress_health_check=QUIET,
        phases=PHASES,
        derandomize=_MORE == 1,
        database=None,
    )


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Target, Path, bytes]]:
    """A target, its prepared folder and its good document; made once a target."""
    made: dict[str, tuple[Target, Path, bytes]] = {}

    def prepare(name: str) -> tuple[Target, Path, bytes]:
        if name not in made:
            folder, target = tmp_path_factory.mktemp(name), TARGETS[name]
            target.prepare(folder)
            (folder / "notes.jsonl").write_text('{"text": "a b c"}\n')
            made[name] = target, folder, target.good(folder)
        return made[name]

    return prepare


def beside(folder: Path) -> dict[str, bytes]:
    """Every file beside a target's folder."""
    files = [path for path in sorted(folder.parent.rglob("*")) if path.is_file()]
    return {str(path): path.read_bytes() for path in files if not path.is_relative_to(folder)}


Prepared = Callable[[str], tuple[Target, Path, bytes]]


@pytest.mark.parametrize("name", TARGETS)
def test_the_document_that_the_fuzz_starts_from_is_taken(name: str, folder_of: Prepared) -> None:
    target, folder, good = folder_of(name)
    assert target.run(folder, good)


@pytest.mark.parametrize("name", JSON_TARGETS)
def test_wild_values_raise_nothing_but_typed_errors(name: str, folder_of: Prepared) -> None:
    target, folder, good = folder_of(name)
    before = beside(folder)

    @fuzz(25 if target.slow else 150)
    @given(data=changed(json.loads(good)))
    def run(data: bytes) -> None:
        target.run(folder, data)

    run()
    target.run(folder, good)
    assert beside(folder) == before, "a file outside the folder was changed"


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes_raise_nothing_but_typed_errors(name: str, folder_of: Prepared) -> None:
    target, folder, good = folder_of(name)

    @fuzz(20 if target.slow else 150)
    @given(data=damaged(good))
    def run(data: bytes) -> None:
        target.run(folder, data)

    run()
    target.run(folder, good)
