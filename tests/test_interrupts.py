"""Killed and interrupted conversions: nothing is visible under the final name, and the next run goes on or begins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.artifact import verify
from quantkit.checkpoint import open_checkpoint
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.workspace import Workspace

# The command line itself, with a conversion that says when it is in the middle, and stands still there.
_SLOW = """
import sys, time
import quantkit.artifact as artifact
from quantkit.cli import main

write, done, middle = artifact.WeightsWriter.write, [], sys.argv.pop()

def slowly(self, name, tensor):
    digest = write(self, name, tensor)
    done.append(name)
    if len(done) == 4:
        open(middle, "w").close()
        time.sleep(300)
    return digest

artifact.WeightsWriter.write = slowly
main()
"""
_WAIT = 120


def start(source: Path, output: Path) -> subprocess.Popen[str]:
    """A conversion that stands still in the middle of the weights; returns once it does."""
    middle = output.parent.parent / "in the middle"
    command = [sys.executable, "-c", _SLOW, "convert", str(source), "--recipe", "rtn-g64", "--output", str(output)]
    process = subprocess.Popen(
        [*command, str(middle)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # Shells start background jobs with interrupts ignored, and their children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    stop = time.monotonic() + _WAIT
    while not middle.exists() and process.poll() is None and time.monotonic() < stop:
        time.sleep(0.02)
    assert middle.exists(), process.communicate(timeout=1)[1] if process.poll() is not None else "never got there"
    return process


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs"
    folder.mkdir()
    return folder / "artifact"


def test_kill_leaves_no_artifact_and_the_next_run_makes_a_whole_one(
    zoo: Callable[[str], Path], output: Path, tmp_path: Path
) -> None:
    process = start(zoo("llama"), output)
    process.kill()
    process.communicate(timeout=_WAIT)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    assert (Workspace(output).directory / "model.safetensors").is_file(), "it was killed before it wrote anything"
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    made = convert(plan, output, resume=True)
    assert verify(output) == []
    assert list(output.parent.iterdir()) == [output]
    assert made.manifest.identity == convert(plan, tmp_path / "undisturbed").manifest.identity


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_is_exit_code_3_and_one_line_that_says_how_to_go_on(
    number: signal.Signals, zoo: Callable[[str], Path], output: Path
) -> None:
    process = start(zoo("llama"), output)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=_WAIT)
    assert process.returncode == 3
    assert stdout == ""
    lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith("converting")]
    assert len(lines) == 1, stderr
    assert not output.exists()
    kept = Workspace(output).progress
    if kept is None:  # it was stopped before it was known of what source the tensors are
        assert lines[0].startswith("quantkit: interrupted; run the same command again")
        assert list(output.parent.iterdir()) == []
    else:
        assert lines[0] == f"quantkit: interrupted; {kept}; run the same command with --resume to go on"


def test_a_second_process_cannot_write_the_same_output(zoo: Callable[[str], Path], output: Path) -> None:
    process = start(zoo("llama"), output)
    try:
        command = [sys.executable, "-m", "quantkit.cli", "convert", str(zoo("llama")), "--recipe", "rtn-g64"]
        second = subprocess.run([*command, "--output", str(output)], capture_output=True, text=True, timeout=_WAIT)
        assert second.returncode == 2
        assert f"quantkit: another process is writing {output}" in second.stderr
        assert not output.exists()
    finally:
        process.kill()
        process.communicate(timeout=_WAIT)


def test_conversions_that_are_killed_at_random_times_end_in_the_same_bytes() -> None:
    """The kill loop of the docs on one conversion of each recipe, with SIGKILL on processes of their own."""
    script = Path(__file__).parent.parent / "benchmarks" / "kill_loop.py"
    found = subprocess.run(
        [sys.executable, str(script), "--conversions", "5", "--seed", "1", "--no-write"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    names = [name.strip() for name in found.stdout.splitlines()[0].strip("|").split("|")]
    cells = [cell.strip() for cell in found.stdout.splitlines()[-1].strip("|").split("|")]
    total = dict(zip(names, cells, strict=True))
    assert total["conversions"] == total["same identity"] == "5"
    assert total["half artifacts seen"] == "0"
    assert int(total["kills"]) >= 5
