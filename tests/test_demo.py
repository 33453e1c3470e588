"""The demo's base: the permutation moves the weights and not the function, with the axes that are shipped."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from quantkit.demo import Axis, DemoModel, base_checkpoint, load_demo, permute
from quantkit.errors import CheckpointError, TextError

IDS = torch.arange(3, 27).reshape(2, 12)


def tiny(**changes: int) -> PreTrainedModel:
    """A Llama with three query heads to a key-value head, whose sizes are all different."""
    values = {
        "vocab_size": 64, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.08,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        config = LlamaConfig(**values | changes, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # gains of one would not notice a shuffle
                parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def state_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As the packaged file gives it: tied tensors once."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def with_state(state: dict[str, torch.Tensor]) -> PreTrainedModel:
    model = tiny()
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return load_demo()


def test_the_shipped_permutation_preserves_the_function_under_grouped_query_attention(demo: DemoModel) -> None:
    model = tiny()
    permuted = permute(state_of(model), model.config, demo)
    assert (logits(with_state(permuted)) - logits(model)).abs().max() < 1e-4


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_shipped_axis_alone_preserves_the_function(axis: int, demo: DemoModel) -> None:
    model = tiny()
    alone = demo.model_copy(update={"axes": [demo.axes[axis]]})
    permuted = permute(state_of(model), model.config, alone)
    assert any(not torch.equal(permuted[name], tensor) for name, tensor in state_of(model).items())
    assert (logits(with_state(permuted)) - logits(model)).abs().max() < 1e-4


def test_every_matrix_of_the_blocks_is_shuffled_and_only_reordered(demo: DemoModel) -> None:
    state = state_of(tiny())
    permuted = permute(state, tiny().config, demo)
    assert permuted.keys() == state.keys()
    for name, tensor in state.items():
        assert not torch.equal(permuted[name], tensor), name
        assert torch.equal(permuted[name].flatten().sort().values, tensor.flatten().sort().values), name


def test_input_groups_of_every_linear_are_mixed(demo: DemoModel) -> None:
    """What the permutation is for: no group of neighbours of the packaged grid stays together."""
    model = tiny()
    state = {name: torch.zeros_like(tensor) for name, tensor in state_of(model).items()}
    matrices = [name for name in state if name.endswith("_proj.weight")]
    for name in matrices:
        state[name] += torch.arange(state[name].shape[1]) // 16
    permuted = permute(state, model.config, demo)
    for name in matrices:
        first = permuted[name][0].reshape(-1, 16)
        together = (first == first[:, :1]).all(1)
        # Value channels move inside their own head, so the groups of o_proj are heads and stay whole.
        assert together.all() if name.endswith("o_proj.weight") else not together.any(), name


def test_the_permutation_is_the_same_each_time_and_another_with_another_seed(demo: DemoModel) -> None:
    state, config = state_of(tiny()), tiny().config
    before = torch.get_rng_state()
    first, second = permute(state, config, demo), permute(state, config, demo)
    assert all(torch.equal(first[name], second[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), before)
    other = permute(state, config, demo.model_copy(update={"seed": demo.seed + 1}))
    assert any(not torch.equal(first[name], other[name]) for name in state)


def test_the_source_tensors_are_left_as_they_are(demo: DemoModel) -> None:
    state = state_of(tiny())
    before = {name: tensor.clone() for name, tensor in state.items()}
    permute(state, tiny().config, demo)
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_an_axis_of_the_wrong_size_names_the_tensor(demo: DemoModel) -> None:
    wrong = Axis(size="intermediate_size", per_block=False, along={r"model\.norm\.weight": 0})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not 160 wide"):
        permute(state_of(tiny()), tiny().config, demo.model_copy(update={"axes": [wrong]}))


def test_a_wrong_axis_would_be_seen(demo: DemoModel) -> None:
    """The check of the function is worth something: shuffling readers and not writers moves the logits."""
    hidden = demo.axes[0]
    along = {pattern: dimension for pattern, dimension in hidden.along.items() if "down_proj" not in pattern}
    broken = demo.model_copy(update={"axes": [hidden.model_copy(update={"along": along})]})
    model = tiny()
    permuted = permute(state_of(model), model.config, broken)
    assert (logits(with_state(permuted)) - logits(model)).abs().max() > 1e-2


def test_a_package_that_cannot_be_fetched_is_one_error_and_leaves_no_base(
    demo: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(_: object) -> Path:
        raise TextError("package x cannot be fetched (no network)", "check the network")

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.demo.package_file", offline)
    with pytest.raises(TextError, match="cannot be fetched"):
        base_checkpoint(demo)
    assert not list(tmp_path.rglob("config.json"))


def test_the_base_is_built_once_from_the_package_and_then_taken_from_the_cache(
    demo: DemoModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.zoo import byte_tokenizer

    model, fetched = tiny(), []

    def decoded(path: Path) -> tuple[object, dict[str, torch.Tensor], object]:
        fetched.append(path)
        return model.config, state_of(model), byte_tokenizer()

    monkeypatch.setenv("QUANTKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quantkit.demo.package_file", lambda _: tmp_path / "packaged.gguf")
    monkeypatch.setattr("quantkit.demo.load_gguf", decoded)
    base = base_checkpoint(demo)
    assert base_checkpoint(demo) == base
    assert len(fetched) == 1
    assert base.name == demo.name
    assert [path.name for path in base.parent.iterdir()] == [demo.name]
    assert json.loads((base / "config.json").read_bytes())["dtype"] == "float32"
    loaded = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(loaded) - logits(model)).abs().max() < 1e-4
    other = base_checkpoint(demo.model_copy(update={"seed": 1}))
    assert other != base
