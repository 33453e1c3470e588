"""What quantkit measures is what a formula, the model in memory and lm-eval find: nothing here asks quantkit twice."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from quantkit.affine import dequantize
from quantkit.algorithms.smoothquant import token_codes
from quantkit.calibration import Calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.data import data_dir, shipped_names
from quantkit.evaluate import tasks as evaluated_tasks
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.evaluate.run import evaluate
from quantkit.evaluate.suite import Suite, TaskEntry
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.sink import Sink
from quantkit.tensorfile import TensorEntry
from quantkit.types import QuantizedTensor
from tests.zoo import byte_tokenizer

BOS = 1  # of the byte tokenizer


def save(config: PretrainedConfig, directory: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    """A random float32 checkpoint of `config`; its tokenizer has one token a byte where none is given."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    return directory


# A closed form: the next token depends on the last one only

DOCUMENTS = ["The valve opens at 3.5 MPa. " * 9, "a", "安全阀在 3.5 兆帕时打开。" * 5, "EV-0142 supports the claim."]


def bigram(directory: Path, seed: int) -> np.ndarray[Any, Any]:
    """Write a Llama whose logits are a table's row of the last token; returns the table's log-probabilities, float64.

    Attention and feed-forward put out zero, and the norm makes 16 times the one-hot embedding of it, exactly.
    """
    table = 2 * torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))
    save(
        LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            max_position_embeddings=128, rms_norm_eps=0.0, tie_word_embeddings=False,
        ),
        directory,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(256))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(table.T / 16)
    model.save_pretrained(directory)
    return torch.log_softmax(table.double(), -1).numpy()


def pairs(text: str, windows: int, length: int, bos: str) -> list[tuple[int, int]]:
    """Every scored (last, next) byte: the windows cut by hand, no pair over the edge of two."""
    data, start = list(text.encode()), [BOS] if bos == "window" else []
    size = length - len(start)
    cut = [start + data[size * n : size * (n + 1)] for n in range(windows)]
    assert all(len(window) == length for window in cut)
    return [pair for window in cut for pair in pairwise(window)]


@pytest.mark.parametrize("bos", ["none", "window"])
@pytest.mark.parametrize(("windows", "length"), [(1, 2), (1, 100), (7, 40), (3, 127)])
def test_a_bigram_model_has_the_perplexity_and_divergence_of_the_formula(
    windows: int, length: int, bos: str, tmp_path: Path
) -> None:
    log_q, log_p = bigram(tmp_path / "model", 0), bigram(tmp_path / "other", 1)
    lines, plain = tmp_path / "lines.jsonl", tmp_path / "plain.txt"
    lines.write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    plain.write_text("Another text, of another length. " * 30)
    corpora = [{"text": str(path), "windows": windows, "length": length} for path in (lines, plain)]
    suite = Suite(name="s", bos=bos, perplexity=corpora, fidelity=corpora[0])  # type: ignore[arg-type]
    metrics = evaluate(str(tmp_path / "model"), suite, reference=str(tmp_path / "other")).metrics
    joined = "\n\n".join(document.strip() for document in DOCUMENTS)
    for path, text in ((lines, joined), (plain, plain.read_text().strip())):
        scored = pairs(text, windows, length, bos)
        own, base = (-np.mean([table[pair] for pair in scored]) for table in (log_q, log_p))
        found = metrics["perplexity"][str(path)]
        assert found["tokens"] == len(scored) == windows * (length - 1)
        assert found["value"]["value"] == pytest.approx(math.exp(own), rel=1e-6)
        assert found["reference"]["value"] == pytest.approx(math.exp(base), rel=1e-6)
        assert found["ratio"]["value"] == pytest.approx(math.exp(own - base), rel=1e-6)
    last = [first for first, _ in pairs(joined, windows, length, bos)]
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1)[last]
    assert metrics["fidelity"]["kl_mean"]["value"] == pytest.approx(divergence.mean(), rel=1e-5)
    assert metrics["fidelity"]["kl_p99"]["value"] == pytest.approx(np.quantile(divergence, 0.99), rel=1e-5)
    agree = (log_p.argmax(-1) == log_q.argmax(-1))[last]
    assert metrics["fidelity"]["top1"]["value"] == pytest.approx(agree.mean())


def test_text_beyond_the_last_window_changes_no_number(tmp_path: Path) -> None:
    log_q = bigram(tmp_path / "model", 0)
    text = tmp_path / "text.txt"
    found = []
    for tail in ("", "x" * 39, "安全阀" * 4):
        text.write_text("The valve opens at 3.5 MPa. " * 3 + tail)
        suite = Suite(name="s", perplexity=[{"text": str(text), "windows": 2, "length": 40}])
        found.append(evaluate(str(tmp_path / "model"), suite).metrics["perplexity"][str(text)]["value"])
    assert found[0] == found[1] == found[2]
    scored = pairs(text.read_text(), 2, 40, "none")
    assert found[0]["value"] == pytest.approx(math.exp(-np.mean([log_q[pair] for pair in scored])), rel=1e-6)


# The model in memory: the codes that the quantiser chose, in the source's own modules, never written or packed

COMMON = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
          "num_attention_heads": 4, "max_position_embeddings": 2048, "initializer_range": 0.08,
          "tie_word_embeddings": False}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=2),
    "neox": lambda: GPTNeoXConfig(**COMMON),
}
IDS = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))
CALIBRATION = Calibration(torch.randint(3, 256, (2, 32), generator=torch.Generator().manual_seed(1)), {"set": "random"})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of an architecture, written once. Tests must not change it."""
    root = tmp_path_factory.mktemp("sources")

    def path(name: str) -> Path:
        directory = root / name
        return directory if directory.is_dir() else save(CONFIGS[name](), directory)

    return path


class IntegerLinear(torch.nn.Module):
    """A linear of int8 codes and int8 inputs, in int64."""

    def __init__(self, tensor: QuantizedTensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes, self.scales, self.bias = tensor.codes.long() - 128, tensor.scales.float(), bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        codes, steps = token_codes(inputs.reshape(-1, inputs.shape[-1]))
        outputs = (codes.long() @ self.codes.T).float() * steps * self.scales.T
        return (outputs if self.bias is None else outputs + self.bias).reshape(*inputs.shape[:-1], -1)


def in_memory(
    checkpoint: Path, output: Path, recipe: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> PreTrainedModel:
    """Convert, and put what the passes decided into the float model of the source."""
    chosen: dict[str, QuantizedTensor] = {}
    folded: dict[str, torch.Tensor] = {}
    layer, changed = Sink.layer, Sink.changed

    def take_layer(self: Sink, into: Any, weight: torch.Tensor, picked: Any, *rest: Any) -> Any:
        chosen[into.module] = picked.tensor
        return layer(self, into, weight, picked, *rest)

    def take_changed(self: Sink, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        folded[entry.name] = changed(self, entry, tensor)
        return folded[entry.name]

    monkeypatch.setattr(Sink, "layer", take_layer)
    monkeypatch.setattr(Sink, "changed", take_changed)
    plan = make_plan(open_checkpoint(str(checkpoint)), load_recipe(recipe, settings))
    convert(plan, output, calibration=CALIBRATION)
    model = load_checkpoint(open_checkpoint(str(checkpoint)))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in folded.items():
            parameters[name].copy_(tensor)
        for name, tensor in chosen.items():
            if plan.recipe.activations is None:
                parameters[f"{name}.weight"].copy_(dequantize(tensor, torch.float32, torch.float32))
            else:
                parent, _, leaf = name.rpartition(".")
                bias = parameters.get(f"{name}.bias")
                setattr(model.get_submodule(parent), leaf, IntegerLinear(tensor, bias))
    assert len(chosen) == len(read_manifest(output).layers) > 0
    return model.eval()


def quick(recipe: str) -> list[str]:
    """The recipe's passes with few steps: what is compared is what they hand on, not how well they choose."""
    few = {"awq": {"n_grid": 2}, "signround": {"steps": 2}}
    passes = [{name: few.get(name, options)} for name, options in load_recipe(recipe).steps]
    return [f"passes={json.dumps(passes)}"]


NARROW = ["weights.bits=3", "weights.group_size=32"]
SCHEMES = [
    *[(name, quick(name)) for name in shipped_names("recipes")],
    ("rtn-g64", NARROW),
    ("rtn-g64-zp", NARROW),
    ("rtn-g64", ["weights.bits=2"]),
    ("rtn-g64-zp", ["weights.bits=8"]),
    ("awq-g128-mixed", ["format=compressed-tensors-packed", *quick("awq-g128-mixed")]),
]
# The second architecture skips recipes that differ from others in their passes alone.
CASES = [
    (name, recipe, settings)
    for name in CONFIGS
    for recipe, settings in SCHEMES
    if name == "llama" or "awq" not in recipe or "mixed" in recipe
]


@pytest.mark.parametrize(
    ("name", "recipe", "settings"), CASES, ids=[f"{n} {case[0]} {case[1]}" for n, case in enumerate(CASES)]
)
def test_the_reloaded_file_has_the_logits_of_the_model_in_memory_to_the_bit(
    name: str, recipe: str, settings: list[str], source: Callable[[str], Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = in_memory(source(name), tmp_path / "artifact", recipe, settings, monkeypatch)
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        found = load_artifact(tmp_path / "artifact")(input_ids=IDS, use_cache=False).logits
        base = load_checkpoint(open_checkpoint(str(source(name))))(input_ids=IDS, use_cache=False).logits
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert not torch.equal(found, base)


# lm-eval's own model of the same directory

TEXTS = [
    "The valve opens at 3.5 MPa, and the bursting disc holds above it. " * 3,
    "安全阀在 3.5 兆帕时打开，爆破片在其上保持。 " * 4,
    "Evidence EV-0142 supports the claim.",
]
ROLLING = """
task: own_rolling
custom_dataset: !function data.load
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
LOAD = """
import datasets

def load(**_):
    return {"test": datasets.Dataset.from_list([{"text": text} for text in %r])}
"""


def merged_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens of one byte or several, so that tokens, words and bytes are three different counts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", ["checkpoint", "artifact"])
def test_token_word_and_byte_perplexity_are_those_of_lm_eval(kind: str, tmp_path: Path) -> None:
    """One window a document behind a BOS, as lm-eval scores a document that its context holds."""
    directory = save(LlamaConfig(**COMMON | {"vocab_size": 320}), tmp_path / "checkpoint", merged_tokenizer())
    if kind == "artifact":
        convert(make_plan(open_checkpoint(str(directory)), load_recipe("rtn-g64")), tmp_path / "artifact")
        directory = tmp_path / "artifact"
    documents = [text.strip() for text in TEXTS]
    (tmp_path / "data.py").write_text(LOAD % documents)
    (tmp_path / "rolling.yaml").write_text(ROLLING)
    peer = HFLM(pretrained=str(directory), dtype="float32", device="cpu", batch_size=1)
    counts = [len(peer.tok_encode(document)) for document in documents]
    assert all(count < len(text.encode()) for count, text in zip(counts, documents, strict=True))
    corpora = []
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document)
        corpora.append({"text": str(tmp_path / f"{number}.txt"), "windows": 1, "length": counts[number] + 1})
    task = str(tmp_path / "rolling.yaml")
    metrics = evaluate(str(directory), Suite(name="s", bos="window", perplexity=corpora, tasks=[task])).metrics

    asked = [Instance("loglikelihood_rolling", {}, (document,), n) for n, document in enumerate(documents)]
    losses = [-score for score in peer.loglikelihood_rolling(asked, disable_tqdm=True)]
    for corpus, loss, count in zip(corpora, losses, counts, strict=True):
        found = metrics["perplexity"][corpus["text"]]
        assert found["tokens"] == count
        assert found["value"]["value"] == pytest.approx(math.exp(loss / count), rel=1e-5)

    results = simple_evaluate(model=peer, tasks=[task], bootstrap_iters=0,
                              task_manager=TaskManager(include_defaults=False))["results"]["own_rolling"]  # fmt: skip
    tokens = [metrics["perplexity"][corpus["text"]] for corpus in corpora]
    total = sum(found["tokens"] * math.log(found["value"]["value"]) for found in tokens)
    words, size = sum(len(text.split()) for text in documents), sum(len(text.encode()) for text in documents)
    by_hand = {
        "word_perplexity": math.exp(total / words),
        "byte_perplexity": math.exp(total / size),
        "bits_per_byte": total / size / math.log(2),
    }
    for name, value in by_hand.items():
        assert results[f"{name},none"] == pytest.approx(value, rel=1e-4)
        assert metrics["tasks"]["own_rolling"][name]["value"]["value"] == pytest.approx(
            results[f"{name},none"], rel=1e-5
        )


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(("recipe", "arithmetic"), [("rtn-g128", "exact"), ("rtn-g64-zp", "stored")])
def test_lm_evals_own_model_answers_every_item_of_a_shipped_task_alike(
    recipe: str, arithmetic: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zero-points in the arithmetic of transformers, which decodes them in the dtype of their scales."""
    convert(make_plan(open_checkpoint(str(source("llama"))), load_recipe(recipe)), tmp_path / "artifact")
    answered: dict[str, list[dict[str, Any]]] = {}
    ask = evaluated_tasks.evaluate

    def recorded(*arguments: Any, **options: Any) -> Any:
        results = ask(*arguments, **options)
        answered.update(results["samples"])
        return results

    monkeypatch.setattr(evaluated_tasks, "evaluate", recorded)
    artifact = open_checkpoint(str(tmp_path / "artifact"))
    entries = [TaskEntry(name="quantkit_passage_choice", limit=12), TaskEntry(name="quantkit_evidence_copy", limit=3)]
    loaded = evaluated_tasks.load_tasks(entries, artifact)
    model = load_artifact(tmp_path / "artifact", arithmetic=arithmetic)
    own = evaluated_tasks.run_tasks(model, artifact, artifact.tokenizer(), loaded)
    for task in loaded:
        peer = simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tmp_path / "artifact"), "dtype": "float32"},
            tasks=[task.name],
            limit=task.limit,
            batch_size=task.batch,
            device="cpu",
            bootstrap_iters=0,
            task_manager=TaskManager(include_path=str(data_dir("evals") / "tasks"), include_defaults=False),
        )
        theirs = peer["samples"][task.name]
        assert len(theirs) == len(own[task.name].documents) == task.limit
        for metric, items in own[task.name].items.items():
            assert items == [sample[metric] for sample in theirs]
        for ours, other in zip(answered[task.name], theirs, strict=True):
            assert ours["doc"] == other["doc"]
            if task.name == "quantkit_passage_choice":
                scores = [[score for score, _ in sample["filtered_resps"]] for sample in (ours, other)]
                assert scores[0] == pytest.approx(scores[1], rel=1e-5)
            else:
                assert ours["filtered_resps"] == other["filtered_resps"]
                assert ours["filtered_resps"] != [""]
    choice = own["quantkit_passage_choice"]
    assert set(choice.items["acc"]) == {0, 1}, "the case should have right and wrong answers"
