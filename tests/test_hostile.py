"""Broken and hostile files: only typed errors, no hang, no memory blow-up, nothing outside the folder, no code."""

import ast
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import quantkit
from tests.hostile import JSON_TARGETS, TARGETS, WILD, Target, changed, damaged, places, spelt

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


@pytest.mark.parametrize("name", JSON_TARGETS)
def test_one_value_after_the_other_may_be_anything(name: str, folder_of: Prepared) -> None:
    """As many as time allows of all pairs of a place and a wild value, evenly spread."""
    target, folder, good = folder_of(name)
    pairs = [(place, wild) for place in places(json.loads(good))[1:] for wild in WILD]
    for place, wild in pairs[:: max(1, len(pairs) // (_MORE * (20 if target.slow else 150)))]:
        value = json.loads(good)
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = wild
        target.run(folder, spelt(value))
    target.run(folder, good)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_bytes_raise_nothing_but_typed_errors(name: str, folder_of: Prepared) -> None:
    target, folder, good = folder_of(name)

    @fuzz(20 if target.slow else 150)
    @given(data=damaged(good))
    def run(data: bytes) -> None:
        target.run(folder, data)

    run()
    target.run(folder, good)


@pytest.mark.parametrize("name", [wild for wild in WILD if isinstance(wild, str)], ids=lambda name: ascii(name[:16]))
def test_a_tensor_may_have_any_name(name: str, folder_of: Prepared) -> None:
    """One more, and in the place of another."""
    target, folder, good = folder_of("weights")
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    for renamed in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight"):
        changed = dict(header)
        changed[name] = changed.pop(renamed)
        text = json.dumps(changed, ensure_ascii=False).encode(errors="surrogatepass")
        target.run(folder, len(text).to_bytes(8, "little") + text + good[8 + length :])
    target.run(folder, good)


def code_runners(source: str) -> set[str]:
    """What in a Python source could run code out of data: unpickling, eval, YAML with tags, trust unasked."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found |= {name for name in names if name.split(".")[0] in {"pickle", "marshal", "shelve", "dill", "joblib"}}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            safe = name == "yaml.load" and keywords.get("Loader") == "_UniqueKeyLoader"
            if name in {"eval", "exec", "compile", "torch.load", "yaml.load", "yaml.unsafe_load"} and not safe:
                found.add(name)
            if keywords.get("trust_remote_code") == "True" or keywords.get("allow_pickle") == "True":
                found.add(f"{name} that trusts")
    return found


def test_no_module_runs_code_out_of_data() -> None:
    root = Path(quantkit.__file__).parent
    assert {path.name: found for path in root.rglob("*.py") if (found := code_runners(path.read_text()))} == {}


def test_the_search_for_what_runs_code_would_find_it() -> None:
    assert code_runners("import pickle\ntorch.load(f)\nyaml.load(t)\neval(x)\nM.load(d, trust_remote_code=True)") == {
        "pickle", "torch.load", "yaml.load", "eval", "M.load that trusts",
    }  # fmt: skip
    assert code_runners("yaml.load(t, Loader=_UniqueKeyLoader)\nM.load(d, trust_remote_code=asked)") == set()
