"""The shipped data folders are found in a working tree and in an installed wheel."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quantkit import data
from quantkit.data import data_dir, shipped_names

REPOSITORY = Path(__file__).parents[1]
KINDS = [
    "recipes",
    "calib",
    "calib/texts",
    "evals",
    "evals/suites",
    "evals/policies",
    "evals/prompts",
    "evals/tasks",
    "evals/texts",
    "manifests",
]

PROBE = """
import json, quantkit
from quantkit.data import data_dir, shipped_names
from quantkit.recipe import load_recipe
from quantkit.schema import find_document
kinds = KINDS
print(json.dumps({
    "package": quantkit.__file__,
    "folders": {kind: str(data_dir(kind)) for kind in kinds},
    "names": {kind: shipped_names(kind) for kind in kinds},
    "recipe": load_recipe("rtn-g64").sha256,
    "suite": str(find_document("evals/suites", "quick")),
}))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_working_tree_has_its_folders_beside_the_package(kind: str) -> None:
    assert data_dir(kind) == REPOSITORY / kind
    assert data_dir(kind).is_dir()


def test_names_are_those_of_the_yaml_files_in_order() -> None:
    names = shipped_names("recipes")
    assert names == sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml"))
    assert {"rtn-g64", "rtn-int8"} <= set(names)


def test_a_folder_that_is_not_there_has_no_names() -> None:
    assert shipped_names("no-such-folder") == []


def test_folders_inside_the_package_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "quantkit"
    (package / "_data" / "recipes").mkdir(parents=True)
    (tmp_path / "evals").mkdir()
    monkeypatch.setattr(data, "_PACKAGE", package)
    assert data_dir("recipes") == package / "_data" / "recipes"
    assert data_dir("evals") == tmp_path / "evals"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a freshly built wheel, as an install would lay them out."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without the backend at hand pip fetches it for the build.
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", str(folder)]
    subprocess.run([*command, str(REPOSITORY)], check=True, capture_output=True, timeout=300)
    with zipfile.ZipFile(next(folder.glob("quantkit-*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_a_wheel_ships_every_file_of_its_data_folders(installed: Path) -> None:
    for kind in ("recipes", "calib", "evals", "manifests"):
        source = {
            path.relative_to(REPOSITORY): path.read_bytes()
            for path in (REPOSITORY / kind).rglob("*")
            if path.suffix in {".yaml", ".json", ".txt", ".jsonl", ".py"}
        }
        assert source
        shipped = installed / "quantkit" / "_data"
        assert {name for name, content in source.items() if (shipped / name).read_bytes() != content} == set()


def test_a_wheel_ships_the_templates_of_the_pages(installed: Path) -> None:
    source = {path.name: path.read_bytes() for path in (REPOSITORY / "quantkit" / "templates").iterdir()}
    assert {"report.html", "comparison.html"} <= set(source)
    shipped = installed / "quantkit" / "templates"
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == source


def test_a_wheel_holds_the_package_and_nothing_beside_it(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"quantkit"}
    assert not list(installed.rglob("tests"))


def test_an_installed_wheel_finds_its_data_from_anywhere(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.replace("KINDS", repr(KINDS))],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert Path(found["package"]).is_relative_to(installed)
    for kind in KINDS:
        assert Path(found["folders"][kind]) == installed / "quantkit" / "_data" / kind
        assert found["names"][kind] == shipped_names(kind)
    assert Path(found["suite"]).is_relative_to(installed)
