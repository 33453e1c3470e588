"""The packed format against an independent decoder, golden bytes, and the library whose format it is."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

from quantkit.affine import dequantize
from quantkit.algorithms.rtn import rtn_quantize
from quantkit.bitpack import unpack_int32
from quantkit.errors import ArtifactError
from quantkit.formats import FORMATS, StoredLayer
from quantkit.tensorfile import TensorFileWriter, layout
from quantkit.types import QuantizedTensor, QuantScheme
from tests.oracles import decoder

FORMAT = FORMATS["compressed-tensors"]
PACKED = FORMATS["compressed-tensors-packed"]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "compressed_tensors.json").read_text())
BITS = [2, 3, 4, 5, 6, 7, 8]
SYMMETRY = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "zp"])
# rows, columns, group size: rows and columns that fill no word, one group, many groups, groups of one
SHAPES = [(1, 1, None), (3, 10, 5), (5, 33, 11), (9, 24, 8), (33, 7, 1), (4, 64, 32), (17, 13, None)]


def quantised(rows: int, columns: int, scheme: QuantScheme, seed: int = 0) -> QuantizedTensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + 0.3
    return rtn_quantize(weight, scheme)


def scheme_of(bits: int, group_size: int | None, symmetric: bool, scale_dtype: str = "float16") -> QuantScheme:
    return QuantScheme(bits, "group" if group_size else "channel", group_size, symmetric, scale_dtype)


def write(path: Path, name: str, tensor: QuantizedTensor) -> None:
    plan = layout(path, FORMAT.spec(name, tensor.shape, tensor.scheme))
    writer = TensorFileWriter(path, plan)
    for local, stored in FORMAT.pack(tensor).items():
        writer.write(f"{name}.{local}", stored)
    writer.close()


def bits_of(weight: torch.Tensor) -> list[int]:
    return weight.contiguous().view(torch.int32).flatten().tolist()


@SYMMETRY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_independent_decoder_of_the_file_agrees_to_the_bit(
    tmp_path: Path, bits: int, shape: tuple[int, int, int | None], symmetric: bool
) -> None:
    rows, columns, group_size = shape
    tensor = quantised(rows, columns, scheme_of(bits, group_size, symmetric))
    write(tmp_path / "w.safetensors", "a.b", tensor)
    decoded = decoder.decode(decoder.read_file(tmp_path / "w.safetensors"), "a.b", bits, symmetric)
    restored = dequantize(FORMAT.unpack(FORMAT.pack(tensor), tensor.scheme))
    assert bits_of(restored) == decoded.view(np.int32).flatten().tolist()


@SYMMETRY
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16", "float32"])
def test_the_decoder_agrees_for_every_scale_dtype(tmp_path: Path, scale_dtype: str, symmetric: bool) -> None:
    tensor = quantised(6, 48, scheme_of(4, 16, symmetric, scale_dtype))
    write(tmp_path / "w.safetensors", "m", tensor)
    decoded = decoder.decode(decoder.read_file(tmp_path / "w.safetensors"), "m", 4, symmetric)
    assert bits_of(dequantize(tensor)) == decoded.view(np.int32).flatten().tolist()


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['bits']}-{'sym' if c['symmetric'] else 'zp'}-{c['shape']}")
def test_golden_bytes_pack_and_decode(case: dict[str, Any]) -> None:
    rows, columns = case["shape"]
    group_size = columns // case["groups"] if case["groups"] > 1 else None
    scheme = scheme_of(case["bits"], group_size, case["symmetric"])
    scales = torch.frombuffer(bytearray.fromhex(case["weight_scale"]), dtype=torch.float16).reshape(rows, -1)
    zeros = None if case["symmetric"] else torch.tensor(case["zeros"], dtype=torch.uint8)
    tensor = QuantizedTensor(torch.tensor(case["codes"], dtype=torch.uint8), scales, zeros, scheme)
    stored = FORMAT.pack(tensor)
    for name in ("weight_packed", "weight_scale", "weight_zero_point"):
        if name in case:
            assert stored[name].numpy().tobytes().hex() == case[name], name
    assert stored["weight_shape"].tolist() == [rows, columns]
    restored = FORMAT.unpack(stored, scheme)
    assert torch.equal(restored.codes, tensor.codes)
    assert dequantize(restored).numpy().tobytes().hex() == case["decoded_float32"]


def test_golden_bytes_are_those_of_the_oracle() -> None:
    assert decoder.golden_cases() == GOLDEN
    assert {(case["bits"], case["symmetric"]) for case in GOLDEN} == {
        (b, s) for b in (2, 3, 4, 8) for s in (True, False)
    }


@SYMMETRY
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_library_decompresses_to_the_same_weight(
    bits: int, shape: tuple[int, int, int | None], symmetric: bool
) -> None:
    rows, columns, group_size = shape
    tensor = quantised(rows, columns, scheme_of(bits, group_size, symmetric, "float32"))
    arguments = FORMAT.config([StoredLayer("m", "m", tensor.scheme)], [], [])["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    weight = PackedQuantizationCompressor.decompress(FORMAT.pack(tensor), scheme)["weight"]
    assert torch.equal(weight, dequantize(tensor))


@SYMMETRY
def test_the_reference_library_in_float16_rounds_as_our_reproduction_of_it(symmetric: bool) -> None:
    tensor = quantised(7, 40, scheme_of(8, 8, symmetric))
    arguments = FORMAT.config([StoredLayer("m", "m", tensor.scheme)], [], [])["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    weight = PackedQuantizationCompressor.decompress(FORMAT.pack(tensor), scheme)["weight"]
    assert weight.dtype == torch.float16
    assert torch.equal(weight.float(), dequantize(tensor, arithmetic=torch.float16))


@SYMMETRY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_planned_tensors_are_the_ones_that_are_packed(
    bits: int, shape: tuple[int, int, int | None], symmetric: bool
) -> None:
    rows, columns, group_size = shape
    tensor = quantised(rows, columns, scheme_of(bits, group_size, symmetric))
    planned = {spec.name: (spec.dtype, spec.shape) for spec in FORMAT.spec("x.y", tensor.shape, tensor.scheme)}
    packed = {f"x.y.{name}": (t.dtype, tuple(t.shape)) for name, t in FORMAT.pack(tensor).items()}
    assert planned == packed
    assert all(t.is_contiguous() for t in FORMAT.pack(tensor).values())


@SYMMETRY
def test_unpacking_gives_the_codes_scales_and_zeros_that_were_packed(symmetric: bool) -> None:
    tensor = quantised(11, 30, scheme_of(3, 10, symmetric))
    before = tensor.codes.clone()
    restored = FORMAT.unpack(FORMAT.pack(tensor), tensor.scheme)
    assert torch.equal(restored.codes, before)
    assert torch.equal(tensor.codes, before)
    assert torch.equal(restored.scales, tensor.scales)
    if symmetric:
        assert restored.zeros is None
    else:
        assert restored.zeros is not None
        assert tensor.zeros is not None
        assert torch.equal(restored.zeros, tensor.zeros)


@SYMMETRY
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_single_rows_are_those_of_the_whole_and_no_other_is_decoded(
    bits: int, shape: tuple[int, int, int | None], symmetric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, group_size = shape
    tensor = quantised(rows, columns, scheme_of(bits, group_size, symmetric))
    stored, whole = FORMAT.pack(tensor), dequantize(tensor)
    decoded: list[int] = []

    def counted(packed: torch.Tensor, *arguments: int) -> torch.Tensor:
        decoded.append(len(packed))
        return unpack_int32(packed, *arguments)

    monkeypatch.setattr("quantkit.formats.compressed_tensors.unpack_int32", counted)
    wanted = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(bits))
    found = FORMAT.unpack_rows(stored, tensor.scheme, wanted)
    assert bits_of(dequantize(found)) == bits_of(whole[wanted])
    assert decoded == [5]
    nothing = FORMAT.unpack_rows(stored, tensor.scheme, torch.empty(0, dtype=torch.int64))
    assert dequantize(nothing).shape == (0, columns)


@pytest.mark.parametrize("row", [-1, 9])
def test_a_row_that_is_not_there_is_an_index_error(row: int) -> None:
    tensor = quantised(9, 24, scheme_of(4, 8, False))
    with pytest.raises(IndexError):
        FORMAT.unpack_rows(FORMAT.pack(tensor), tensor.scheme, torch.tensor([row]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_packed", lambda t: t[:, :-1]),
        ("weight_packed", lambda _: None),
        ("weight_scale", lambda t: t[:, :-1]),
        ("weight_zero_point", lambda t: t[:, :1]),
        ("weight_zero_point", lambda _: None),
        ("weight_shape", lambda t: t + 1),
        ("weight_shape", lambda t: torch.cat([t, t])),
        ("weight_shape", lambda _: None),
    ],
)
def test_tensors_that_do_not_fit_together_are_an_artifact_error_for_single_rows_too(name: str, change: Any) -> None:
    tensor = quantised(9, 24, scheme_of(4, 8, False))
    stored = FORMAT.pack(tensor)
    with pytest.raises(ArtifactError, match="packed tensors do not fit"):
        FORMAT.unpack_rows(damage(stored, name, change(stored[name])), tensor.scheme, torch.tensor([0, 3]))


def test_a_tensor_scale_is_stored_once_a_channel() -> None:
    tensor = quantised(4, 6, QuantScheme(8, "tensor"))
    stored = FORMAT.pack(tensor)["weight_scale"]
    assert stored.shape == (4, 1)
    assert len(set(stored.flatten().tolist())) == 1


def damage(stored: dict[str, torch.Tensor], name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {key: value for key, value in {**stored, name: tensor}.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight_packed", lambda t: t[:, :-1]),
        ("weight_packed", lambda t: t[:-1]),
        ("weight_packed", lambda _: None),
        ("weight_scale", lambda t: t[:, :-1]),
        ("weight_scale", lambda t: t[:-1]),
        ("weight_scale", lambda _: None),
        ("weight_zero_point", lambda t: torch.cat([t, t])),
        ("weight_zero_point", lambda t: t[:, :1]),
        ("weight_zero_point", lambda _: None),
        ("weight_shape", lambda t: t + 1),
        ("weight_shape", lambda t: torch.cat([t, t])),
        ("weight_shape", lambda t: -t),
        ("weight_shape", lambda _: None),
    ],
)
def test_tensors_that_do_not_fit_together_are_an_artifact_error(name: str, change: Any) -> None:
    tensor = quantised(9, 24, scheme_of(4, 8, False))
    stored = FORMAT.pack(tensor)
    with pytest.raises(ArtifactError, match="packed tensors do not fit"):
        FORMAT.unpack(damage(stored, name, change(stored[name])), tensor.scheme)


def test_one_scheme_targets_every_linear() -> None:
    scheme = scheme_of(4, 64, True)
    layers = [StoredLayer("a", "a", scheme), StoredLayer("b", "b", scheme)]
    config = FORMAT.config(layers, ["lm_head"], [])
    assert config == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 64,
                    "dynamic": False,
                },
            }
        },
    }


def test_several_schemes_name_their_layers_on_disk_and_in_the_model() -> None:
    layers = [
        StoredLayer("a.q", "a.q", scheme_of(4, 64, True)),
        StoredLayer("disk.down", "model.down", scheme_of(8, None, True)),
        StoredLayer("a.k", "a.k", scheme_of(4, 64, True)),
    ]
    groups = FORMAT.config(layers, [], [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["a.k", "a.q"], ["disk.down", "model.down"]]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4, 8]
    assert [group["weights"]["strategy"] for group in groups.values()] == ["group", "channel"]


def table(scheme: QuantScheme, name: str = "embed", module: str = "embed") -> StoredLayer:
    return StoredLayer(name, module, scheme, embedding=True)


@pytest.mark.parametrize("format", [FORMAT, PACKED])
def test_embeddings_are_targeted_by_name_and_by_class_and_leave_linears_theirs(format: Any) -> None:
    layers = [table(scheme_of(8, 128, True), "disk.wte", "wte"), StoredLayer("a.q", "a.q", scheme_of(4, 128, True))]
    groups = format.config(layers, ["lm_head", "wpe"], [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["disk.wte", "wte", "Embedding"], ["Linear"]]
    assert groups["group_0"].get("format") == ("int-quantized" if format is FORMAT else None)
    assert "format" not in groups["group_1"]


def test_a_table_stored_as_int8_and_a_linear_of_its_scheme_are_two_groups() -> None:
    layers = [table(scheme_of(8, 128, True)), StoredLayer("lm_head", "lm_head", scheme_of(8, 128, True))]
    assert len(FORMAT.config(layers, [], [])["config_groups"]) == 2
    packed = PACKED.config(layers, [], [])["config_groups"]
    assert [group["targets"] for group in packed.values()] == [["Linear", "embed", "Embedding"]]


def test_embeddings_of_several_schemes_are_targeted_by_name_alone() -> None:
    layers = [table(scheme_of(8, 64, True), "a", "a"), table(scheme_of(4, 64, True), "b", "b")]
    groups = FORMAT.config(layers, [], [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("scheme", "int8"),
    [
        (scheme_of(8, 128, True), True),
        (scheme_of(8, None, True), True),
        (QuantScheme(8, "tensor"), True),
        (scheme_of(8, 128, False), False),
        (scheme_of(4, 128, True), False),
    ],
)
def test_embeddings_of_eight_symmetric_bits_are_stored_as_int8_unless_asked_otherwise(
    scheme: QuantScheme, int8: bool
) -> None:
    assert (FORMAT.for_embedding(scheme) is not FORMAT) == int8
    assert PACKED.for_embedding(scheme) is PACKED
    names = {spec.name for spec in FORMAT.for_embedding(scheme).spec("t", (256, 128), scheme)}
    assert ("t.weight" in names) == int8


def test_an_embedding_that_transformers_cannot_hold_packed_is_decoded_on_load_where_it_can() -> None:
    four = scheme_of(4, 64, True)
    alone = [table(four), StoredLayer("a", "a", four)]
    assert FORMAT.config(alone, [], [])["dequantize"] is True
    assert FORMAT.readers(alone)["transformers"] == "yes, decoded on load in the scale dtype"
    mixed = [table(four), StoredLayer("a", "a", scheme_of(8, None, True))]
    assert "dequantize" not in FORMAT.config(mixed, [], [])
    assert FORMAT.readers(mixed)["transformers"].startswith("no: ")
    assert "packed embedding under several schemes" in FORMAT.readers(mixed)["transformers"]
    int8 = [table(scheme_of(8, 64, True)), StoredLayer("a", "a", four)]
    assert "dequantize" not in FORMAT.config(int8, [], [])
    assert FORMAT.readers(int8)["transformers"] == "yes"


def test_what_vllm_makes_of_an_embedding_is_never_a_plain_yes() -> None:
    linear = StoredLayer("a", "a", scheme_of(4, 128, True))
    assert FORMAT.readers([linear, table(scheme_of(8, 128, True))])["vllm"].startswith(
        "no: it reads an embedding packed"
    )
    assert PACKED.readers([linear, table(scheme_of(8, 128, True))])["vllm"].startswith("not verified")
    assert "int8 group 128 zero-point embedding" in PACKED.readers([linear, table(scheme_of(8, 128, False))])["vllm"]
    assert "int3 group 64 symmetric embedding" in PACKED.readers([linear, table(scheme_of(3, 64, True))])["vllm"]
    assert PACKED.readers([linear, table(scheme_of(4, 16, True))])["vllm"].startswith("not verified")


def test_tensor_and_channel_scales_share_a_group_because_the_file_holds_the_same() -> None:
    layers = [StoredLayer("a", "a", QuantScheme(8, "tensor")), StoredLayer("b", "b", QuantScheme(8, "channel"))]
    groups = FORMAT.config(layers, [], [])["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"]]
    assert groups["group_0"]["weights"]["strategy"] == "channel"


def test_only_one_zero_point_scheme_asks_for_decoding_on_load() -> None:
    zero_point, symmetric = scheme_of(4, 64, False), scheme_of(4, 64, True)
    assert FORMAT.config([StoredLayer("a", "a", zero_point)], [], [])["dequantize"] is True
    assert "dequantize" not in FORMAT.config([StoredLayer("a", "a", symmetric)], [], [])
    both = [StoredLayer("a", "a", zero_point), StoredLayer("b", "b", symmetric)]
    assert "dequantize" not in FORMAT.config(both, [], [])


def test_kept_experts_are_ignored_by_a_pattern_that_fits_them_only() -> None:
    config = FORMAT.config([StoredLayer("a.q", "a.q", scheme_of(4, 64, True))], ["a.gate"], ["a.experts"])
    pattern = config["ignore"][-1]
    assert config["ignore"][0] == "a.gate"
    assert pattern.startswith("re:")
    assert re.match(pattern[3:], "a.experts.3.w1")
    assert not re.match(pattern[3:], "a_experts.3.w1")
    assert not re.match(pattern[3:], "a.experts_shared.w1")


@pytest.mark.parametrize("experts", [[], ["a.experts"]])
@pytest.mark.parametrize("schemes", [[scheme_of(4, 64, True)], [scheme_of(4, 32, False), scheme_of(8, None, True)]])
def test_the_config_is_one_that_the_reference_library_parses(schemes: list[QuantScheme], experts: list[str]) -> None:
    layers = [StoredLayer(f"l.{n}", f"l.{n}", scheme) for n, scheme in enumerate(schemes)]
    config = FORMAT.config(layers, ["lm_head"], experts)
    config.pop("dequantize", None)
    table_group = FORMAT.config([table(scheme_of(8, 128, True))], [], [])["config_groups"]["group_0"]
    config["config_groups"]["table"] = table_group
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.format == "pack-quantized"
    assert parsed.config_groups["table"].format == "int-quantized"
    assert parsed.quantization_status.value == "compressed"
    for n, scheme in enumerate(schemes):
        weights = parsed.config_groups[f"group_{n}"].weights
        assert (weights.num_bits, weights.group_size, weights.symmetric) == (
            scheme.bits,
            scheme.group_size,
            scheme.symmetric,
        )


@pytest.mark.parametrize(
    ("scheme", "refused"),
    [
        (scheme_of(4, 128, True), None),
        (scheme_of(4, 64, False), None),
        (scheme_of(8, None, True), None),
        (scheme_of(8, 64, False), "no kernel for int8 group 64 zero-point"),
        (scheme_of(3, 64, True), "no kernel for int3 group 64 symmetric"),
        (scheme_of(4, 16, True), "no kernel for int4 group 16 symmetric"),
    ],
)
def test_readers_say_which_schemes_a_server_has_no_kernel_for(scheme: QuantScheme, refused: str | None) -> None:
    readers = FORMAT.readers([StoredLayer("a", "a", scheme)])
    assert readers["quantkit"].startswith("yes")
    if refused is None:
        assert readers["vllm"].startswith("yes")
    else:
        assert refused in readers["vllm"]
        assert not readers["vllm"].startswith("yes")


def test_readers_say_that_zero_points_under_several_schemes_do_not_load_plainly() -> None:
    mixed = [StoredLayer("a", "a", scheme_of(4, 64, False)), StoredLayer("b", "b", scheme_of(8, None, True))]
    assert not FORMAT.readers(mixed)["transformers"].startswith("yes")
    assert "zero-points under several schemes" in FORMAT.readers(mixed)["transformers"]
    assert FORMAT.readers(mixed[:1])["transformers"].startswith("yes")
    assert all(answer.startswith("yes") for answer in FORMAT.readers([]).values())
