"""`quantkit eval` as a function: the exact file, the right reference, and a report that says what was measured."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from quantkit.artifact import seal_run, verify
from quantkit.checkpoint import Checkpoint, open_checkpoint
from quantkit.errors import ArtifactError, CheckpointError, NumericsError, ReportError, TextError, UsageError
from quantkit.evaluate import kept, run
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.suite import Generation, Suite
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import read_report, write_report

Zoo = Callable[[str], Path]
DOCUMENTS = [
    "The valve opens at 3.5 MPa. " * 8,
    "安全阀在 3.5 兆帕时打开。" * 8,
    "Evidence EV-0142 supports the claim. " * 8,
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "notes.txt"
    path.write_text("\n\n".join(document.strip() for document in DOCUMENTS), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def suite(text: str) -> Suite:
    corpus = {"text": text, "windows": 6, "length": 48}
    return Suite(name="tiny", perplexity=[corpus], fidelity=corpus)


@pytest.fixture(scope="module")
def home(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source checkpoint and its artifact, side by side. Tests must not change them."""
    root = tmp_path_factory.mktemp("home")
    source = shutil.copytree(zoo("qwen2"), root / "source")
    convert(make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64-zp")), root / "artifact")
    return root


@pytest.fixture
def moved(home: Path, tmp_path: Path) -> Path:
    """The same, to be damaged: the artifact's run record names this copy of the source."""
    root = shutil.copytree(home, tmp_path / "home")
    run = json.loads((root / "artifact" / "run.json").read_bytes())
    run["source_path"] = str(root / "source")
    del run["sha256"]
    (root / "artifact" / "run.json").write_bytes(seal_run(run))
    return root


def perplexity_through_transformers(path: Path, text: str) -> float:
    """The same protocol, written down once more without our loader and our scoring."""
    ids = AutoTokenizer.from_pretrained(path)(Path(text).read_text(encoding="utf-8"))["input_ids"]
    windows = torch.tensor(ids[: 6 * 48]).reshape(6, 48)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        log_p = torch.log_softmax(model(windows).logits[:, :-1].double(), -1)
    nll = -log_p.gather(-1, windows[:, 1:, None])
    return float(np.exp(nll.sum().item() / nll.numel()))


def test_the_report_measures_the_packed_file_beside_its_source(home: Path, suite: Suite, text: str) -> None:
    report = evaluate(str(home / "artifact"), suite)
    assert report.identity == report.subject.identity == read_manifest(home / "artifact").identity
    assert report.subject.kind == "artifact"
    assert report.reference is not None
    assert (report.reference.kind, report.reference.name) == ("checkpoint", "source")
    found = report.metrics["perplexity"][text]
    # transformers decodes zero-points in the scale dtype, which moves a logit in the fourth digit.
    assert found["value"]["value"] == pytest.approx(perplexity_through_transformers(home / "artifact", text), rel=2e-3)
    assert found["reference"]["value"] == pytest.approx(
        perplexity_through_transformers(home / "source", text), rel=1e-5
    )
    assert found["ratio"]["value"] == pytest.approx(found["value"]["value"] / found["reference"]["value"])
    assert report.metrics["fidelity"]["kl_mean"]["value"] > 1e-4
    assert 0 < report.metrics["fidelity"]["top1"]["value"] <= 1
    assert report.notes == []
    assert report.suite.limit is None
    assert report.protocol_record["texts"][text]["windows"] == 6
    assert report.protocol_record["dtype"] == "float32"


def test_two_evaluations_find_the_same_numbers(home: Path, suite: Suite) -> None:
    first, second = evaluate(str(home / "artifact"), suite), evaluate(str(home / "artifact"), suite)
    assert first.metrics == second.metrics
    assert first.protocol == second.protocol


def test_an_evaluation_changes_nothing_and_its_report_may_stand_inside(moved: Path, suite: Suite) -> None:
    report = evaluate(str(moved / "artifact"), suite)
    assert verify(moved / "artifact") == []
    path = moved / "artifact" / "evals" / "tiny.json"
    write_report(report, path)
    assert verify(moved / "artifact") == []
    assert read_report(path) == report


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3", "neox", "mixtral"])
def test_every_architecture_is_evaluated_against_its_source(
    name: str, zoo: Zoo, suite: Suite, text: str, tmp_path: Path
) -> None:
    convert(make_plan(open_checkpoint(str(zoo(name))), load_recipe("rtn-g64")), tmp_path / "artifact")
    report = evaluate(str(tmp_path / "artifact"), suite)
    ratio = report.metrics["perplexity"][text]["ratio"]["value"]
    kl = report.metrics["fidelity"]["kl_mean"]["value"]
    if read_manifest(tmp_path / "artifact").layers:
        assert kl > 1e-4
        assert 0.5 < ratio < 2
        assert ratio != 1.0
    else:
        assert (ratio, kl) == (1.0, 0.0)


# Checkpoints


def test_an_unquantised_checkpoint_is_evaluated_alone(home: Path, suite: Suite, text: str) -> None:
    report = evaluate(str(home / "source"), suite)
    assert report.subject.kind == "checkpoint"
    assert report.reference is None
    assert "fidelity" not in report.metrics
    assert report.metrics["perplexity"][text].keys() == {"value", "tokens"}
    assert any("fidelity was not measured" in note for note in report.notes)
    beside = evaluate(str(home / "artifact"), suite)
    assert beside.reference is not None
    assert beside.reference.identity == report.identity
    assert beside.metrics["perplexity"][text]["reference"] == report.metrics["perplexity"][text]["value"]


def test_fidelity_of_a_checkpoint_with_itself_is_perfect(home: Path, suite: Suite, text: str) -> None:
    metrics = evaluate(str(home / "source"), suite, reference=str(home / "source")).metrics
    assert metrics["fidelity"]["kl_mean"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert metrics["fidelity"]["top1"]["value"] == 1.0
    assert metrics["fidelity"]["acceptance"]["value"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["perplexity"][text]["ratio"]["value"] == 1.0


def test_the_identity_of_a_checkpoint_is_that_of_its_bytes(home: Path, suite: Suite, tmp_path: Path) -> None:
    copy = shutil.copytree(home / "source", tmp_path / "elsewhere")
    first, second = evaluate(str(home / "source"), suite), evaluate(str(copy), suite)
    assert first.identity == second.identity
    (copy / "LICENSE").write_text("another")
    assert evaluate(str(copy), suite).identity != first.identity


def test_a_quantised_checkpoint_without_manifest_is_refused(moved: Path, suite: Suite) -> None:
    (moved / "artifact" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="quantised and has no manifest"):
        evaluate(str(moved / "artifact"), suite)


# Verified before anything is loaded


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_artifact_is_refused_before_it_is_loaded(
    name: str, moved: Path, suite: Suite, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = moved / "artifact" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    loaded: list[object] = []
    monkeypatch.setattr("quantkit.evaluate.run.load_artifact", lambda *a, **_: loaded.append(a))
    with pytest.raises(ArtifactError, match=rf"not what its manifest says \(changed: {name}") as caught:
        evaluate(str(moved / "artifact"), suite)
    assert "quantkit verify" in caught.value.action
    assert loaded == []


# References


def test_a_source_that_changed_is_no_reference(moved: Path, suite: Suite) -> None:
    (moved / "source" / "LICENSE").write_text("another")
    report = evaluate(str(moved / "artifact"), suite)
    assert report.reference is None
    assert "fidelity" not in report.metrics
    assert any("has changed since the conversion" in note for note in report.notes)


def test_a_source_that_is_gone_is_no_reference(moved: Path, suite: Suite) -> None:
    shutil.rmtree(moved / "source")
    report = evaluate(str(moved / "artifact"), suite)
    assert report.reference is None
    assert any(note.startswith("no reference: ") and "--reference" in note for note in report.notes)


def test_without_a_run_record_there_is_no_reference(moved: Path, suite: Suite) -> None:
    (moved / "artifact" / "run.json").unlink()
    report = evaluate(str(moved / "artifact"), suite)
    assert report.reference is None
    assert any("run.json" in note for note in report.notes)


def test_a_named_reference_is_taken_as_it_is(moved: Path, suite: Suite) -> None:
    (moved / "source" / "LICENSE").write_text("another")
    report = evaluate(str(moved / "artifact"), suite, reference=str(moved / "source"))
    assert report.metrics["fidelity"]["kl_mean"]["value"] > 1e-4
    assert report.notes == []


def test_an_artifact_can_be_the_reference(home: Path, suite: Suite) -> None:
    report = evaluate(str(home / "artifact"), suite, reference=str(home / "artifact"))
    assert report.reference == report.subject
    assert report.metrics["fidelity"]["kl_mean"]["value"] == 0.0


def test_a_reference_that_is_not_there_is_an_error(home: Path, suite: Suite) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        evaluate(str(home / "artifact"), suite, reference=str(home / "nothing"))


def test_a_reference_with_another_tokenizer_is_refused(zoo: Zoo, suite: Suite, tmp_path: Path) -> None:
    other = shutil.copytree(zoo("llama"), tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_bytes())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ReportError, match="another tokenizer"):
        evaluate(str(zoo("llama")), suite, reference=str(other))


# Where it breaks


def test_the_breakdown_covers_every_text_once_and_can_be_addressed_by_a_policy(home: Path, text: str) -> None:
    other = Path(text).with_name("other.txt")
    other.write_text("Pressure 42 bar, 7 valves. " * 20)
    suite = Suite(
        name="s",
        perplexity=[{"text": text, "windows": 8, "length": 40}],
        fidelity={"text": str(other), "windows": 3, "length": 40},
    )
    report = evaluate(str(home / "artifact"), suite)
    found = report.metrics["breakdown"]
    assert {name: group["tokens"] for name, group in found["corpus"].items()} == {text: 8 * 39, str(other): 3 * 39}
    assert found["corpus"][str(other)]["kl_mean"] == pytest.approx(report.metrics["fidelity"]["kl_mean"], rel=0.2)
    assert found["language"].keys() == {"und"}
    assert report.metric("breakdown.class.cjk.kl_mean") == found["class"]["cjk"]["kl_mean"]
    assert report.metric("breakdown.class.digits.tokens") is not None
    assert sum(found["kl_histogram"]["counts"]) == found["all"]["tokens"] == 11 * 39
    assert {row["corpus"] for row in found["worst_windows"]} == {text, str(other)}


def test_a_text_scored_twice_counts_once_in_the_breakdown(home: Path, text: str) -> None:
    corpus = {"text": text, "windows": 4, "length": 40}
    suite = Suite(name="s", perplexity=[corpus], fidelity=corpus | {"windows": 6})
    assert evaluate(str(home / "artifact"), suite).metrics["breakdown"]["all"]["tokens"] == 4 * 39


def test_without_a_reference_there_is_no_breakdown(home: Path, suite: Suite) -> None:
    assert "breakdown" not in evaluate(str(home / "source"), suite).metrics


# What is scored


def test_a_limit_marks_the_report_and_changes_the_protocol(home: Path, suite: Suite, text: str) -> None:
    whole, cut = evaluate(str(home / "source"), suite), evaluate(str(home / "source"), suite, limit=2)
    assert cut.suite.limit == 2
    assert cut.suite.sha256 == whole.suite.sha256
    assert cut.metrics["perplexity"][text]["tokens"] == 2 * 47
    assert cut.protocol != whole.protocol
    with pytest.raises(UsageError):
        evaluate(str(home / "source"), suite, limit=0)


def test_windows_longer_than_the_models_positions_are_noted(home: Path, text: str) -> None:
    for length, notes in (
        (128, []),
        (129, [f"text {text}: windows of 129 tokens are longer than the model's 128 positions"]),
    ):
        suite = Suite(name="s", perplexity=[{"text": text, "windows": 2, "length": length}])
        assert evaluate(str(home / "source"), suite).notes == notes


def test_text_jsonl_and_parquet_of_the_same_documents_give_the_same_numbers(home: Path, tmp_path: Path) -> None:
    plain, lines, table = tmp_path / "t.txt", tmp_path / "t.jsonl", tmp_path / "t.parquet"
    plain.write_text("\n\n".join(document.strip() for document in DOCUMENTS), encoding="utf-8")
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    pq.write_table(pa.table({"text": DOCUMENTS}), table)
    corpora = [{"text": str(path), "windows": 4, "length": 40} for path in (plain, lines, table)]
    metrics = evaluate(str(home / "source"), Suite(name="three", perplexity=corpora)).metrics["perplexity"]
    assert len(metrics) == 3
    assert metrics[str(plain)] == metrics[str(lines)] == metrics[str(table)]


def test_progress_counts_a_shared_text_once_and_others_apart(home: Path, text: str) -> None:
    def told(fidelity_windows: int) -> list[int | None]:
        calls: list[int | None] = []
        suite = Suite(
            name="s",
            perplexity=[{"text": text, "windows": 3, "length": 40}],
            fidelity={"text": text, "windows": fidelity_windows, "length": 40},
        )
        report = evaluate(str(home / "artifact"), suite, progress=calls.append)
        assert report.metrics["fidelity"]["tokens"] == fidelity_windows * 39
        return calls

    assert told(3) == [3, None, None, None]
    assert told(2) == [5, *[None] * 5]


def test_a_text_that_is_too_short_is_an_error_before_the_model_is_loaded(
    home: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("quantkit.evaluate.run.load_checkpoint", lambda *a, **_: loaded.append(a))
    with pytest.raises(TextError, match=r"gives \d+ windows of 48 tokens, 999 are asked"):
        evaluate(str(home / "source"), Suite(name="s", perplexity=[{"text": text, "windows": 999, "length": 48}]))
    assert loaded == []


def test_a_model_that_puts_out_nan_is_an_error(home: Path, suite: Suite, tmp_path: Path) -> None:
    broken = shutil.copytree(home / "source", tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match="NaN"):
        evaluate(str(broken), suite)


def test_a_bos_rule_of_the_suite_is_used(home: Path, text: str) -> None:
    corpus = {"text": text, "windows": 3, "length": 40}
    reports = [
        evaluate(str(home / "source"), Suite(name="s", bos=bos, perplexity=[corpus])) for bos in ("window", "none")
    ]
    assert [report.protocol_record["texts"][text]["bos"] for report in reports] == ["window", "none"]
    assert reports[0].protocol != reports[1].protocol
    assert reports[0].metrics != reports[1].metrics


def test_a_checkpoint_without_tokenizer_is_an_error_naming_it(zoo: Zoo, suite: Suite, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(zoo("llama") / name, bare / name)
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        evaluate(str(bare), suite)


def test_windows_longer_than_the_positions_of_the_model_are_an_error(zoo: Zoo, text: str) -> None:
    suite = Suite(name="long", perplexity=[{"text": text, "windows": 1, "length": 200}])
    with pytest.raises(CheckpointError, match="no row for one of 200 positions"):
        evaluate(str(zoo("gpt2")), suite)


def test_a_limit_that_cuts_nothing_is_no_limit(home: Path, suite: Suite) -> None:
    assert evaluate(str(home / "artifact"), suite, limit=600).suite.limit is None
    assert evaluate(str(home / "artifact"), suite, limit=2).suite.limit == 2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kept answers for this test."""
    monkeypatch.setattr(kept, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that were loaded, as models, by name."""
    names: list[str] = []
    original = run.load_checkpoint

    def noted(checkpoint: Checkpoint, **options: Any) -> PreTrainedModel:
        names.append(checkpoint.name)
        return original(checkpoint, **options)

    monkeypatch.setattr(run, "load_checkpoint", noted)
    return names


def found(home: Path, suite: Suite) -> dict[str, Any]:
    report = evaluate(str(home / "artifact"), suite)
    return {"metrics": report.metrics, "protocol": report.protocol}


def with_tasks(text: str) -> Suite:
    corpus = {"text": text, "windows": 2, "length": 48}
    return Suite(name="tiny", perplexity=[corpus], tasks=[{"name": "quantkit_passage_choice", "limit": 3}])


@pytest.mark.usefixtures("cache")
def test_a_reference_runs_once_for_all_that_are_compared_with_it(
    home: Path, suite: Suite, text: str, loaded: list[str]
) -> None:
    answers = suite.model_copy(update={"generation": Generation(prompts="case-study", new_tokens=3, limit=2)})
    for asked in (suite, with_tasks(text), answers):
        first = found(home, asked)
        assert len(loaded) == 1
        loaded.clear()
        assert found(home, asked) == first
        assert loaded == []
    assert evaluate(str(home / "artifact"), suite).run["reference_answers_kept"] == 6


def test_a_reference_with_damaged_answers_runs_again(home: Path, suite: Suite, cache: Path, loaded: list[str]) -> None:
    first = found(home, suite)
    path = next(cache.rglob("*/*/*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert found(home, suite) == first
    assert len(loaded) == 2


@pytest.mark.usefixtures("cache")
def test_progress_is_the_same_where_answers_were_kept(home: Path, text: str) -> None:
    def told() -> list[int | None]:
        seen: list[int | None] = []
        evaluate(str(home / "artifact"), with_tasks(text), progress=seen.append)
        return seen

    first = told()
    assert first[0] == len(first) - 1
    assert told() == first


@pytest.mark.usefixtures("cache")
def test_tasks_are_asked_again_by_another_lm_eval(
    home: Path, text: str, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found(home, with_tasks(text))
    before = run.version
    monkeypatch.setattr(run, "version", lambda name: "0.0.1" if name == "lm_eval" else before(name))
    found(home, with_tasks(text))
    assert len(loaded) == 2


def test_fast_decoding_with_a_packed_head_is_said_where_windows_leave_no_step(
    zoo: Zoo, text: str, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama_untied"), tmp_path / "source")
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(source)
    recipe = load_recipe("rtn-g64-zp", ["ignore=[]", "weights.scale_dtype=bfloat16", "weights.group_size=32"])
    convert(make_plan(open_checkpoint(str(source)), recipe), tmp_path / "artifact")
    report = evaluate(
        str(tmp_path / "artifact"),
        Suite(
            name="short",
            perplexity=[{"text": text, "windows": 2, "length": 2}],
            generation=Generation(prompts="case-study", new_tokens=2, limit=2, batch=2),
        ),
    )
    assert report.protocol_record["decoding"] == "packed kernels"
    assert "decoding" not in report.metrics
    assert [note for note in report.notes if "packed kernels were not compared" in note]
    assert report.metrics["batching"]["tokens"] > 0
