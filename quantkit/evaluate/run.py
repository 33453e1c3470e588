"""`quantkit eval`: load the exact file, score it beside its reference, and write what was found."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quantkit.artifact import verify
from quantkit.canonical import sha256_json
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import ArtifactError, CheckpointError, ReportError
from quantkit.evaluate.breakdown import breakdown, read_part
from quantkit.evaluate.decoding import compared_steps, decoding_metrics, takes_kernels
from quantkit.evaluate.generation import Continuation
from quantkit.evaluate.kept import Kept
from quantkit.evaluate.loader import is_artifact, load_artifact, load_checkpoint
from quantkit.evaluate.outcomes import Outcome
from quantkit.evaluate.protocol import Windows, load_windows, protocol_hash, protocol_record
from quantkit.evaluate.scoring import Scores, fidelity_metrics, perplexity_metrics, score_windows, window_logits
from quantkit.evaluate.serving import Serving, continuations, load_serving, measure_serving
from quantkit.evaluate.suite import Suite
from quantkit.evaluate.uncertainty import BOOTSTRAP
from quantkit.manifest import RUN_FILE, files_identity, read_manifest
from quantkit.pipeline import peak_resident_bytes, source_files
from quantkit.report import REPORT_VERSION, Report, Subject, SuiteRecord
from quantkit.schema import read_json

if TYPE_CHECKING:
    from quantkit.evaluate.tasks import LoadedTask

# Bytes of unpacked weights that stay in memory: small models then run like dense ones, large ones a little faster.
_KEPT = 2 << 30

# Told the total number of windows and answers once, then called after each.
Progress = Callable[[int | None], None]


@dataclass(frozen=True)
class Opened:
    """A model that can be scored: its subject record, its checkpoint view, and how to load it."""

    subject: Subject
    checkpoint: Checkpoint
    load: Callable[[torch.dtype | None], PreTrainedModel]


def evaluate(
    model: str,
    suite: Suite,
    *,
    reference: str | None = None,
    limit: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda _: None,
) -> Report:
    """Evaluate an artifact or a checkpoint on `suite`.

    The reference is the one given, or for an artifact the source that its run record names, where that can be read and
    is the one in the manifest. Raises typed errors for everything that a user can cause.
    """
    started = time.time()
    opened = open_model(model, trust_remote_code)
    beside, notes = _open_reference(model, reference, opened, trust_remote_code)
    if suite.fidelity is not None and beside is None:
        notes.append("fidelity was not measured: there is no reference")
    if suite.generation is not None and beside is None:
        notes.append("answers were not compared: there is no reference")
    limited = suite.limited(limit)
    tokenizer = opened.checkpoint.tokenizer()
    corpora = limited.corpora(beside is not None)
    windows = {key: load_windows(c.text, tokenizer, c.windows, c.length, suite.bos) for key, c in corpora.items()}
    notes += _too_long(windows, opened.checkpoint)
    if beside is not None:
        _check_vocabulary(opened, beside)
    tasks = _load_tasks(limited, opened.checkpoint)
    serving = load_serving(limited.generation, opened.checkpoint, tokenizer) if limited.generation else None
    subject = opened.load(None)
    expected = None if beside is None else _Reference(beside, subject.dtype, opened.checkpoint)
    answers = sum(task.requests for task in tasks) * (1 if beside is None else 2)
    asked = answers + (0 if serving is None else serving.answers(1 if beside is None else 2))
    steps = compared_steps(subject, _decoded(windows)) if asked else 0
    progress(sum(len(part.ids) for part in windows.values()) + asked + steps)
    tick = partial(progress, None)
    logits = None if expected is None else expected.logits
    scores = {key: score_windows(subject, part.ids, logits, tick) for key, part in windows.items()}
    metrics = _metrics(limited, scores, beside is not None)
    if beside is not None:
        metrics["breakdown"] = _breakdown(limited, scores, windows, tokenizer)
    record = protocol_record(windows, subject.dtype, BOOTSTRAP)
    if serving is not None:
        before = None if expected is None else expected.continuations(serving, tick)
        metrics |= measure_serving(serving, subject, before, tokenizer.decode, tick)
        record["generation"] = serving.rules
    if tasks:
        notes += _measure_tasks(tasks, subject, opened.checkpoint, expected, metrics, record, tick)
    if asked:
        record["decoding"] = "packed kernels" if takes_kernels(subject) else "exact"
        if takes_kernels(subject) and not steps:
            notes.append("packed kernels were not compared with exact steps: windows of 2 tokens leave none")
    if steps:
        metrics["decoding"] = decoding_metrics(subject, _decoded(windows), tick)
    return Report(
        schema_version=REPORT_VERSION,
        identity=opened.subject.identity,
        subject=opened.subject,
        reference=None if beside is None else beside.subject,
        suite=SuiteRecord(name=suite.name, sha256=suite.sha256, limit=None if limited == suite else limit),
        protocol=protocol_hash(record),
        protocol_record=record,
        metrics=metrics,
        notes=notes,
        run=_run(started, windows)
        | ({"task_answers": answers} if tasks else {})
        | ({} if expected is None else {"reference_answers_kept": expected.kept.found}),
    ).sealed()


def open_model(model: str, trust_remote_code: bool = False) -> Opened:
    """An artifact (verified byte by byte first) or a checkpoint. Raises ArtifactError and CheckpointError."""
    if not is_artifact(model):
        checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
        if getattr(checkpoint.config, "quantization_config", None) is not None:
            raise CheckpointError(
                f"{checkpoint.name} is quantised and has no manifest", "evaluate what quantkit convert wrote"
            )
        identity = files_identity(source_files(checkpoint))
        subject = Subject(kind="checkpoint", name=checkpoint.name, identity=identity)
        return Opened(subject, checkpoint, lambda dtype: load_checkpoint(checkpoint, dtype=dtype))
    path = Path(model)
    problems = verify(path)
    if problems:
        raise ArtifactError(
            f"{path} is not what its manifest says ({problems[0]})", "run quantkit verify for all of it"
        )
    subject = Subject(kind="artifact", name=path.resolve().name, identity=read_manifest(path).identity)
    checkpoint = open_checkpoint(model, trust_remote_code=trust_remote_code)
    return Opened(
        subject,
        checkpoint,
        lambda dtype: load_artifact(path, dtype=dtype, fast=True, keep=_KEPT, trust_remote_code=trust_remote_code),
    )


def _open_reference(
    model: str, reference: str | None, opened: Opened, trust_remote_code: bool
) -> tuple[Opened | None, list[str]]:
    """The reference to compare with, and notes on why there is none."""
    if reference is not None:
        return open_model(reference, trust_remote_code), []
    if opened.subject.kind == "checkpoint":
        return None, []
    run = Path(model) / RUN_FILE
    source = read_json(run, ReportError, "pass --reference").get("source_path") if run.is_file() else None
    if not isinstance(source, str) or not source:
        return None, [f"no reference: {RUN_FILE} names no source; pass --reference"]
    try:
        found = open_model(source, trust_remote_code)
    except (CheckpointError, ArtifactError) as error:
        return None, [f"no reference: {error.problem}; pass --reference"]
    if found.subject.identity != read_manifest(Path(model)).source_identity:
        return None, [f"no reference: {source} has changed since the conversion; pass --reference"]
    return found, []


def _too_long(windows: dict[str, Windows], checkpoint: Checkpoint) -> list[str]:
    """Notes on windows beyond the positions that the model knows: rotary ones are computed there all the same."""
    known = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    lengths = {key: part.ids.shape[1] for key, part in windows.items()}
    return [
        f"text {key}: windows of {length} tokens are longer than the model's {known} positions"
        for key, length in lengths.items()
        if isinstance(known, int) and length > known
    ]


def _check_vocabulary(opened: Opened, beside: Opened) -> None:
    sizes = [part.checkpoint.config.get_text_config().vocab_size for part in (opened, beside)]
    if sizes[0] != sizes[1]:
        raise ReportError(
            f"{beside.subject.name} has a vocabulary of {sizes[1]}, {opened.subject.name} one of {sizes[0]}",
            "pass the checkpoint that the artifact was made from as --reference",
        )
    text = "Evidence EV-0142 证据，阀门 3.5 MPa."
    if opened.checkpoint.tokenizer()(text)["input_ids"] != beside.checkpoint.tokenizer()(text)["input_ids"]:
        raise ReportError(
            f"{beside.subject.name} has another tokenizer than {opened.subject.name}",
            "pass the checkpoint that the artifact was made from as --reference",
        )


def _metrics(suite: Suite, scores: dict[str, Scores], with_reference: bool) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "perplexity": {corpus.text: perplexity_metrics(scores[corpus.text]) for corpus in suite.perplexity}
    }
    if suite.fidelity is not None and with_reference:
        metrics["fidelity"] = fidelity_metrics(scores[suite.fidelity_key])
    return metrics


def _breakdown(
    suite: Suite, scores: dict[str, Scores], windows: dict[str, Windows], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Where it breaks, over every text once: in its windows for perplexity, where it has other ones for fidelity."""
    keys = {corpus.text: corpus.text for corpus in suite.perplexity}
    if suite.fidelity is not None:
        keys.setdefault(suite.fidelity.text, suite.fidelity_key)
    special = frozenset(tokenizer.all_special_ids)
    return breakdown(
        [
            read_part(
                text, windows[key].rules["language"], scores[key], windows[key].ids.tolist(), tokenizer.decode, special
            )
            for text, key in keys.items()
        ]
    )


def _load_tasks(suite: Suite, checkpoint: Checkpoint) -> list["LoadedTask"]:
    """The tasks of the suite with their data. lm-eval takes seconds to import, so it waits until there are any."""
    if not suite.tasks:
        return []
    from quantkit.evaluate.tasks import load_tasks

    return load_tasks(suite.task_entries, checkpoint)


class _Reference:
    """The model that a subject is compared with: asked only what it has not been asked before, loaded only for that.

    reader: the subject's checkpoint, whose tokenizer reads for both.
    """

    def __init__(self, opened: Opened, dtype: torch.dtype, reader: Checkpoint) -> None:
        self._opened, self._dtype, self._reader = opened, dtype, reader
        self.kept = Kept(opened.subject.identity, dtype, own_code=opened.checkpoint.trust_remote_code)
        self.logits = self.kept.logits(lambda window: window_logits(self._model, window))

    @cached_property
    def _model(self) -> PreTrainedModel:
        return self._opened.load(self._dtype)

    def outcome(self, task: "LoadedTask", tick: Callable[[], None]) -> Outcome:
        """What it does on a task."""
        from quantkit.evaluate.tasks import run_tasks

        tokenizer = self._reader.tokenizer()  # a new one: lm-eval may give it a padding token
        question = {
            "lm_eval": version("lm_eval"),
            "task": task.name,
            "limit": task.limit,
            "rules": task.rules,
            "tokenizer": _reading_of(tokenizer),
        }

        def ask(told: Callable[[], None]) -> dict[str, Any]:
            return vars(run_tasks(self._model, self._opened.checkpoint, tokenizer, [task], told)[task.name])

        return Outcome(**self._asked(question, ask, task.requests, tick))

    def continuations(self, serving: Serving, tick: Callable[[], None]) -> list[Continuation]:
        """What it writes after each prompt."""
        question = {"generation": serving.rules, "prompts": [list(prompt.ids) for prompt in serving.prompts]}

        def ask(told: Callable[[], None]) -> list[dict[str, Any]]:
            return [vars(run) for run in continuations(serving, self._model, told)]

        return [Continuation(**run) for run in self._asked(question, ask, len(serving.prompts), tick)]

    def _asked(
        self, question: Any, ask: Callable[[Callable[[], None]], Any], answers: int, tick: Callable[[], None]
    ) -> Any:
        """What `ask` gives, or gave before; `tick` is called once an answer either way."""
        done = 0

        def told() -> None:
            nonlocal done
            done += 1
            tick()

        found = self.kept.document(question, lambda: ask(told))
        for _ in range(answers - done):
            tick()
        return found


def _reading_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that a tokenizer does to text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return sha256_json(
        [type(tokenizer).__name__, rules, str(tokenizer.special_tokens_map), str(tokenizer.chat_template)]
    )


def _measure_tasks(
    tasks: list["LoadedTask"],
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    reference: _Reference | None,
    metrics: dict[str, Any],
    record: dict[str, Any],
    tick: Callable[[], None],
) -> list[str]:
    """Add the tasks to metrics and protocol record. Returns notes."""
    from quantkit.evaluate.tasks import run_tasks, tasks_metrics, tasks_record

    found = run_tasks(model, checkpoint, checkpoint.tokenizer(), tasks, tick)
    beside = None if reference is None else {task.name: reference.outcome(task, tick) for task in tasks}
    metrics["tasks"], notes = tasks_metrics(tasks, found, beside)
    record |= tasks_record(tasks)
    return notes


def _decoded(windows: dict[str, Windows]) -> list[torch.Tensor]:
    """The windows on which ways of decoding are compared: the first of each text."""
    return [part.ids[0] for part in windows.values()]


def _run(started: float, windows: dict[str, Windows]) -> dict[str, Any]:
    libraries = ("quantkit", "torch", "transformers", "numpy")
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "scored_tokens": sum(part.count for part in windows.values()),
        "peak_resident_bytes": peak_resident_bytes(),
        "versions": {name: version(name) for name in libraries},
    }
