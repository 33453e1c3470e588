"""Synthetic Llama-shaped checkpoints: random bfloat16 weights, written shard by shard, and a byte-level tokenizer."""

import json
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from quantkit.tensorfile import TensorFileWriter, TensorSpec, layout

HEAD_SIZE = 64
SPREAD = 0.02


class Shape(Protocol):
    """What `build` needs to know of a model."""

    @property
    def blocks(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def intermediate(self) -> int: ...
    @property
    def blocks_a_shard(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def build(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write a loadable checkpoint; never holds more than one tensor."""
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    shards = planned_shards(shape)
    weight_map = {}
    for number, specs in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        writer = TensorFileWriter(directory / name, layout(directory / name, specs))
        for spec in specs:
            writer.write(spec.name, random_tensor(spec, generator))
            weight_map[spec.name] = name
        writer.close()
    total = sum(spec.nbytes for specs in shards for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    write_config(directory, shape)
    write_tokenizer(directory)


def planned_shards(shape: Shape) -> list[list[TensorSpec]]:
    """The tensors of each file: some whole blocks a file, the embedding with the first."""
    shards: list[list[TensorSpec]] = []
    for block in range(shape.blocks):
        if block % shape.blocks_a_shard == 0:
            shards.append([])
        shards[-1] += block_specs(f"model.layers.{block}", shape)
    shards[0].append(TensorSpec("model.embed_tokens.weight", torch.bfloat16, (shape.vocabulary, shape.hidden)))
    shards[-1].append(TensorSpec("model.norm.weight", torch.bfloat16, (shape.hidden,)))
    return shards


def block_specs(prefix: str, shape: Shape) -> list[TensorSpec]:
    square, wide = (shape.hidden, shape.hidden), (shape.intermediate, shape.hidden)
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": square for name in "qkvo"},
        "mlp.gate_proj.weight": wide,
        "mlp.up_proj.weight": wide,
        "mlp.down_proj.weight": wide[::-1],
        "input_layernorm.weight": (shape.hidden,),
        "post_attention_layernorm.weight": (shape.hidden,),
    }
    return [TensorSpec(f"{prefix}.{name}", torch.bfloat16, size) for name, size in shapes.items()]


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    if len(spec.shape) == 1:
        return torch.ones(spec.shape, dtype=spec.dtype)
    return torch.empty(spec.shape, dtype=spec.dtype).normal_(0, SPREAD, generator=generator)


def write_config(directory: Path, shape: Shape) -> None:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        max_position_embeddings=2048,
        num_attention_heads=shape.hidden // HEAD_SIZE,
        num_hidden_layers=shape.blocks,
        num_key_value_heads=shape.hidden // HEAD_SIZE,
        tie_word_embeddings=True,
        vocab_size=shape.vocabulary,
    )
    config.save_pretrained(directory)


def write_tokenizer(directory: Path) -> None:
    """Every byte is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
