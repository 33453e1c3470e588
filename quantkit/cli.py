"""The command line. Progress and messages go to stderr, the result to stdout: a table, or one JSON object with --json.

Exit codes: 0 done; 1 the check said no (verify, gate); 2 bad input or usage; 3 interrupted.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quantkit.errors import InterruptedRunError, QuantkitError, UsageError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantise a language model, measure the exact file, and decide whether it may be released.",
)
_messages = Console(stderr=True, highlight=False)
_TYPER_INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the Python files that the model brings.")]


@app.command()
def convert(
    model: Annotated[str, typer.Argument(help="Model directory, hub id (org/name[@revision]) or .gguf file.")],
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe, or a path.")],
    output: Annotated[Path | None, typer.Option(help="Directory to write; default MODELNAME-RECIPE.")] = None,
    calib: Annotated[
        str | None, typer.Option(help="Calibration set: a shipped name, a YAML path or a text file.")
    ] = None,
    allow_short_calibration: Annotated[
        bool, typer.Option("--allow-short-calibration", help="Go on with fewer samples than asked.")
    ] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one recipe key.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; read no weights.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished conversion to this output, if there is one.")
    ] = False,
    shard_size: Annotated[str, typer.Option(help="Largest weight file, as in 5GB or 500MB.")] = "5GB",
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint into a packed artifact."""
    from quantkit.calibration import calibration_set, recipe_calibration
    from quantkit.checkpoint import open_checkpoint
    from quantkit.inspection import inspect_artifact, inspect_plan
    from quantkit.pipeline import check_space
    from quantkit.pipeline import convert as run
    from quantkit.plan import make_plan
    from quantkit.recipe import load_recipe
    from quantkit.workspace import Workspace

    shard_bytes = _parse_size(shard_size)
    chosen = load_recipe(recipe, set_)
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    plan = make_plan(checkpoint, chosen)
    target = output or Path(f"{Path(checkpoint.name).name}-{chosen.name}")
    check_space(plan, target, resume=resume)
    calibration_set(chosen, calib)
    if dry_run:
        _show(inspect_plan(plan), as_json)
        return
    for note in plan.notes:
        _say(note)
    calibration = recipe_calibration(chosen, checkpoint, calib, allow_short=allow_short_calibration)
    total = sum(entry.nbytes for entry in checkpoint.entries.values())
    if resume:
        _say(Workspace(target).progress or f"nothing of {target} is unfinished: starting from the beginning")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with _resumable(target), Progress(*columns, console=_messages, transient=True) as bar:
        task = bar.add_task("converting", total=total)
        done = run(
            plan,
            target,
            calibration=calibration,
            shard_bytes=shard_bytes,
            progress=lambda _, size: bar.advance(task, size),
            resume=resume,
        )
    _say(f"wrote {target} in {done.seconds:.1f} s; identity {done.manifest.identity}")
    _show(inspect_artifact(target) | {"path": str(target)}, as_json)


@app.command("eval")
def evaluate_command(
    model: Annotated[str, typer.Argument(help="Artifact directory, or an unquantised model.")],
    suite: Annotated[str, typer.Option(help="Name of a shipped suite, or a path.")] = "quick",
    reference: Annotated[str | None, typer.Option(help="Model to compare with; default the artifact's source.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="At most N windows a text and documents a task, for a look; no gate takes it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Report file; default ARTIFACT/evals/SUITE.json.")] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Also write the report as a page beside it.")] = True,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure the exact packed file: perplexity, fidelity to the original, and tasks."""
    from quantkit.artifact import REPORTS
    from quantkit.evaluate.loader import is_artifact
    from quantkit.evaluate.run import evaluate
    from quantkit.evaluate.suite import load_suite
    from quantkit.pages import write_report_page
    from quantkit.report import write_report
    from quantkit.tables import report_table

    if html and output is not None and output.suffix == ".html":
        raise UsageError(f"--output {output} names the page", "name the JSON file; the page is written beside it")
    chosen = load_suite(suite)
    with _windows_bar() as progress:
        report = evaluate(
            model,
            chosen,
            reference=reference,
            limit=limit,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    # A short run never takes the place of a whole one, which a gate may be waiting for.
    name = chosen.name if limit is None else f"{chosen.name}-limit{limit}"
    inside = Path(model) / REPORTS / f"{name}.json"
    beside = Path(f"{report.subject.name.rpartition('/')[2]}.{name}.json")
    path = output or (inside if is_artifact(model) else beside)
    write_report(report, path)
    page = write_report_page(report, model, path) if html else None
    for note in report.notes:
        _say(note)
    _say(f"wrote {path}" if page is None else f"wrote {path} and {page}")
    if as_json:
        _print_json(report.model_dump(mode="json") | {"path": str(path)})
    else:
        Console().print(report_table(report))


@app.command()
def verify(artifact: Annotated[Path, typer.Argument(help="Artifact directory.")], as_json: Json = False) -> None:
    """Check every byte of an artifact against its manifest."""
    from quantkit.artifact import verify as run
    from quantkit.manifest import read_manifest

    problems = run(artifact)
    identity = read_manifest(artifact).identity
    if as_json:
        _print_json({"identity": identity, "verified": not problems, "problems": problems})
    else:
        for problem in problems or [f"every byte is as recorded; identity {identity}"]:
            print(problem)
    raise typer.Exit(1 if problems else 0)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Artifact directory, or an unquantised model.")],
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Show layers, schemes, bytes, bits per weight and fallbacks."""
    from quantkit.checkpoint import open_checkpoint
    from quantkit.evaluate.loader import is_artifact
    from quantkit.inspection import inspect_artifact, inspect_checkpoint

    if is_artifact(model):
        _show(inspect_artifact(Path(model)), as_json)
    else:
        _show(inspect_checkpoint(open_checkpoint(model, trust_remote_code=trust_remote_code)), as_json)


@app.command()
def gate(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    policy: Annotated[str, typer.Option(help="Name of a shipped policy, or a path.")],
    report: Annotated[Path | None, typer.Option(help="Report to judge; default that of the policy's suite.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Also write the verdict as JUnit XML.")] = None,
    as_json: Json = False,
) -> None:
    """Judge an artifact by a policy: exit code 0 pass, 1 fail, 2 cannot be judged."""
    from quantkit.gates import gate as run
    from quantkit.gates import load_policy, write_junit
    from quantkit.tables import verdict_table

    verdict = run(artifact, load_policy(policy), report)
    if junit is not None:
        write_junit(verdict, junit)
    if as_json:
        _print_json(verdict.values())
    else:
        Console().print(verdict_table(verdict))
    raise typer.Exit(0 if verdict.passed else 1)


@app.command("report")
def report_command(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    suite: Annotated[str, typer.Option(help="Suite whose report is shown, by name or path.")] = "quick",
    policy: Annotated[str | None, typer.Option(help="Policy of the verdict; default smoke, if it can judge.")] = None,
    output: Annotated[Path | None, typer.Option(help="Page to write; default ARTIFACT/evals/SUITE.html.")] = None,
    as_json: Json = False,
) -> None:
    """Write the page of a report, from the report, the manifest and a policy."""
    from quantkit.compare import report_path
    from quantkit.pages import artifact_page, judgement_values, write_page

    page, judgement = artifact_page(artifact, suite, policy)
    path = output or report_path(artifact, suite).with_suffix(".html")
    write_page(page, path)
    found = {"path": str(path)} | judgement_values(judgement)
    if as_json:
        _print_json(found)
    else:
        _say(f"wrote {path}")
        print(f"{found['verdict'] or 'not judged'}: {found['policy'] or found['reason']}")


@app.command("compare")
def compare_command(
    artifacts: Annotated[list[Path], typer.Argument(help="Artifact directories of one base.")],
    suite: Annotated[str, typer.Option(help="Suite whose reports are compared, by name or path.")] = "quick",
    output: Annotated[Path | None, typer.Option(help="Also write the comparison as a page.")] = None,
    as_json: Json = False,
) -> None:
    """Put several artifacts of one base in one table: size, perplexity and fidelity under one protocol."""
    from quantkit.compare import compare as run
    from quantkit.pages import comparison_page, write_page
    from quantkit.tables import comparison_table

    comparison = run(artifacts, suite)
    if output is not None:
        write_page(comparison_page(comparison), output)
        _say(f"wrote {output}")
    if as_json:
        _print_json(comparison.values())
    else:
        Console().print(comparison_table(comparison))


@app.command()
def recipes(name: Annotated[str | None, typer.Argument(help="Recipe to print.")] = None, as_json: Json = False) -> None:
    """List the shipped recipes, or print one."""
    from quantkit.data import shipped_names
    from quantkit.recipe import load_recipe
    from quantkit.schema import find_document
    from quantkit.tables import pairs

    if name is not None:
        recipe = load_recipe(name)
        if as_json:
            _print_json(recipe.values)
        else:
            print(find_document("recipes", name).read_text(encoding="utf-8").rstrip())
        return
    found = {name: load_recipe(name).description for name in shipped_names("recipes")}
    if as_json:
        _print_json(found)
    else:
        Console().print(pairs("recipes", found))


@app.command()
def demo(
    output: Annotated[Path | None, typer.Option(help="Directory to write; default BASE-RECIPE here.")] = None,
    as_json: Json = False,
) -> None:
    """Run the whole pipeline on a small real model: convert, verify, eval, gate."""
    from quantkit.demo import base_checkpoint, load_demo, run_demo
    from quantkit.tables import pairs, verdict_table

    chosen = load_demo()
    base = base_checkpoint(chosen, _say)
    target = output or Path(f"{chosen.name}-{chosen.recipe}")
    with _windows_bar() as progress:
        result = run_demo(chosen, base, target, _say, progress)
    if as_json:
        _print_json(result.values())
    else:
        console = Console()
        console.print(pairs("demo", result.rows()))
        console.print(verdict_table(result.verdict))
    raise typer.Exit(0 if result.verdict.passed else 1)


def main() -> None:
    """Entry point: typed errors become one line on stderr and their exit code."""
    # Weights and text come from where the user points; nothing phones home.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Before torch loads: threads that spin while they wait are several times slower on a machine that is not idle.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_interrupt)
    code = 0
    try:
        # Not standalone, typer returns the code of an Exit where it could raise it, and its own for Ctrl-C.
        code = app(standalone_mode=False) or 0
        if code == _TYPER_INTERRUPTED:
            raise KeyboardInterrupt
    except QuantkitError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        stopped = InterruptedRunError(
            "interrupted", "run the same command again; nothing was left under the final name"
        )
        _fail(str(stopped), stopped.exit_code)
    except OSError as error:
        _fail(f"{error.filename or 'output'}: {error.strerror or error}; check the path and its permissions", 2)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except Exception as error:
        show = getattr(error, "format_message", None)  # click's usage errors
        if show is None:
            raise
        _fail(f"{show()} (see quantkit --help)", 2)
    sys.exit(code)


def _raise_interrupt(number: int, frame: Any) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def _fail(line: str, code: int) -> None:
    print("quantkit: " + " ".join(line.split()), file=sys.stderr)
    sys.exit(code)


def _say(text: str) -> None:
    _messages.print(text, markup=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, sort_keys=True))


def _show(found: dict[str, Any], as_json: bool) -> None:
    from quantkit.tables import inspection_tables

    if as_json:
        _print_json(found)
        return
    console = Console()
    for table in inspection_tables(found):
        console.print(table)


@contextmanager
def _resumable(target: Path) -> Iterator[None]:
    """An interrupt of a conversion says what is kept and how to go on, where anything is."""
    from quantkit.workspace import Workspace

    try:
        yield
    except KeyboardInterrupt:
        if target.exists():  # it came behind the rename
            raise InterruptedRunError(f"interrupted; {target} is complete", "check it with quantkit verify") from None
        kept = Workspace(target).progress
        if kept is None:
            raise
        raise InterruptedRunError(f"interrupted; {kept}", "run the same command with --resume to go on") from None


@contextmanager
def _windows_bar() -> Iterator[Any]:
    """A progress callback for evaluation: called with the total once, then with None after each window and answer."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=_messages)
    task = bar.add_task("evaluating", total=None)
    with ExitStack() as stack:

        def step(total: int | None) -> None:
            if total is None:
                bar.advance(task)
            else:  # an error before this point is one line, without a bar above it
                bar.update(task, total=total)
                stack.enter_context(bar)

        yield step


def _parse_size(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "B": 1}
    for unit, factor in units.items():
        number = text.upper().removesuffix(unit)
        if (
            number != text.upper()
            and number.strip().replace(".", "", 1).isdecimal()
            and number.isascii()
            and float(number) > 0
        ):
            return int(float(number) * factor)
    raise UsageError(f"--shard-size {text!r} is not a size", "write for example 5GB or 500MB")


if __name__ == "__main__":
    main()
