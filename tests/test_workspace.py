"""The hidden folder of a conversion: one writer, nothing visible before it is complete, nothing usable lost."""

import fcntl
import os
from pathlib import Path

import pytest

from quantkit.errors import ArtifactError
from quantkit.journal import JournalWriter, Step
from quantkit.workspace import Workspace, refuse_busy, refuse_unfinished, writing


def step(blocks: int = 1) -> Step:
    return Step(blocks=blocks, done=["a", "b"], tensors={}, layers=[], fold_sites=[], fallbacks=[], generators={})


class Forged(Step):
    done: int  # type: ignore[assignment]


def begin(work: Workspace, steps: int) -> None:
    """What a conversion of so many saved steps leaves in a workspace."""
    work.directory.mkdir(parents=True, exist_ok=True)
    (work.directory / "file").write_text("begun")
    writer = JournalWriter.create(work.journal_path, {"recipe": "one"})
    for number in range(steps):
        writer.append(step(number + 1))
    writer.close()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder / "artifact"


def test_the_final_name_appears_only_when_the_block_ends(output: Path) -> None:
    with writing(output) as work:
        (work.directory / "file").write_text("x")
        assert not output.exists()
    assert (output / "file").read_text() == "x"
    assert list(output.parent.iterdir()) == [output]


def test_an_output_that_appears_meanwhile_is_not_overwritten(output: Path) -> None:
    def write_while_another_appears() -> None:
        with writing(output) as work:
            (work.directory / "file").write_text("ours")
            output.mkdir()
            (output / "theirs").write_text("theirs")

    with pytest.raises(ArtifactError, match="exists"):
        write_while_another_appears()
    assert [path.name for path in output.iterdir()] == ["theirs"]
    assert list(output.parent.iterdir()) == [output]


def test_an_output_whose_parent_is_a_file_is_an_error_naming_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ArtifactError, match=r"file/artifact cannot be written"),
        writing(tmp_path / "file" / "artifact"),
    ):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, ArtifactError])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_error_keeps_what_another_run_can_go_on_with_and_nothing_else(
    steps: int, error: type[BaseException], output: Path
) -> None:
    def fail() -> None:
        with writing(output) as work:
            begin(work, steps)
            raise error("a", "b")

    with pytest.raises(error):
        fail()
    assert os.listdir(output.parent) == ([f".{output.name}.partial"] if steps else [])
    assert (Workspace(output).unfinished() is None) == (steps == 0)


def test_a_disk_error_says_whether_there_is_something_to_go_on_with(output: Path) -> None:
    def fill(steps: int) -> None:
        with writing(output) as work:
            begin(work, steps)
            raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match=r"the disk is full.*choose another --output"):
        fill(0)
    with pytest.raises(ArtifactError, match=r"the disk is full.*the same command with --resume"):
        fill(1)


def test_what_is_unfinished_is_kept_with_resume_and_in_the_way_without(output: Path) -> None:
    work = Workspace(output)
    begin(work, 2)
    assert work.progress == f"2 blocks and 4 tensors are done and kept in {work.root}"
    for check in (lambda: refuse_unfinished(output, resume=False), lambda: writing(output).__enter__()):
        with pytest.raises(ArtifactError, match=r"unfinished conversion .*\.artifact\.partial; pass --resume"):
            check()
    refuse_unfinished(output, resume=True)
    with writing(output, resume=True) as again:
        assert (again.directory / "file").read_text() == "begun"
    assert (output / "file").read_text() == "begun"
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("left", ["no journal", "no step", "no artifact folder", "a file"])
def test_leftovers_that_nobody_can_go_on_with_are_cleared_away(left: str, resume: bool, output: Path) -> None:
    work = Workspace(output)
    if left == "a file":
        work.root.mkdir()
        (work.root / "model.safetensors").write_text("of another version")
    else:
        begin(work, 0 if left == "no step" else 1)
    if left == "no journal":
        work.journal_path.unlink()
    if left == "no artifact folder":  # killed between the rename and the end
        work.directory.rename(output.parent / "gone")
        (output.parent / "gone" / "file").unlink()
        (output.parent / "gone").rmdir()
    assert work.unfinished() is None
    assert work.progress is None
    with writing(output, resume=resume) as again:
        assert list(again.directory.iterdir()) == []
    assert list(output.parent.iterdir()) == [output]


def test_a_link_in_the_place_of_the_workspace_is_not_followed(output: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    work = Workspace(output)
    work.root.symlink_to(elsewhere)
    with pytest.raises(ArtifactError, match="is a link, where the artifact would be made; remove it"):
        writing(output).__enter__()
    assert list(elsewhere.iterdir()) == []


def test_a_forged_step_without_a_list_of_tensors_counts_none(output: Path) -> None:
    work = Workspace(output)
    begin(work, 0)
    writer = JournalWriter.create(work.journal_path, {"recipe": "one"})
    writer.append(Forged(**step().model_dump() | {"done": 7}))
    writer.close()
    assert work.progress is not None
    assert "0 tensors are done" in work.progress


def test_a_second_writer_is_refused_whatever_it_wants_and_the_first_is_not_disturbed(output: Path) -> None:
    refuse_busy(output)
    with writing(output) as work:
        (work.directory / "file").write_text("ours")
        for resume in (False, True):
            with pytest.raises(ArtifactError, match=f"another process is writing {output}"):
                writing(output, resume=resume).__enter__()
        with pytest.raises(ArtifactError, match="wait for it, or choose another --output"):
            refuse_busy(output)
    refuse_busy(output)
    assert (output / "file").read_text() == "ours"


def test_asking_who_writes_does_not_look_like_writing(output: Path) -> None:
    work = Workspace(output)
    work.lock_path.touch()
    with work.lock_path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
        refuse_busy(output)


def test_a_lock_that_a_killed_process_left_does_not_count(output: Path) -> None:
    Workspace(output).lock_path.touch()
    refuse_busy(output)
    with writing(output):
        pass
    assert list(output.parent.iterdir()) == [output]


def test_holes_of_the_unfinished_artifact_do_not_count_as_used_space(output: Path) -> None:
    work = Workspace(output)
    assert work.used_bytes == 0
    work.directory.mkdir(parents=True)
    with (work.directory / "model.safetensors").open("wb") as stream:
        stream.write(bytes(8192))
        stream.truncate(1 << 24)
    assert 8192 <= work.used_bytes < 1 << 20
