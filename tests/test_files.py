"""Files that survive a crash: flushed before they count, replaced as a whole."""

import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.files import copy_file, replace_file, replace_files, sync_directory, write_file


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files and folders that were flushed, in order."""
    names: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def test_writing_makes_the_folders_and_flushes_the_file(tmp_path: Path, flushed: list[str]) -> None:
    write_file(tmp_path / "a" / "b" / "f.json", b"data")
    assert (tmp_path / "a" / "b" / "f.json").read_bytes() == b"data"
    assert flushed == ["f.json"]


def test_replacing_leaves_the_new_bytes_and_no_other_file(tmp_path: Path, flushed: list[str]) -> None:
    (tmp_path / "f").write_bytes(b"old and longer")
    replace_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]
    assert flushed[-1] == tmp_path.name
    assert len(flushed) == 2


def test_a_replacement_that_fails_leaves_the_old_bytes_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"old")

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_readers_never_see_the_file_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"old")
    seen = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append((tmp_path / "f").read_bytes())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "f", b"new")
    assert seen == [b"old", b"new"]


def test_a_reader_that_has_the_file_open_keeps_the_old_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with (tmp_path / "f").open("rb") as stream:
        replace_file(tmp_path / "f", b"new")
        assert stream.read() == b"old"


def test_several_files_are_all_on_the_disk_before_the_first_takes_its_name(
    tmp_path: Path, flushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        events.append(f"{len(flushed)} flushed, then {Path(target).name}")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    replace_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert events == ["2 flushed, then a", "3 flushed, then b"], "and the folder between the two"
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"1", b"2")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_several_files_of_which_one_does_not_fit_are_none_of_them_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"old")
    real, calls = os.fsync, iter(range(9))

    def full_at_the_second(descriptor: int) -> None:
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        replace_files({tmp_path / "a": b"1", tmp_path / "b": b"2"})
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {"a": b"old", "b": b"old"}


def test_copying_keeps_every_byte_and_follows_links(tmp_path: Path, flushed: list[str]) -> None:
    data = bytes(range(256)) * 3
    (tmp_path / "blob").write_bytes(data)
    (tmp_path / "link").symlink_to(tmp_path / "blob")
    copy_file(tmp_path / "link", tmp_path / "made" / "copy")
    assert (tmp_path / "made" / "copy").read_bytes() == data
    assert not (tmp_path / "made" / "copy").is_symlink()
    assert flushed == ["copy"]


def test_a_folder_is_flushed_and_its_descriptor_closed(tmp_path: Path, flushed: list[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    sync_directory(tmp_path)
    assert flushed == [tmp_path.name]
    assert len(os.listdir("/proc/self/fd")) == before
