"""Recipes: what a recipe may say, what --set changes, and that every shipped one is sound."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from quantkit.data import data_dir, shipped_names
from quantkit.errors import QuantkitError, RecipeError, SchemaError
from quantkit.recipe import Recipe, WeightFormat, load_recipe, matches
from quantkit.types import QuantScheme

# What docs and scripts name; each must stay shipped.
RTN = ["rtn-int8-tensor", "rtn-int8", "rtn-int4", "rtn-g64", "rtn-g64-zp", "rtn-g128", "rtn-g128-zp"]

BASE: dict[str, Any] = {
    "name": "own",
    "description": "for tests",
    "weights": {"bits": 4, "granularity": "group", "group_size": 64},
    "passes": ["rtn"],
}


def load(tmp_path: Path, changes: dict[str, Any] | None = None, settings: list[str] | None = None) -> Recipe:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**BASE, **(changes or {})}))
    return load_recipe(str(path), settings)


def refused(tmp_path: Path, changes: dict[str, Any], *words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        load(tmp_path, changes)
    for word in ("recipe own.yaml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_every_shipped_recipe_loads_and_carries_the_name_of_its_file(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.description) > 20
    assert recipe.steps


def test_the_recipes_of_the_contract_are_shipped() -> None:
    assert set(RTN) <= set(shipped_names("recipes"))
    assert all(load_recipe(name).steps == [("rtn", {})] for name in RTN)


@pytest.mark.parametrize(
    ("name", "bits", "granularity", "group_size", "symmetric"),
    [
        ("rtn-int8-tensor", 8, "tensor", None, True),
        ("rtn-int8", 8, "channel", None, True),
        ("rtn-int4", 4, "channel", None, True),
        ("rtn-g64", 4, "group", 64, True),
        ("rtn-g64-zp", 4, "group", 64, False),
        ("rtn-g128", 4, "group", 128, True),
        ("rtn-g128-zp", 4, "group", 128, False),
    ],
)
def test_shipped_formats_are_what_their_names_say(
    name: str, bits: int, granularity: str, group_size: int | None, symmetric: bool
) -> None:
    weights = load_recipe(name).weights
    assert (weights.bits, weights.granularity, weights.group_size, weights.symmetric) == (
        bits,
        granularity,
        group_size,
        symmetric,
    )


def test_every_shipped_recipe_keeps_the_head_or_names_its_format() -> None:
    for name in shipped_names("recipes"):
        recipe = load_recipe(name)
        named = [override for override in recipe.overrides if matches(override.match, "lm_head")]
        assert ("lm_head" in recipe.ignore) != bool(named), name


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("model.embed_tokens", 8),
        ("transformer.wte", 8),
        ("transformer.word_embeddings", 8),
        ("gpt_neox.embed_in", 8),
        ("wte", 8),
        ("lm_head", 8),
        ("embed_out", 8),
        ("language_model.lm_head", 8),
        ("model.embed_tokens_per_layer", None),
        ("transformer.wpe", None),
        ("model.layers.0.mlp.up_proj", None),
    ],
)
def test_the_mixed_recipe_names_token_tables_and_heads_and_nothing_else(name: str, bits: int | None) -> None:
    recipe = load_recipe("awq-g128-mixed")
    found = [override.weights for override in recipe.overrides if matches(override.match, name)]
    assert [weights and (weights.bits, weights.group_size, weights.symmetric) for weights in found] == (
        [(bits, 128, True)] if bits else []
    )
    assert (recipe.weights.bits, recipe.weights.group_size, recipe.weights.symmetric) == (4, 128, True)
    assert (recipe.steps, recipe.calibration) == (load_recipe("awq-g128").steps, load_recipe("awq-g128").calibration)


def test_a_recipe_by_path_equals_the_one_by_name() -> None:
    assert load_recipe(str(data_dir("recipes") / "rtn-g64.yaml")) == load_recipe("rtn-g64")


@pytest.mark.parametrize(
    ("changes", "key", "near"),
    [
        ({"wieghts": {}}, "wieghts", "weights"),
        ({"weights": {**BASE["weights"], "symetric": True}}, "weights.symetric", "symmetric"),
        ({"group_fallbacks": [32]}, "group_fallbacks", "group_fallback"),
        ({"overrides": [{"pattern": "x", "weights": None}]}, "overrides.0.pattern", ""),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, changes: dict[str, Any], key: str, near: str) -> None:
    refused(tmp_path, changes, f"unknown key {key!r}", near)


@pytest.mark.parametrize("key", ["name", "description", "weights", "passes"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in BASE.items() if k != key}))
    with pytest.raises(SchemaError, match=f"{key}: Field required"):
        load_recipe(str(path))


@pytest.mark.parametrize("bits", [0, 1, 5, 6, 7, 16, "4", 4.5, True])
def test_bits_that_the_format_does_not_hold_are_refused(tmp_path: Path, bits: Any) -> None:
    refused(tmp_path, {"weights": {**BASE["weights"], "bits": bits}}, "weights.bits")


@pytest.mark.parametrize(
    "weights",
    [
        {"bits": 4, "granularity": "group"},
        {"bits": 4, "granularity": "channel", "group_size": 64},
        {"bits": 4, "granularity": "tensor", "group_size": 64},
    ],
)
def test_group_size_belongs_to_groups_only(tmp_path: Path, weights: dict[str, Any]) -> None:
    refused(tmp_path, {"weights": weights}, "group_size belongs to granularity 'group'")


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        ({"bits": 4, "granularity": "row"}, "weights.granularity"),
        ({"bits": 4, "granularity": "group", "group_size": 0}, "weights.group_size"),
        ({"bits": 4, "granularity": "group", "group_size": -1}, "weights.group_size"),
        ({"bits": 8, "granularity": "channel", "type": "float"}, "weights.type"),
        ({"bits": 8, "granularity": "channel", "scale_dtype": "float8"}, "weights.scale_dtype"),
        ({"bits": 8, "granularity": "channel", "symmetric": 1}, "weights.symmetric"),
    ],
)
def test_a_wrong_value_of_the_format_names_its_key(tmp_path: Path, weights: dict[str, Any], key: str) -> None:
    refused(tmp_path, {"weights": weights}, key)


@pytest.mark.parametrize(
    ("passes", "words"),
    [
        ([], "passes"),
        (["rtn", "rtn"], "needs exactly one quantiser"),
        (["rtn", "gptq"], "found rtn and gptq"),
        (["rtm"], "unknown pass 'rtm'"),
        (["rtn", "nothing"], "unknown pass 'nothing'"),
        ([{"rtn": {"n_grid": 20}}], "rtn: n_grid"),
        ([{"rtn": 3}], "passes"),
        ("rtn", "passes"),
        ([3], "passes"),
    ],
    ids=str,
)
def test_passes_are_transforms_and_then_exactly_one_quantiser(tmp_path: Path, passes: Any, words: str) -> None:
    refused(tmp_path, {"passes": passes}, words)


def test_transforms_alone_have_no_quantiser_and_may_not_follow_one(tmp_path: Path) -> None:
    calibration = {"set": "default", "samples": 4, "sequence_length": 32}
    refused(tmp_path, {"passes": ["awq"], "calibration": calibration}, "found none")
    refused(tmp_path, {"passes": ["rtn", "awq"], "calibration": calibration}, "'awq' stands after the quantiser 'rtn'")
    refused(
        tmp_path, {"passes": ["signround", "rtn"], "calibration": calibration}, "'signround' refines codes and stands"
    )
    integers = {"weights": {"bits": 8, "granularity": "channel"}, "activations": {}, "calibration": calibration}
    refused(tmp_path, integers | {"passes": ["rtn", "signround"]}, "refines weights of float activations only")


def test_calibrated_passes_need_a_calibration_set(tmp_path: Path) -> None:
    refused(tmp_path, {"passes": ["awq", "rtn"]}, "calibration", "needs a calibration set")
    assert not load(tmp_path).calibrated


def test_options_of_a_pass_may_be_empty(tmp_path: Path) -> None:
    assert load(tmp_path, {"passes": [{"rtn": None}]}).steps == [("rtn", {})]
    assert load(tmp_path, {"passes": [{"rtn": {}}]}).steps == [("rtn", {})]


@pytest.mark.parametrize("pattern", ["re:(", "re:[a", "re:*x", ""])
def test_patterns_that_do_not_compile_are_refused(tmp_path: Path, pattern: str) -> None:
    refused(tmp_path, {"ignore": ["lm_head", pattern]}, "ignore")
    refused(tmp_path, {"overrides": [{"match": pattern, "weights": None}]}, "overrides.0.match")


def test_an_unknown_output_format_lists_the_known_ones(tmp_path: Path) -> None:
    refused(tmp_path, {"format": "gguf"}, "unknown format 'gguf'", "compressed-tensors")


@pytest.mark.parametrize("fallback", [[0], [-1], ["32"], 32, [1.5]])
def test_group_fallbacks_are_positive_whole_numbers(tmp_path: Path, fallback: Any) -> None:
    refused(tmp_path, {"group_fallback": fallback}, "group_fallback")


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "a/b"])
def test_a_name_that_cannot_be_part_of_a_path_is_refused(tmp_path: Path, name: str) -> None:
    refused(tmp_path, {"name": name}, "name")


def test_an_empty_or_foreign_document_is_refused(tmp_path: Path) -> None:
    for text in ("", "- a", "text", "3"):
        (tmp_path / "own.yaml").write_text(text)
        with pytest.raises(SchemaError, match=r"recipe own\.yaml"):
            load_recipe(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("model.layers.1", "model.layers.1.mlp", False),
        ("re:.*down_proj$", "model.layers.1.mlp.down_proj", True),
        ("re:.*down_proj$", "model.layers.1.mlp.down_proj2", False),
        ("re:mlp", "model.mlp", False),
        ("re:model", "model.mlp", True),
    ],
)
def test_names_match_exactly_and_patterns_from_the_start(pattern: str, name: str, fits: bool) -> None:
    assert matches(pattern, name) is fits


@pytest.mark.parametrize(
    ("setting", "read"),
    [
        ("weights.group_size=32", lambda r: r.weights.group_size == 32),
        ("weights.symmetric=false", lambda r: r.weights.symmetric is False),
        ("weights.scale_dtype=float32", lambda r: r.weights.scale_dtype == "float32"),
        ("weights={bits: 8, granularity: channel}", lambda r: r.weights == WeightFormat(bits=8, granularity="channel")),
        ("group_fallback=[]", lambda r: r.group_fallback == []),
        ("group_fallback=[32, 16]", lambda r: r.group_fallback == [32, 16]),
        ("group_fallback.1=8", lambda r: r.group_fallback == [32, 8]),
        ("ignore.0=re:.*head", lambda r: r.ignore == ["re:.*head"]),
        ("overrides=[{match: a, weights: null}]", lambda r: r.overrides[0].weights is None),
        ("calibration.samples=32", lambda r: r.calibration.samples == 32),
        ("calibration=null", lambda r: r.calibration is None),
        ("description=a=b", lambda r: r.description == "a=b"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_set_changes_one_key_of_any_kind(tmp_path: Path, setting: str, read: Any) -> None:
    changes = {
        "group_fallback": [32, 16],
        "ignore": ["lm_head"],
        "calibration": {"set": "default", "samples": 4, "sequence_length": 32},
    }
    before, after = load(tmp_path, changes), load(tmp_path, changes, [setting])
    assert read(after)
    if setting != "group_fallback=[32, 16]":
        assert before.sha256 != after.sha256


def test_settings_apply_in_order(tmp_path: Path) -> None:
    recipe = load(tmp_path, settings=["weights.granularity=channel", "weights.group_size=null", "weights.bits=8"])
    assert recipe.weights == WeightFormat(bits=8, granularity="channel")


def test_set_makes_the_sections_that_are_missing(tmp_path: Path) -> None:
    settings = ["calibration.set=default", "calibration.samples=2", "calibration.sequence_length=16"]
    calibration = load(tmp_path, settings=settings).calibration
    assert calibration is not None
    assert (calibration.set, calibration.samples, calibration.sequence_length) == ("default", 2, 16)


@pytest.mark.parametrize(
    "setting", ["weights.bits", "=4", "weights..bits=4", ".bits=4", "weights.=4", "", "weights", "="]
)
def test_a_setting_that_is_not_key_and_value_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError, match="is not KEY=VALUE"):
        load(tmp_path, settings=[setting])


@pytest.mark.parametrize("setting", ["passes.7=rtn", "passes.x=rtn", "passes.7.rtn=1", "passes.-1=rtn", "passes.0.x=1"])
def test_a_place_that_is_not_in_a_list_is_refused(tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError, match="--set passes"):
        load(tmp_path, settings=[setting])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("weights.bitz=4", "did you mean 'bits'"),
        ("weights.bits=5", "weights.bits"),
        ("weights.bits=[4", "--set weights.bits is not readable YAML"),
        ("weights.group_size=null", "group_size belongs"),
        ("no.such.key=1", "unknown key 'no'"),
    ],
)
def test_a_setting_is_checked_like_the_recipe_itself(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        load(tmp_path, settings=[setting])
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["", "3", "- a", "text"])
def test_a_setting_on_a_document_that_is_no_mapping_is_an_error_of_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(QuantkitError):
        load_recipe(str(tmp_path / "own.yaml"), ["weights.bits=4"])


def test_the_hash_names_the_values_and_not_their_spelling(tmp_path: Path) -> None:
    plain = load(tmp_path)
    assert (
        load(tmp_path, {"group_fallback": [], "weights": {**BASE["weights"], "symmetric": True}}).sha256 == plain.sha256
    )
    assert load(tmp_path, {"ignore": ["lm_head"]}).sha256 != plain.sha256
    assert Recipe.model_validate(plain.values) == plain


@pytest.mark.parametrize(
    ("source", "asked", "scale"),
    [
        ("float32", "auto", "float16"),
        ("float16", "auto", "float16"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
    ],
)
def test_scales_take_the_dtype_that_servers_compute_in(source: str, asked: str, scale: str) -> None:
    weights = WeightFormat(bits=3, granularity="group", group_size=32, symmetric=False, scale_dtype=asked)  # type: ignore[arg-type]
    assert weights.scheme(source) == QuantScheme(3, "group", 32, False, scale)


@pytest.mark.parametrize("pattern", [r"re:(\w|\.|[a-z]\w)+\d\d$", r"re:(.|\w|[a-z.]+)*\d$"])
def test_a_pattern_that_backtracks_without_end_is_an_error_and_no_hang(pattern: str) -> None:
    with pytest.raises(RecipeError, match="takes more than 2 s") as caught:
        matches(pattern, "model.layers.17.self_attn.q_proj.with.a.long.name.of.many.parts")
    assert "without nested repeats" in str(caught.value)
