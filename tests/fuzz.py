"""Coverage-guided fuzzing of the readers in `tests.hostile` with atheris: `make fuzz`.

    python -m tests.fuzz                # every target in turn, FUZZ_SECONDS each (default 60)
    python -m tests.fuzz gguf -runs=0   # one target, with any flags of libFuzzer

Inputs that were found interesting stay in build/fuzz/TARGET; one that fails is written beside it and named.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path("build") / "fuzz"


def main(arguments: list[str]) -> int:
    """Run one target in this process, or all of them in processes of their own; the number of those that failed."""
    try:
        import atheris  # type: ignore[import-not-found]
    except ImportError as error:
        print(f"skipped: atheris cannot be loaded ({error}); it has wheels for Linux: pip install atheris")
        return 0
    with atheris.instrument_imports(include=["quantkit", "json", "yaml"]):
        from tests.hostile import TARGETS

    if not arguments:
        seconds = os.environ.get("FUZZ_SECONDS", "60")
        commands = [[sys.executable, "-m", "tests.fuzz", name, f"-max_total_time={seconds}"] for name in TARGETS]
        return sum(subprocess.run(command, check=False).returncode != 0 for command in commands)
    name, *flags = arguments
    if name not in TARGETS:
        print(f"there is no target {name!r}; use one of: {', '.join(TARGETS)}")
        return 2
    target, corpus = TARGETS[name], CORPUS / name
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        target.prepare(folder)
        (folder / "notes.jsonl").write_text('{"text": "a b c"}\n')
        (corpus / "good").write_bytes(target.good(folder))
        atheris.Setup(
            [sys.argv[0], str(corpus), f"-artifact_prefix={CORPUS}/{name}-", "-rss_limit_mb=8192", *flags],
            lambda data: target.run(folder, data) and None,
        )
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
