"""Calibrated conversion on every architecture: better than rounding, same bytes, nothing silent."""

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from quantkit import blockwise
from quantkit.affine import dequantize
from quantkit.algorithms.awq import awq_scales
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.algorithms.smoothquant import fake_quantize_tokens, shared_max, smooth_scales
from quantkit.artifact import verify
from quantkit.blockwise import _reduced
from quantkit.calibration import Calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CalibrationError, CheckpointError, NumericsError, SchemaError
from quantkit.evaluate.loader import Int8Linear, load_artifact, load_checkpoint
from quantkit.fold import apply_fold, discover_fold_sites
from quantkit.formats.int_quantized import IntQuantized
from quantkit.live import LiveModel, batches
from quantkit.manifest import Manifest
from quantkit.passes import shared_mean
from quantkit.pipeline import convert
from quantkit.plan import Plan, make_plan
from quantkit.recipe import load_recipe
from quantkit.sequential import OutOfStepError, run_in_step
from quantkit.stats import collect
from quantkit.types import QuantScheme
from tests.zoo import ARCHITECTURES, save

IDS = torch.randint(3, 256, (12, 48), generator=torch.Generator().manual_seed(0))
CALIBRATION = Calibration(IDS, {"set": "random"})


def _convert(source: Path, output: Path, recipe: str, settings: list[str] | None = None) -> Manifest:
    plan = make_plan(open_checkpoint(str(source)), load_recipe(recipe, settings))
    return convert(plan, output, calibration=CALIBRATION).manifest


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recipe", ["gptq-g64", "awq-gptq-g64", "smoothquant-w8a8"])
def test_every_architecture_converts_verifies_and_loses_little(
    name: str, recipe: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    manifest = _convert(zoo(name), tmp_path / "a", recipe)
    assert verify(tmp_path / "a") == []
    with torch.no_grad():
        found = load_artifact(tmp_path / "a")(IDS[:2]).logits
        base = load_checkpoint(open_checkpoint(str(zoo(name))))(IDS[:2]).logits
    # A random router sits on the fence: the smallest rounding sends some tokens to other experts.
    limit = 0.05 if recipe.endswith("w8a8") and name != "mixtral" else 0.35
    assert ((found - base).norm() / base.norm()).item() < limit
    for layer in manifest.layers:
        assert layer.output_error is not None
        assert layer.tokens == IDS.numel()
        if recipe == "gptq-g64":  # by what the model feels, a layer's own error is not what falls
            assert layer.output_error.after < layer.output_error.before
    assert all(site.refused is None for site in manifest.fold_sites)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_learned_rounding_lowers_the_error_of_the_blocks_of_every_architecture(
    name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    plain = _convert(zoo(name), tmp_path / "plain", "gptq-g64", ["weights.bits=3"])
    passes = "passes=[gptq, {signround: {steps: 30}}]"
    learned = _convert(zoo(name), tmp_path / "learned", "gptq-g64", ["weights.bits=3", passes])
    assert verify(tmp_path / "learned") == []
    assert plain.totals.bits_per_weight == learned.totals.bits_per_weight
    # On the tokens of the calibration: whether it carries over is for the real model to show.
    with torch.no_grad():
        base = load_checkpoint(open_checkpoint(str(zoo(name))))(IDS).logits
        errors = [(load_artifact(tmp_path / kind)(IDS).logits - base).norm() for kind in ("plain", "learned")]
    assert errors[1] < errors[0] or not learned.layers  # a model of Conv1D stays as it is
    for layer in learned.layers:
        assert layer.passes == ["gptq", "signround"]
        assert any("signround: error of the block" in note for note in layer.notes)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transforms_without_rounding_leave_the_function_unchanged(name: str, zoo: Callable[[str], Path]) -> None:
    """Scales of AWQ and SmoothQuant, folded at every site of every block, against the blocks as they were."""
    live = LiveModel(open_checkpoint(str(zoo(name))))
    hidden = live.start(IDS[:3], short=IDS.shape[1])
    expected = hidden.clone()
    for index in range(len(live.blocks)):
        block = live.load(index)
        live.advance(index, expected)
        names = [part for part, _ in block.named_modules()]
        stats = {
            n: s.stats
            for s in collect(block, names, lambda x, i=index: live.run(i, x), batches(hidden))
            for n in s.names
        }
        for site in discover_fold_sites(block, lambda x, i=index: live.run(i, x), hidden[:1]):
            found = stats[site.consumers[0]]
            awq = awq_scales(shared_mean(found.act_mean, site.channel), 0.5)
            smooth = smooth_scales(shared_max(found.absmax, site.channel), torch.ones(len(site.channel)), 0.5)
            for scales in (awq, smooth):
                apply_fold(block, site, scales, torch.float32)
        live.advance(index, hidden)
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_searched_and_clipped_scales_beat_plain_ranges_where_calibrated(
    zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    for scales in ("searched", "clipped"):
        passes = f"passes=[{{rtn: {{scales: {scales}}}}}]"
        manifest = _convert(zoo("llama"), tmp_path / scales, "awq-g64", [passes, "weights.bits=3"])
        errors = [layer.output_error for layer in manifest.layers]
        assert all(error is not None and error.after < error.before for error in errors)


def test_two_runs_give_one_identity(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    first = _convert(zoo("llama"), tmp_path / "a", "awq-gptq-signround-g64")
    second = _convert(zoo("llama"), tmp_path / "b", "awq-gptq-signround-g64")
    assert first.identity == second.identity


def test_integer_products_agree_with_the_simulation_of_transformers(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """It divides a token's range by 127.5 where servers and we take 127, so codes may differ by one."""
    _convert(zoo("llama"), tmp_path / "a", "smoothquant-w8a8")
    with torch.no_grad():
        ours = load_artifact(tmp_path / "a")(IDS[:2]).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS[:2]).logits
        base = load_checkpoint(open_checkpoint(str(zoo("llama"))))(IDS[:2]).logits
    assert (ours - theirs).norm() < 1.5 * (ours - base).norm()


def test_integer_products_are_exact_up_to_the_last_float_product() -> None:
    generator = torch.Generator().manual_seed(4)
    weight, inputs = torch.randn(24, 40, generator=generator), torch.randn(2, 5, 40, generator=generator)
    scheme = QuantScheme(8, "channel", scale_dtype="float32")
    dense = torch.nn.Linear(40, 24)
    tensor = rtn_quantize(weight, scheme)
    linear = Int8Linear(IntQuantized().pack(tensor), IntQuantized(), scheme, dense, torch.float32)
    rounded = fake_quantize_tokens(inputs.reshape(-1, 40)).double()
    expected = rounded @ dequantize(tensor).double().T + dense.bias.double()
    torch.testing.assert_close(linear(inputs).reshape(-1, 24).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_site_with_an_unquantised_consumer_is_refused_and_counted(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    manifest = _convert(zoo("llama"), tmp_path / "a", "awq-gptq-g64", ["ignore=['re:.*down_proj$']"])
    refused = [site for site in manifest.fold_sites if site.refused]
    assert {site.producer for site in refused} == {f"model.layers.{n}.mlp.up_proj" for n in range(2)}
    assert [fallback.kind for fallback in manifest.fallbacks] == ["fold", "fold"]


def test_too_few_tokens_raise_damping_and_say_so(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("gptq-g64", ["passes=[{gptq: {damp: 1.0e-7}}]"]))
    few = Calibration(IDS[:1, :8], {"set": "few"})
    manifest = convert(plan, tmp_path / "a", calibration=few).manifest
    assert any(fallback.kind == "damping" for fallback in manifest.fallbacks)
    assert all(layer.damping is not None for layer in manifest.layers)


def test_a_calibrated_recipe_without_calibration_is_an_error(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("gptq-g64"))
    with pytest.raises(CalibrationError, match="pass --calib"):
        convert(plan, tmp_path / "a")
    with pytest.raises(SchemaError, match="needs a calibration set"):
        load_recipe("gptq-g64", ["calibration=null"])


def test_non_finite_activations_name_the_layer_and_leave_nothing(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "source")
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(3e38)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match=r"model\.layers\.1: calibration: the input of self_attn\.q_proj"):
        _convert(source, tmp_path / "a", "gptq-g64")
    assert not (tmp_path / "a").exists()


def test_mixed_precision_by_overrides_gives_each_layer_its_scheme(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    settings = [
        "overrides=[{match: 're:.*down_proj$', weights: {bits: 8, granularity: channel}},"
        " {match: lm_head, weights: {bits: 8, granularity: group, group_size: 32}}]",
        "ignore=[]",
    ]
    manifest = _convert(zoo("llama_untied"), tmp_path / "a", "gptq-g64", settings)
    schemes = {layer.name: layer.scheme.scheme.describe() for layer in manifest.layers}
    assert schemes["model.layers.0.mlp.down_proj"] == "int8 channel sym"
    assert schemes["model.layers.0.mlp.up_proj"] == "int4 g64 sym"
    assert schemes["lm_head"] == "int8 g32 sym"
    assert [(f.layer, f.kind) for f in manifest.fallbacks] == [("lm_head", "quantiser")]
    with torch.no_grad():
        ours = load_artifact(tmp_path / "a")(IDS[:2]).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS[:2]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_an_embedding_is_rounded_to_nearest_by_request_and_a_head_as_a_fallback(
    zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ["overrides=[{match: 're:(model.embed_tokens|lm_head)$', weights: {bits: 8, granularity: channel}}]"]
    manifest = _convert(zoo("llama_untied"), tmp_path / "a", "gptq-g64", [*settings, "ignore=[]"])
    plain = _convert(zoo("llama_untied"), tmp_path / "plain", "gptq-g64")
    assert [(f.layer, f.kind) for f in manifest.fallbacks] == [("lm_head", "quantiser")]
    table = next(layer for layer in manifest.layers if layer.name == "model.embed_tokens")
    assert (table.passes, table.tokens, table.output_error, table.fallback) == (["rtn"], None, None, None)
    source = load_file(zoo("llama_untied") / "model.safetensors")["model.embed_tokens.weight"]
    nearest = rtn_quantize(source, table.scheme.scheme)
    stored = load_file(tmp_path / "a" / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], (nearest.codes.int() - 128).to(torch.int8))
    assert torch.equal(stored["model.embed_tokens.weight_scale"], nearest.scales)
    # Calibration runs on the embedding of the source: the blocks are those of the recipe without the overrides.
    blocks = [layer for layer in manifest.layers if layer.name not in {"model.embed_tokens", "lm_head"}]
    assert blocks == plain.layers


@pytest.mark.parametrize("name", ["llama_untied", "neox"])
def test_the_mixed_recipe_converts_verifies_and_loads_in_transformers(
    name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    manifest = _convert(zoo(name), tmp_path / "a", "awq-g128-mixed")
    assert verify(tmp_path / "a") == []
    assert manifest.readers["transformers"] == "yes"
    eights = [layer for layer in manifest.layers if layer.scheme.bits == 8]
    assert len(eights) == 2
    assert {layer.shape for layer in eights} == {(256, 64)}
    # The width of 64 takes the first group size that divides it.
    assert {f.kind for f in manifest.fallbacks} == {"group_size", "quantiser"}
    with torch.no_grad():
        ours = load_artifact(tmp_path / "a")(IDS[:2]).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS[:2]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


class _PartlyExact(nn.Module):
    """A block with a linear that the model runs in float32 whatever autocast says, as some routers."""

    def __init__(self) -> None:
        super().__init__()
        self.reduced, self.exact = nn.Linear(48, 32), nn.Linear(32, 16)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        value = self.reduced(value)
        with torch.autocast("cpu", enabled=False):
            return self.exact(value.float())


@torch.no_grad()
def test_a_block_in_bfloat16_does_to_the_bit_what_autocast_does_and_is_left_as_it_was() -> None:
    block, value = _PartlyExact(), torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = block(value)
    with _reduced(block, wanted=True):
        assert torch.equal(block(value), expected)
    exact = block(value)
    assert not torch.equal(exact, expected)
    with _reduced(block, wanted=False):
        assert torch.equal(block(value), exact)
    assert all("forward" not in vars(module) for module in block.modules())


def test_samples_that_break_step_leave_the_bytes_of_two_forwards(
    zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[int] = []

    def breaks(block: nn.Module, order: Any, run: Any, samples: Any, reached: Any, witness: Any) -> None:
        def some(parts: tuple[str, ...], inputs: Any) -> None:
            reached(parts, inputs)
            if parts == order[1]:
                broken.append(1)
                raise OutOfStepError

        run_in_step(block, order, run, samples, some, witness)

    one = _convert(zoo("llama"), tmp_path / "one", "gptq-g64")
    with monkeypatch.context() as patched:
        patched.setattr(blockwise, "run_in_step", breaks)
        two = _convert(zoo("llama"), tmp_path / "broken", "gptq-g64")
    monkeypatch.setattr(blockwise, "_LARGEST_HELD", 0)
    assert len(broken) == 2
    assert two == _convert(zoo("llama"), tmp_path / "two", "gptq-g64")
    assert two != one


@pytest.mark.parametrize("recipe", ["gptq-g64", "awq-g64", "smoothquant-w8a8"])
def test_arguments_by_name_and_results_written_into_the_input_change_no_byte(
    recipe: str, zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _convert(zoo("llama"), tmp_path / "plain", recipe)
    forward = LlamaDecoderLayer.forward

    def by_name(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = mlp.down_proj(input=mlp.act_fn(mlp.gate_proj(input=x)) * mlp.up_proj(input=x))
        return inner

    def in_place(layer: Any, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return hidden_states.copy_(forward(layer, hidden_states, *others, **named))

    monkeypatch.setattr(LlamaMLP, "forward", by_name)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", in_place)
    assert _convert(zoo("llama"), tmp_path / "odd", recipe) == plain
    with torch.no_grad():
        found = load_artifact(tmp_path / "odd")(IDS[:2]).logits
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(load_artifact(tmp_path / "plain")(IDS[:2]).logits, found)


@pytest.mark.parametrize("recipe", ["gptq-g64", "awq-g64", "smoothquant-w8a8"])
def test_linears_that_read_one_place_before_and_after_a_write_share_no_statistics(
    recipe: str, zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post_norm(layer: Any, hidden_states: torch.Tensor, *, add: Any, **named: Any) -> torch.Tensor:
        mixed, _ = layer.self_attn(hidden_states=hidden_states, **named)
        hidden_states = add(hidden_states, layer.input_layernorm(mixed))
        found: torch.Tensor = add(hidden_states, layer.post_attention_layernorm(layer.mlp(hidden_states)))
        return found

    manifests = []
    for name, add in (("apart", torch.add), ("in-place", torch.Tensor.add_)):
        monkeypatch.setattr(LlamaDecoderLayer, "forward", partialmethod(post_norm, add=add))
        manifests.append(_convert(zoo("llama"), tmp_path / name, recipe))
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("recipe", ["gptq-g64", "gptq-w8a8"])
def test_one_forward_hands_on_what_the_quantised_block_puts_out(
    recipe: str, zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, blocks = blockwise._quantise_in_step, []

    def checked(plan: Plan, work: Any, reduced: Any, run: Any, hidden: torch.Tensor) -> Any:
        before = hidden.clone()
        chosen = real(plan, work, reduced, run, hidden)
        with reduced(), blockwise._rounded_inputs(work.module, work.layers, plan.recipe.activations is not None):
            expected = [run(part) for part in batches(before)]
        assert torch.equal(torch.cat(expected), hidden)
        blocks.append(chosen)
        return chosen

    monkeypatch.setattr(blockwise, "_quantise_in_step", checked)
    _convert(zoo("llama"), tmp_path / "a", recipe, ["passes=[gptq]"])
    assert len(blocks) == 2
    assert None not in blocks


@pytest.mark.parametrize("recipe", ["gptq-g64", "awq-gptq-g64"])
def test_rows_quantised_in_pieces_lose_what_all_rows_at_once_lose(
    recipe: str, zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _convert(zoo("llama"), tmp_path / "whole", recipe)
    monkeypatch.setattr(blockwise, "_PIECE_ROWS", 40)
    pieces = _convert(zoo("llama"), tmp_path / "pieces", recipe)
    assert verify(tmp_path / "pieces") == []
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        assert one.output_error is not None
        assert other.output_error is not None
        assert other.output_error.after == pytest.approx(one.output_error.after, rel=0.02)


@pytest.mark.parametrize("recipe", ["gptq-g64", "awq-gptq-g64", "awq-gptq-signround-g64"])
def test_errors_are_measured_in_float32_where_a_block_runs_in_bfloat16(
    recipe: str, zoo: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, reduced = blockwise._squared, []
    monkeypatch.setattr(
        blockwise, "_squared", lambda *given: reduced.append(torch.is_autocast_enabled("cpu")) or real(*given)
    )
    _convert(zoo("llama"), tmp_path / "a", recipe, ["calibration.dtype=bfloat16"])
    assert len(reduced) > 14
    assert not any(reduced)


_BY_LOSS = "passes=[{awq: {n_grid: 4}}, {gptq: {objective: model}}]"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_the_loss_feels_is_of_use_on_every_architecture(
    name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ["weights.bits=3", "calibration.dtype=float32"]
    alone = _convert(zoo(name), tmp_path / "alone", "awq-gptq-g64", [*settings, "passes=[{awq: {n_grid: 4}}, gptq]"])
    felt = _convert(zoo(name), tmp_path / "felt", "awq-gptq-g64", [*settings, _BY_LOSS])
    assert verify(tmp_path / "felt") == []
    assert felt.totals.bits_per_weight == alone.totals.bits_per_weight
    assert _convert(zoo(name), tmp_path / "again", "awq-gptq-g64", [*settings, _BY_LOSS]) == felt
    # On the tokens of the calibration, with some leeway: random weights say little; docs/quality.md has real ones.
    with torch.no_grad():
        base = load_checkpoint(open_checkpoint(str(zoo(name))))(IDS).logits.log_softmax(-1)
        kl = {
            kind: (base.exp() * (base - load_artifact(tmp_path / kind)(IDS).logits.log_softmax(-1))).sum(-1).mean()
            for kind in ("alone", "felt")
        }
    assert kl["felt"] < 1.05 * kl["alone"] or not felt.layers  # a model of Conv1D stays as it is


@pytest.mark.parametrize("weights", ["{bits: 4, granularity: channel}", "{bits: 8, granularity: tensor}"])
def test_what_the_loss_feels_goes_with_every_granularity(
    weights: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = [f"weights={weights}", "passes=[{gptq: {objective: model}}]", "group_fallback=[]"]
    assert _convert(zoo("llama"), tmp_path / "a", "gptq-g64", settings).layers
    assert verify(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        ("awq-gptq-signround-g64", [], r"model.layers.0: signround cannot train this block: .*inplace.*leave"),
        ("awq-gptq-g64", [], r"model.layers.1: no gradient passes this block: .*inplace.*; give .* objective: layer"),
    ],
)
def test_a_block_without_gradient_is_one_line_that_names_it(
    recipe: str,
    settings: list[str],
    message: str,
    zoo: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: forward(mlp, x) + mlp.gate_proj(x).exp_().sigmoid_().sum())
    with pytest.raises(CheckpointError, match=message):
        _convert(zoo("llama"), tmp_path / "a", recipe, settings)
