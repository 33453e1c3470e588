"""The command line. Progress and messages go to stderr, the result to stdout: a table, or one JSON object with --json.

Exit codes: 0 done; 1 the check said no (verify, diff, gate, promote, rollback, ledger verify); 2 bad input or usage; 3
interrupted.
"""

import getpass
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from quantkit.errors import InterruptedRunError, QuantkitError, UsageError, printable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Quantise a language model, measure the exact file, and decide whether it may be released.",
)
ledger_app = typer.Typer()
app.add_typer(ledger_app, name="ledger")
_LEDGER = Path("manifests")
_messages = Console(stderr=True, highlight=False)
_TYPER_INTERRUPTED = 130
# Seconds between two lines of progress in a log.
_LINE_SECONDS = 60

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
LedgerFolder = Annotated[Path, typer.Option("--ledger", help="Folder of the ledger.")]
By = Annotated[str | None, typer.Option(help="Who releases; default the user's name.")]
At = Annotated[str | None, typer.Option(help="When, as 2026-01-31T09:00:00Z; default now.")]
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
        advance = _advancing(bar, task)
        done = run(
            plan,
            target,
            calibration=calibration,
            shard_bytes=shard_bytes,
            progress=lambda name, size: advance(size, "converting" if size else name),
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
        int | None,
        typer.Option(help="At most N windows a text, documents a task and prompts, for a look; no gate takes it."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Report file; default ARTIFACT/evals/SUITE.json.")] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Also write the report as a page beside it.")] = True,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Measure the exact packed file: perplexity, fidelity to the original, tasks, and answers alone and in a batch."""
    from quantkit.artifact import CARD_FILE, REPORTS
    from quantkit.evaluate.loader import is_artifact
    from quantkit.evaluate.run import evaluate
    from quantkit.evaluate.suite import load_suite
    from quantkit.pages import write_report_page
    from quantkit.report import refuse_unwritable, write_report
    from quantkit.scorecard import update_card
    from quantkit.tables import report_table

    if html and output is not None and output.suffix == ".html":
        raise UsageError(f"--output {output} names the page", "name the JSON file; the page is written beside it")
    chosen = load_suite(suite)
    # A short run never takes the place of a whole one, which a gate may be waiting for.
    name = chosen.name if limit is None else f"{chosen.name}-limit{limit}"
    inside = Path(model) / REPORTS / f"{name}.json"
    refuse_unwritable(output or (inside if is_artifact(model) else Path(inside.name)))
    with _windows_bar() as progress:
        report = evaluate(
            model,
            chosen,
            reference=reference,
            limit=limit,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    beside = Path(f"{report.subject.name.rpartition('/')[2]}.{name}.json")
    path = output or (inside if is_artifact(model) else beside)
    write_report(report, path)
    page = write_report_page(report, model, path) if html else None
    for note in report.notes:
        _say(note)
    _say(f"wrote {path}" if page is None else f"wrote {path} and {page}")
    if limit is None and is_artifact(model) and path.resolve().parent == inside.resolve().parent:
        _say(update_card(Path(model)) or f"wrote its figures into {Path(model) / CARD_FILE}")
    if as_json:
        _print_json(report.model_dump(mode="json") | {"path": str(path)})
    else:
        Console().print(report_table(report))


@app.command()
def verify(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    public_key: Annotated[Path | None, typer.Option(help="Also check the signature, with this EC public key.")] = None,
    signature: Annotated[Path | None, typer.Option(help="Its signature; default ARTIFACT/model.sig.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte of an artifact against its manifest, the reports in it, and who signed it, by component."""
    from quantkit.signing import signature_problems
    from quantkit.tables import verification_table
    from quantkit.verification import verify_components

    if signature is not None and public_key is None:
        raise UsageError("--signature says nothing without a key", "pass --public-key too")
    found = verify_components(artifact)
    unsigned = None if public_key is None else signature_problems(artifact, public_key, signature)
    problems = found.problems + (unsigned or [])
    if as_json:
        signed = None if unsigned is None else not unsigned
        _print_json(found.values() | {"verified": not problems, "problems": problems, "signed": signed})
    else:
        Console().print(verification_table(found))
        good = "every byte is as recorded" if unsigned is None else "every byte is as recorded and signed"
        for problem in problems or [f"{good}; identity {found.identity}"]:
            print(printable(problem))
    raise typer.Exit(1 if problems else 0)


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(help="Artifact directory, or a manifest.")],
    b: Annotated[Path, typer.Argument(help="Artifact directory, or a manifest.")],
    as_json: Json = False,
) -> None:
    """Say which components differ between two artifacts: exit code 0 none, 1 some."""
    from quantkit.diff import diff, named_manifest
    from quantkit.tables import difference_table

    found = diff(named_manifest(a), named_manifest(b))
    if as_json:
        _print_json(found.values())
    else:
        Console().print(difference_table(found))
    raise typer.Exit(0 if found.same else 1)


@app.command()
def sign(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    key: Annotated[Path, typer.Option(help="EC private key in PEM, unencrypted.")],
    as_json: Json = False,
) -> None:
    """Sign an artifact with a local key, by the OpenSSF model-signing format; writes ARTIFACT/model.sig."""
    from quantkit.manifest import read_manifest
    from quantkit.signing import sign as run

    path = run(artifact, key)
    found = {"path": str(path), "identity": read_manifest(artifact).identity}
    if as_json:
        _print_json(found)
    else:
        print(printable(f"signed {found['identity']}: {path}"))


@app.command()
def attest(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    format_: Annotated[str, typer.Option("--format", help="slsa (in-toto provenance) or cyclonedx (ML-BOM).")],
    builder_id: Annotated[str | None, typer.Option(help="URI of the platform that converted, for slsa.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; default stdout.")] = None,
) -> None:
    """Print what an artifact is and was made from, as a standard JSON statement."""
    from quantkit.attest import attest as run
    from quantkit.attest import write_statement

    statement = run(artifact, format_, builder_id)
    if output is None:
        _print_json(statement)
    else:
        write_statement(statement, output)
        _say(f"wrote {output}")


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


@app.command()
def promote(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    channel: Annotated[str, typer.Option(help="Channel to put it on, such as canary or production.")],
    policy: Annotated[str, typer.Option(help="Policy that it has to pass, by name or path.")] = "release",
    report: Annotated[Path | None, typer.Option(help="Report to judge; default that of the policy's suite.")] = None,
    ledger: LedgerFolder = _LEDGER,
    by: By = None,
    at: At = None,
    as_json: Json = False,
) -> None:
    """Verify and gate an artifact, and release it on a channel if it passes: exit code 1 if it does not."""
    from quantkit.gates import load_policy
    from quantkit.release import promote as run
    from quantkit.tables import verdict_table

    done = run(artifact, channel, load_policy(policy), ledger, _stamp(by, at), report=report)
    entry = None if done.entry is None else done.entry.model_dump(mode="json")
    if as_json:
        _print_json({"verdict": done.verdict.values(), "entry": entry})
    else:
        Console().print(verdict_table(done.verdict))
        print(_told(done.entry) if done.entry else f"not promoted: {channel} holds what it held")
    raise typer.Exit(0 if done.entry else 1)


@app.command()
def rollback(
    channel: Annotated[str, typer.Option(help="Channel to put back.")],
    artifact: Annotated[Path | None, typer.Option(help="Where the earlier artifact lies, if it was moved.")] = None,
    ledger: LedgerFolder = _LEDGER,
    by: By = None,
    at: At = None,
    as_json: Json = False,
) -> None:
    """Put back the complete artifact that a channel held before: exit code 1 if its bytes are gone or changed."""
    from quantkit.release import rollback as run

    entry = run(channel, ledger, _stamp(by, at), artifact=artifact)
    if as_json:
        _print_json({"entry": entry.model_dump(mode="json")})
    else:
        print(_told(entry))


@ledger_app.callback(invoke_without_command=True)
def ledger_command(context: typer.Context, ledger: LedgerFolder = _LEDGER, as_json: Json = False) -> None:
    """Show what is released on which channel, and every entry."""
    from quantkit.ledger import read_ledger
    from quantkit.release import state
    from quantkit.tables import channel_table, ledger_table

    context.obj = ledger
    if context.invoked_subcommand is not None:
        return
    found = read_ledger(ledger)
    if as_json:
        entries = [entry.model_dump(mode="json") for entry in found.entries]
        _print_json({"path": str(ledger), "channels": state(found), "entries": entries})
    elif found.entries:
        Console().print(channel_table(state(found)))
        Console().print(ledger_table(found))
    else:
        print(f"{ledger} holds no releases")


@ledger_app.command("verify")
def verify_ledger(
    context: typer.Context,
    ledger: Annotated[Path | None, typer.Option(help="Folder of the ledger; default manifests.")] = None,
    head: Annotated[str | None, typer.Option(help="Hash of an entry, kept elsewhere, that must be there.")] = None,
    artifacts: Annotated[bool, typer.Option("--artifacts", help="Also verify what channels hold and held.")] = False,
    as_json: Json = False,
) -> None:
    """Check every line, the head and every record of the ledger: exit code 1 if anything was changed."""
    from quantkit.ledger import Ledger, check_ledger
    from quantkit.release import unrestorable

    folder = ledger or Path(context.obj)  # which may stand before `verify` as well as behind it
    found = check_ledger(folder, head)
    if artifacts and not found.problems:
        found.problems.extend(unrestorable(Ledger(folder, found.entries)))
    last = found.entries[-1].sha256 if found.entries else None
    if as_json:
        values = {"entries": len(found.entries), "head": last, "problems": found.problems, "notes": found.notes}
        _print_json(values | {"verified": not found.problems})
    else:
        for line in found.problems or [f"entries: {len(found.entries)}, each as written; head {last}"]:
            print(line)
        for note in found.notes:
            _say(note)
    raise typer.Exit(1 if found.problems else 0)


@app.command("report")
def report_command(
    artifact: Annotated[Path, typer.Argument(help="Artifact directory.")],
    suite: Annotated[str, typer.Option(help="Suite whose report is shown, by name or path.")] = "quick",
    policy: Annotated[
        str | None, typer.Option(help="Policy of the verdict; default the shipped one for the suite.")
    ] = None,
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
    # Tensors in huge pages where the system allows it on request: fewer page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
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
    print("quantkit: " + printable(" ".join(line.split())), file=sys.stderr)
    sys.exit(code)


def _say(text: str) -> None:
    _messages.print(printable(text), markup=False, soft_wrap=True)


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
    advance = _advancing(bar, task)
    with ExitStack() as stack:

        def step(total: int | None) -> None:
            if total is None:
                advance(1)
            else:  # an error before this point is one line, without a bar above it
                bar.update(task, total=total)
                stack.enter_context(bar)

        yield step


def _advancing(bar: Progress, number: TaskID) -> Callable[..., None]:
    """What advances a task of a bar by an amount, and may rename it.

    Where no terminal shows it, a line says now and then how far the task is.
    """
    last = time.monotonic()

    def advance(amount: int, doing: str | None = None) -> None:
        nonlocal last
        bar.update(number, advance=amount, description=doing)
        now = time.monotonic()
        if bar.console.is_terminal or now - last < _LINE_SECONDS:
            return
        last = now
        task = bar.tasks[bar.task_ids.index(number)]
        left = "" if task.time_remaining is None else f", about {timedelta(seconds=int(task.time_remaining))} left"
        _say(f"{task.description}: {int(task.percentage)} %{left}")

    return advance


def _stamp(by: str | None, at: str | None) -> Any:
    """Who and when, for the ledger: asked of the machine only where it was not given."""
    from quantkit.entries import TIME_FORMAT, Stamp
    from quantkit.schema import validate

    given = {
        "by": by if by is not None else _user(),
        "at": at if at is not None else time.strftime(TIME_FORMAT, time.gmtime()),
    }
    return validate(Stamp, given, "--by and --at", UsageError, "write for example --by ana --at 2026-01-31T09:00:00Z")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an account without a name, as in some containers
        raise UsageError("this account has no name", "say with --by who releases") from None


def _told(entry: Any) -> str:
    """A new entry on one line, with the head to keep elsewhere."""
    what = "promoted to" if entry.action == "promote" else "restored on"
    before = entry.previous_identity[:12] if entry.previous_identity else "nothing"
    return (
        f"{entry.release.identity[:12]} {what} {entry.channel} in the place of {before}; "
        f"entry {entry.sequence}, head {entry.sha256}"
    )


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
