"""Calibrated conversion on every architecture: better than rounding, same bytes, nothing silent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.artifact import verify
from quantkit.calibration import Calibration
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CalibrationError, NumericsError, SchemaError
from quantkit.evaluate.loader import load_artifact, load_checkpoint
from quantkit.manifest import Manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
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
    assert ((found - base).norm() / base.norm()).item() < (0.05 if recipe.endswith("w8a8") else 0.35)
    for layer in manifest.layers:
        assert layer.output_error is not None
        assert layer.tokens == IDS.numel()
        if "gptq" in recipe:
            assert layer.output_error.after < layer.output_error.before
    assert all(site.refused is None for site in manifest.fold_sites)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transforms_alone_leave_the_logits_unchanged(name: str, zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """Folds with hardly any rounding behind them: 8 bits in float32 scales, then judged against the folds left out."""
    exact = ["weights.bits=8", "weights.group_size=8", "weights.scale_dtype=float32", "passes=[rtn]"]
    folded = [*exact[:3], "passes=[awq, {smoothquant: {alpha: 0.5}}, rtn]"]
    _convert(zoo(name), tmp_path / "plain", "awq-gptq-g64", exact)
    _convert(zoo(name), tmp_path / "folded", "awq-gptq-g64", folded)
    with torch.no_grad():
        base = load_checkpoint(open_checkpoint(str(zoo(name))))(IDS[:2]).logits
        plain, scaled = (load_artifact(tmp_path / part)(IDS[:2]).logits for part in ("plain", "folded"))
    rounding = (plain - base).norm() / base.norm()
    assert (scaled - base).norm() / base.norm() < 2 * rounding + 1e-4


def test_two_runs_give_one_identity(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    first = _convert(zoo("llama"), tmp_path / "a", "awq-gptq-g64")
    second = _convert(zoo("llama"), tmp_path / "b", "awq-gptq-g64")
    assert first.identity == second.identity


def test_integer_products_agree_with_the_simulation_of_transformers(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """It divides a token's range by 127.5 where servers and we take 127, so codes may differ by one."""
    _convert(zoo("llama"), tmp_path / "a", "smoothquant-w8a8")
    with torch.no_grad():
        ours = load_artifact(tmp_path / "a")(IDS[:2]).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS[:2]).logits
        base = load_checkpoint(open_checkpoint(str(zoo("llama"))))(IDS[:2]).logits
    assert (ours - theirs).norm() < 1.5 * (ours - base).norm()
    assert (ours - theirs).norm() / base.norm() < 0.01


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
    with torch.no_grad():
        ours = load_artifact(tmp_path / "a")(IDS[:2]).logits
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(IDS[:2]).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
