"""lm-eval's tasks on the loaded object: found, loaded with their data, and run through lm-eval's own evaluator.

Everything that can be known without a model is settled first: which tasks, their documents, every prompt. The model is
then asked for exactly these, and so is the reference.
"""

import contextlib
import difflib
import inspect
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.api.task
import numpy as np
import torch
import yaml
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
from lm_eval.tasks import TaskManager
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quantkit.canonical import sha256_file, sha256_json
from quantkit.checkpoint import Checkpoint, quiet_transformers
from quantkit.data import data_dir
from quantkit.errors import CheckpointError, NumericsError, QuantkitError, TaskError, first_line, one_line
from quantkit.evaluate.loader import exactly
from quantkit.evaluate.outcomes import Outcome, Rule, task_metrics
from quantkit.evaluate.suite import TaskEntry

# lm-eval's defaults, so that its own command line asks the same.
_RANDOM_SEED, _SEED = 0, 1234
# Largest batch, and the most tokens in one: scoring holds the logits of every position, generating those of the last.
_ROWS = 16
_TOKENS = {"loglikelihood": 2048, "loglikelihood_rolling": 2048, "generate_until": 16384}
# Tokens of an answer where a task does not say.
_ANSWER = 256
# Field of a document by whose values the metrics are also reported apart, where its task names no others.
_PARTS = ("language",)


@dataclass(frozen=True)
class LoadedTask:
    """A task with its documents and prompts.

    requests: questions to the model, several a document where it chooses. batch: how many it answers at a time. cut:
    prompts that are longer than the model's context, of which lm-eval drops the beginning. unanswerable: documents of
    which the right answer is none of the choices, which lm-eval counts as wrong. rules: what enters the protocol.
    parts: indices of the documents by the value of a field, `{by_language: {en: [0, 2]}}`.
    """

    name: str
    task: Any
    limit: int | None
    requests: int
    batch: int
    cut: int
    unanswerable: int
    rules: dict[str, Any]
    parts: dict[str, dict[str, list[int]]]


class LoadedModel(HFLM):  # type: ignore[misc]
    """lm-eval's view of a model that is loaded already, without bars of its own."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int) -> None:
        # lm-eval ties embeddings whatever the file held; the loader has tied what is to be tied.
        vars(model)["tie_weights"] = lambda: None
        try:
            super().__init__(
                pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch, softmax_dtype=torch.float32
            )
        finally:
            del vars(model)["tie_weights"]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> Any:  # noqa: ARG002
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> Any:  # noqa: ARG002
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = True, **options: Any) -> Any:  # noqa: ARG002
        with exactly(self.model):  # a prompt of one token looks like a step of decoding
            return super()._loglikelihood_tokens(requests, disable_tqdm=True, **options)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> Any:  # noqa: ARG002
        return super().generate_until(requests, disable_tqdm=True)


class _Ticks:
    """What lm-eval tells each answer, in place of its cache."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def add_partial(self, *_: Any) -> None:
        self.tick()


def load_tasks(entries: Sequence[TaskEntry], checkpoint: Checkpoint) -> list[LoadedTask]:
    """The tasks of a suite with their data; a group gives all of its tasks.

    Raises TaskError: a name that is not known, data that cannot be had, a task that quantkit does not run; TextError
    where the package with the data cannot be fetched; CheckpointError where transformers refuses the model's generation
    defaults.
    """
    _generation_defaults(checkpoint)  # what run_tasks reads is known to be good before a model is loaded
    tokenizer = checkpoint.tokenizer()
    length = resolve_max_length(checkpoint.config, tokenizer)
    with _quiet_lm_eval(), _seeded():
        manager = _manager([entry.name for entry in entries])
        found = [loaded for entry in entries for loaded in _load_entry(manager, entry, tokenizer, length)]
    names = [loaded.name for loaded in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise TaskError(f"task {twice} comes from two entries of the suite", "name it, or its group, once")
    return found


def run_tasks(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[LoadedTask],
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """What `model` does on each task. tick: called after each answer.

    checkpoint: where the model's generation defaults are. Raises TaskError where lm-eval cannot run a task, and
    CheckpointError where transformers refuses the defaults.
    """
    defaults = _generation_defaults(checkpoint)
    if defaults is not None:  # as whoever loads the directory will generate
        model.generation_config = defaults
    with _quiet_lm_eval():
        return {loaded.name: _run(model, tokenizer, loaded, tick) for loaded in tasks}


def _generation_defaults(checkpoint: Checkpoint) -> GenerationConfig | None:
    """The settings of generation_config.json, None where there is none."""
    path = checkpoint.directory / "generation_config.json"
    if not path.is_file():
        return None
    try:
        with quiet_transformers():
            return GenerationConfig.from_pretrained(checkpoint.directory)
    except Exception as error:  # transformers checks some settings, and stumbles over others
        raise CheckpointError(
            f"transformers refuses {path} ({first_line(error)})", "correct that setting, or remove it"
        ) from None


def tasks_record(tasks: Sequence[LoadedTask]) -> dict[str, Any]:
    """What enters the protocol: lm-eval's version, and for each task its configuration, documents and prompts."""
    return {"lm_eval": version("lm_eval"), "tasks": {loaded.name: loaded.rules for loaded in tasks}}


def tasks_metrics(
    tasks: Sequence[LoadedTask], outcomes: Mapping[str, Outcome], reference: Mapping[str, Outcome] | None
) -> tuple[dict[str, Any], list[str]]:
    """The metrics of every task by its name, and notes on prompts that were cut and metrics that are no number."""
    metrics: dict[str, Any] = {}
    notes = []
    for loaded in tasks:
        outcome = outcomes[loaded.name]
        beside = None if reference is None else reference[loaded.name]
        rules = _rules(loaded.task, outcome)
        metrics[loaded.name] = task_metrics(outcome, beside, rules, loaded.parts)
        if loaded.cut:
            notes.append(f"task {loaded.name}: {loaded.cut} prompts exceed the model's context and lost their start")
        if loaded.unanswerable:
            notes.append(
                f"task {loaded.name}: the right answer of {loaded.unanswerable} documents is none of their choices"
            )
        lost = [name for name in rules if name not in metrics[loaded.name]]
        if lost:
            notes.append(f"task {loaded.name}: {', '.join(lost)} left out, not a finite number")
    return metrics, notes


def _manager(names: Sequence[str]) -> TaskManager:
    """An index that knows all names: our own tasks, and where that is not enough lm-eval's, which takes a while."""
    ours = str(data_dir("evals") / "tasks")
    manager = TaskManager(include_path=ours, include_defaults=False)
    if any(name not in manager.all_tasks and not _is_path(name) for name in names):
        manager = TaskManager(include_path=ours)
    return manager


def _is_path(name: str) -> bool:
    return Path(name).suffix in {".yaml", ".yml"}


def _load_entry(
    manager: TaskManager, entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, length: int
) -> list[LoadedTask]:
    if _is_path(entry.name) and not Path(entry.name).is_file():
        raise TaskError(f"task file {entry.name} does not exist", "give an lm-eval YAML file, or the name of a task")
    if not _is_path(entry.name) and entry.name not in manager.all_tasks:
        near = difflib.get_close_matches(entry.name, manager.all_tasks, n=3)
        action = f"use {' or '.join(near)}" if near else "see `lm-eval ls tasks` for the names"
        raise TaskError(f"no task is named {entry.name!r}", action)
    try:
        tasks = manager.load([entry.name])["tasks"]
        return [_prepare(name, task, entry, tokenizer, length) for name, task in sorted(tasks.items())]
    except QuantkitError:
        raise
    except Exception as error:  # the library, and every task's own code, raise almost anything here
        # The place in a YAML file stands in the lines after the first.
        reason = one_line(error) if isinstance(error, yaml.YAMLError) else first_line(error)
        raise TaskError(
            f"task {entry.name} cannot be loaded ({reason})",
            "check the network where its data is on a hub, else its file and documents",
        ) from None


def _prepare(name: str, task: Any, entry: TaskEntry, tokenizer: PreTrainedTokenizerBase, length: int) -> LoadedTask:
    """Settle the examples, build every prompt and measure it."""
    _refuse(name, task)
    shots = task.get_config("num_fewshot")
    if entry.num_fewshot is not None and shots == 0 != entry.num_fewshot:
        raise TaskError(f"task {name} is fixed to no examples", "leave out its num_fewshot")
    task.set_config("num_fewshot", shots or 0 if entry.num_fewshot is None else entry.num_fewshot)
    with _seeded():
        task.set_fewshot_seed(seed=_SEED)
        task.build_all_requests(limit=entry.limit)
    kinds = {instance.request_type for instance in task.instances}
    tokens = [_tokens(instance, tokenizer) for instance in task.instances]
    _refuse_endless(name, "generate_until" in kinds, tokenizer)
    rolling = "loglikelihood_rolling" in kinds  # which walks over a long text in windows
    _refuse_long_answers(name, task, tokenizer, length)
    longest = min(max(tokens), length)
    batch = max(1, min(_ROWS, min(_TOKENS[kind] for kind in kinds) // longest))
    documents = len({instance.doc_id for instance in task.instances})
    rules = {
        "version": task.VERSION,
        "num_fewshot": task.get_config("num_fewshot"),
        "documents": documents,
        "documents_sha256": sha256_json([_plain(instance.doc) for instance in task.instances]),
        "requests_sha256": sha256_json([[i.request_type, i.doc_id, _plain(i.args)] for i in task.instances]),
        "batch": batch,
        "config": _configuration(task),
    }
    cut = 0 if rolling else sum(count > length for count in tokens)
    wrong = _unanswerable(name, task, entry.limit)
    parts = _parts(name, task, entry.limit)
    return LoadedTask(name, task, entry.limit, len(task.instances), batch, cut, wrong, rules, parts)


def _refuse(name: str, task: Any) -> None:
    if getattr(task, "MULTIMODAL", False):
        raise TaskError(f"task {name} shows images or sound", "use a task of text")
    if getattr(task, "UNSAFE_CODE", False):
        raise TaskError(f"task {name} runs code that the model writes", "run it with lm-eval in a sandbox")
    unknown = [metric for metric, aggregate in task.aggregation().items() if not callable(aggregate)]
    if task.OUTPUT_TYPE == "generate_until" and task.get_config("process_results") is None:
        unknown += [metric for metric, compute in getattr(task, "_metric_fn_list", {}).items() if not callable(compute)]
    if unknown:
        raise TaskError(
            f"task {name}: lm-eval does not know the metric {unknown[0]!r}, or how to aggregate it",
            "correct metric_list in its file",
        )


def _refuse_endless(name: str, writes: bool, tokenizer: PreTrainedTokenizerBase) -> None:
    """lm-eval ends an answer with the tokenizer's EOS, and where there is no BOS it begins a text with it."""
    if tokenizer.eos_token_id is None and (writes or tokenizer.bos_token_id is None):
        raise TaskError(
            f"task {name} needs an EOS token, and the tokenizer names none",
            "add eos_token to the model's tokenizer_config.json, or leave the task out",
        )


def _refuse_long_answers(name: str, task: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """lm-eval cuts a prompt that is too long, never an answer."""
    for instance in task.instances:
        answer = instance.args[1] if len(instance.args) > 1 else ""
        if isinstance(answer, Mapping):
            needed = _room(answer) + 1  # and one of the prompt
            if needed < 2:
                raise TaskError(f"task {name} asks for answers of no token", "correct max_gen_toks in its file")
        else:
            needed = len(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
        if needed > length:
            raise TaskError(
                f"task {name} has an answer of {needed} tokens, the model's context is {length}",
                "leave that document out, or ask for shorter answers",
            )


def _tokens(instance: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a prompt with its answer, or with the room that the answer may take."""
    texts = [part for part in instance.args if isinstance(part, str)]
    room = sum(_room(part) for part in instance.args if isinstance(part, Mapping))
    return len(tokenizer("".join(texts), verbose=False)["input_ids"]) + room


def _room(settings: Mapping[str, Any]) -> int:
    """Tokens that an answer may take, by whichever of its names for that lm-eval reads."""
    return int(normalize_gen_kwargs(dict(settings), _ANSWER)["max_gen_toks"])


def _unanswerable(name: str, task: Any, limit: int | None) -> int:
    """Documents of a choice task whose right answer is none of their choices.

    Raises TaskError where choices are no list: lm-eval would take a text for a list of characters.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or not isinstance(task, ConfigurableTask):
        return 0
    count = 0
    for _, doc in task.doc_iterator(limit=limit):
        choices = task.doc_to_choice(doc)
        if not isinstance(choices, list):
            raise TaskError(f"task {name}: the choices of a document are no list", "correct doc_to_choice in its file")
        gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
        golds = gold if isinstance(gold, list) else [gold]
        count += not any(one in choices if isinstance(one, str) else one in range(len(choices)) for one in golds)
    return count


def _run(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, loaded: LoadedTask, tick: Callable[[], None]
) -> Outcome:
    try:
        lm = LoadedModel(model, tokenizer, loaded.batch)
        lm.set_cache_hook(_Ticks(tick))
        with _seeded():
            loaded.task.set_fewshot_seed(seed=_SEED)
            results = evaluate(lm, {"tasks": {loaded.name: loaded.task}}, limit=loaded.limit, bootstrap_iters=0)
    except Exception as error:  # as above
        raise TaskError(
            f"task {loaded.name} cannot be run ({first_line(error)})", "check its prompts and answers, or leave it out"
        ) from None
    return _outcome(loaded, results["samples"][loaded.name])


def _outcome(loaded: LoadedTask, samples: list[dict[str, Any]]) -> Outcome:
    """lm-eval's samples, one a document and filter, as columns over the documents."""
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    by_filter = {name: [sample for sample in samples if sample["filter"] == name] for name in filters}
    items = {
        metric if len(filters) == 1 else f"{metric},{name}": [sample.get(metric) for sample in rows]
        for name, rows in by_filter.items()
        for metric in dict.fromkeys(metric for sample in rows for metric in sample["metrics"])
    }
    first = by_filter[filters[0]]
    documents = [sha256_json([sample[key] for key in ("doc_hash", "prompt_hash", "target_hash")]) for sample in first]
    return Outcome(documents, items, _options(loaded.task, first))


def _options(task: Any, samples: list[dict[str, Any]]) -> list[list[float]] | None:
    """Log-likelihoods of the options of a choice task; None for another, or where a document leaves no choice."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return None
    scores = [[float(score) for score, _ in sample["filtered_resps"]] for sample in samples]
    # For mutual information lm-eval also asks for each option without its question, after those with it.
    if "acc_mutual_info" in task.aggregation():
        scores = [row[: len(row) // 2] for row in scores]
    if not all(math.isfinite(score) for row in scores for score in row):
        raise NumericsError(
            "the model scores an option with NaN or infinity", "lower the damage, or evaluate in float32"
        )
    return scores if min(map(len, scores)) > 1 else None


def _rules(task: Any, outcome: Outcome) -> dict[str, Rule]:
    """How lm-eval aggregates each metric; where the task does not say, the mean, and more is better."""
    aggregations, directions = task.aggregation(), task.higher_is_better()
    rules = {}
    for name in outcome.items:
        metric = name.partition(",")[0]
        better = directions.get(metric)
        rules[name] = Rule(aggregations.get(metric, mean), better is None or bool(better))
    return rules


def _parts(name: str, task: Any, limit: int | None) -> dict[str, dict[str, list[int]]]:
    """Indices of the documents by the value of each field that the task names in its metadata under `parts`.

    Raises TaskError where it names a field that not every document has.
    """
    documents = [doc for _, doc in task.doc_iterator(limit=limit)]
    metadata = task.get_config("metadata")
    named = metadata.get("parts") if isinstance(metadata, Mapping) else None
    fields = list(_PARTS) if named is None else named if isinstance(named, list) else [named]
    found: dict[str, dict[str, list[int]]] = {}
    for field in fields:
        if all(isinstance(doc, Mapping) and field in doc for doc in documents):
            parts: dict[str, list[int]] = {}
            for index, doc in enumerate(documents):
                parts.setdefault(str(doc[field]), []).append(index)
            found[f"by_{field}"] = parts
        elif named is not None:
            raise TaskError(f"task {name}: not every document has the part {field!r}", "correct parts in its metadata")
    return found


def _configuration(task: Any) -> Any:
    """The task's configuration as plain data, functions by the hash of their file, without paths of this machine."""
    values = task.config.to_dict(keep_callable=True)
    if isinstance(values.get("metadata"), Mapping):
        values["metadata"] = {key: value for key, value in values["metadata"].items() if key != "config_source"}
    return _plain(values)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if callable(value):
        return {"function": getattr(value, "__qualname__", type(value).__qualname__), "sha256": _source_hash(value)}
    return str(value)


def _source_hash(function: Callable[..., Any]) -> str | None:
    """SHA-256 of the file that a function stands in: what it calls there counts as well."""
    try:
        return sha256_file(Path(inspect.getsourcefile(inspect.unwrap(function)) or ""))
    except (TypeError, OSError):
        return None


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Let lm-eval and its tasks draw the same each time, and put the generators back."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(_RANDOM_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Keep lm-eval from writing bars and warnings between ours, and put its state back."""
    logger, bar = logging.getLogger("lm_eval"), lm_eval.api.task.tqdm
    level = logger.level
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = lambda values, **_: values
    try:
        yield
    finally:
        logger.setLevel(level)
        lm_eval.api.task.tqdm = bar
