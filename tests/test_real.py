"""The real demo model: what the tiny ones cannot show. Skipped where its package cannot be fetched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from quantkit.artifact import verify
from quantkit.calibration import calibrate_from, load_set
from quantkit.canonical import sha256_bytes
from quantkit.chat import render
from quantkit.checkpoint import load_gguf, open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.errors import TextError
from quantkit.evaluate.generation import continue_alone, continue_in_batch, stop_tokens
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.prompts import load_prompts
from quantkit.evaluate.protocol import Windows, load_windows
from quantkit.evaluate.scoring import perplexity_metrics, score_windows
from quantkit.evaluate.suite import TaskEntry
from quantkit.evaluate.tasks import load_tasks, run_tasks
from quantkit.material import package_file
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.texts import Chat, load_source

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
WINDOWS, LENGTH = 8, 512

Artifact = Callable[[str], Path]


@pytest.fixture(scope="module")
def base() -> Path:
    try:
        return base_checkpoint(load_demo())
    except TextError as error:
        pytest.skip(f"the demo model is not here: {error.problem}")


@pytest.fixture(scope="module")
def windows(base: Path) -> Windows:
    try:
        return load_windows("wiki-en", open_checkpoint(str(base)).tokenizer(), WINDOWS, LENGTH)
    except TextError as error:
        pytest.skip(f"the text is not here: {error.problem}")


@pytest.fixture(scope="module")
def artifact(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The artifact of the real model under a recipe, converted once."""
    root = tmp_path_factory.mktemp("real")

    def path(recipe: str) -> Path:
        output = root / recipe
        if not output.exists():
            convert(make_plan(open_checkpoint(str(base)), load_recipe(recipe)), output)
        return output

    return path


def logits(model: PreTrainedModel, windows: Windows) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=windows.ids[:1, :128], use_cache=False).logits


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def test_the_permuted_base_is_the_packaged_model_as_a_function(
    base: Path, windows: Windows, record_property: Callable[[str, object], None]
) -> None:
    config, state, _ = load_gguf(package_file(load_demo().package))
    packaged = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    packaged.load_state_dict(state, strict=False)
    packaged.tie_weights()
    moved = difference(logits(load_checkpoint(open_checkpoint(str(base))), windows), logits(packaged, windows))
    record_property("largest difference of a logit", moved)
    assert moved < 1e-4


def test_every_linear_is_quantised_and_the_artifact_verifies(artifact: Artifact) -> None:
    for recipe in ("rtn-g64", "rtn-g64-zp"):
        assert verify(artifact(recipe)) == []
    manifest = make_plan(open_checkpoint(str(base_checkpoint(load_demo()))), load_recipe("rtn-g64"))
    assert len(manifest.quantised) == 210


def test_symmetric_logits_are_those_of_transformers(
    artifact: Artifact, windows: Windows, record_property: Callable[[str, object], None]
) -> None:
    found = logits(load_artifact(artifact("rtn-g64")), windows)
    moved = difference(found, logits(AutoModelForCausalLM.from_pretrained(artifact("rtn-g64")), windows))
    record_property("largest difference of a logit", moved)
    assert moved < 1e-4


def test_zero_point_logits_are_those_of_transformers_in_the_stored_arithmetic(
    artifact: Artifact, windows: Windows, record_property: Callable[[str, object], None]
) -> None:
    path = artifact("rtn-g64-zp")
    stored = logits(load_artifact(path, arithmetic="stored"), windows)
    exact = logits(load_artifact(path), windows)
    expected = logits(AutoModelForCausalLM.from_pretrained(path), windows)
    record_property("largest difference of a logit, stored to transformers", difference(stored, expected))
    record_property("largest difference of a logit, stored to exact", difference(stored, exact))
    assert difference(stored, expected) < 1e-4
    assert 0 < difference(stored, exact) < 0.5


def test_perplexities_stand_in_the_classic_order(
    base: Path, artifact: Artifact, windows: Windows, record_property: Callable[[str, object], None]
) -> None:
    def perplexity(model: PreTrainedModel) -> float:
        return float(perplexity_metrics(score_windows(model, windows.ids))["value"]["value"])

    recipes = ["rtn-int8", "rtn-int8-tensor", "rtn-g64-zp", "rtn-g64", "rtn-int4", "rtn-int4-tensor"]
    found = {recipe: perplexity(load_artifact(artifact(recipe))) for recipe in recipes}
    reference = perplexity(load_checkpoint(open_checkpoint(str(base))))
    for name, value in (found | {"float32": reference}).items():
        record_property(f"perplexity {name}", value)
    assert found["rtn-int8"] < found["rtn-int8-tensor"]
    assert found["rtn-g64-zp"] < found["rtn-g64"] < found["rtn-int4"]
    assert 10 * found["rtn-int4"] < found["rtn-int4-tensor"]
    assert reference < found["rtn-g64-zp"]
    assert found["rtn-int8"] < 1.02 * reference


def test_the_shipped_chat_set_fills_its_shares_with_the_markers_of_the_template(base: Path) -> None:
    tokenizer = open_checkpoint(str(base)).tokenizer()
    try:
        calibration = calibrate_from(load_set("chat"), tokenizer, 64, LENGTH)
    except TextError as error:
        pytest.skip(f"a text is not here: {error.problem}")
    assert calibration.ids.shape == (64, LENGTH)
    part = next(part for part in calibration.account["parts"] if "chat" in part)
    assert part["chat"]["template_sha256"] == sha256_bytes((base / "chat_template.jinja").read_bytes())
    marker = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chat = load_source("engineering-chat")
    assert isinstance(chat, Chat)
    text = render(chat, tokenizer)
    ids = tokenizer(text.joined, add_special_tokens=False)["input_ids"]
    assert ids.count(marker) == text.joined.count("<|im_start|>")


def test_the_base_does_a_task_that_two_bits_fail(
    base: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    source = open_checkpoint(str(base))
    recipe = load_recipe("rtn-g64", ["weights.bits=2"])
    convert(make_plan(source, recipe), tmp_path / "two")
    tasks = load_tasks([TaskEntry(name="quantkit_json_schema", limit=16)], source)
    valid = {}
    for name, model in (("base", load_checkpoint(source)), ("two bits", load_artifact(tmp_path / "two"))):
        outcome = run_tasks(model.eval(), source, source.tokenizer(), tasks)["quantkit_json_schema"]
        valid[name] = sum(outcome.items["valid"])
        record_property(f"valid entries of 16, {name}", valid[name])
    assert valid["base"] >= 8
    assert valid["two bits"] == 0


def test_answers_alone_and_in_a_padded_batch_are_those_of_transformers(base: Path) -> None:
    checkpoint = open_checkpoint(str(base))
    model, tokenizer = load_checkpoint(checkpoint), checkpoint.tokenizer()
    prompts = load_prompts("case-study", tokenizer, 2).items
    alone = [continue_alone(model, prompt.ids, 8, stop_tokens(checkpoint), keep_logits=True) for prompt in prompts]
    rechecks = continue_in_batch(model, [prompt.ids for prompt in prompts], alone)
    assert [row.choices for row in rechecks] == [run.tokens for run in alone]
    assert max(max(row.differences) for row in rechecks) < 1e-3
    tokenizer.padding_side = "left"
    asked = tokenizer.apply_chat_template(
        [[{"role": "user", "content": prompt.question}] for prompt in prompts],
        add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    theirs = AutoModelForCausalLM.from_pretrained(base).generate(**asked, max_new_tokens=8, do_sample=False)
    assert [row[asked["input_ids"].shape[1] :].tolist() for row in theirs] == [run.tokens for run in alone]
