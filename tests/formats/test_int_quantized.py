"""int-quantized: the bytes of W8A8."""

import pytest
import torch

from quantkit.affine import dequantize
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.errors import ArtifactError
from quantkit.formats import StoredLayer
from quantkit.formats.int_quantized import IntQuantized
from quantkit.types import QuantScheme

SCHEME = QuantScheme(8, "channel")
GROUPS = QuantScheme(8, "group", 4)
FORMAT = IntQuantized()


def test_stored_integers_times_scales_are_the_dequantised_weight() -> None:
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    tensor = rtn_quantize(weight, SCHEME)
    stored = FORMAT.pack(tensor)
    assert stored["weight"].dtype == torch.int8
    by_hand = stored["weight"].float() * stored["weight_scale"].float()
    assert torch.equal(by_hand, dequantize(tensor))
    assert torch.equal(FORMAT.unpack(stored, SCHEME).codes, tensor.codes)


@pytest.mark.parametrize("scheme", [SCHEME, GROUPS])
def test_spec_names_what_pack_writes(scheme: QuantScheme) -> None:
    stored = FORMAT.pack(rtn_quantize(torch.randn(3, 8), scheme))
    specs = {spec.name.removeprefix("a."): (spec.dtype, spec.shape) for spec in FORMAT.spec("a", (3, 8), scheme)}
    assert specs == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}


def test_single_rows_of_a_table_in_groups_are_those_of_the_whole() -> None:
    tensor = rtn_quantize(torch.randn(6, 12, generator=torch.Generator().manual_seed(1)), GROUPS)
    stored = FORMAT.pack(tensor)
    whole = dequantize(FORMAT.unpack(stored, GROUPS))
    assert torch.equal(whole, dequantize(tensor))
    rows = torch.tensor([5, 0, 5])
    assert torch.equal(dequantize(FORMAT.unpack_rows(stored, GROUPS, rows)), whole[rows])
    assert FORMAT.for_embedding(GROUPS) is FORMAT
    with pytest.raises(IndexError):
        FORMAT.unpack_rows(stored, GROUPS, torch.tensor([6]))


def test_config_asks_for_dynamic_token_activations_and_never_for_dequantize() -> None:
    config = FORMAT.config([StoredLayer("a", "a", SCHEME)], ["lm_head"], [])
    group = config["config_groups"]["group_0"]
    assert config["format"] == "int-quantized"
    assert group["input_activations"]["strategy"] == "token"
    assert group["input_activations"]["dynamic"] is True
    assert "dequantize" not in config


def test_tensors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArtifactError):
        FORMAT.unpack({"weight": torch.zeros(2, 4), "weight_scale": torch.ones(2, 1)}, SCHEME)
    with pytest.raises(ArtifactError):
        FORMAT.unpack({"weight": torch.zeros(2, 4, dtype=torch.int8), "weight_scale": torch.ones(2, 2)}, GROUPS)
