"""Tiny random models of many architectures, as checkpoint directories: what must work without a model table."""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

# Byte values that never stand in a text serve as special tokens.
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    # Large enough that the logits differ from token to token.
    "initializer_range": 0.08,
    **_SPECIAL,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
LICENSE_TEXT = "Random weights, free for any use.\n"

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "llama_untied": lambda: LlamaConfig(**_GROUPED, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "gemma3": lambda: Gemma3TextConfig(
        **_GROUPED, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_inner=128, n_layer=2, n_head=4, initializer_range=0.08, **_SPECIAL
    ),
    "phi3": lambda: Phi3Config(**_GROUPED),
    "neox": lambda: GPTNeoXConfig(**_COMMON),
    # Its blocks put out tuples; as many blocks as a mistake in that takes to show.
    "bloom": lambda: BloomConfig(
        vocab_size=256, hidden_size=64, n_layer=4, n_head=4, initializer_range=0.08, **_SPECIAL
    ),
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4),
}
ARCHITECTURES = list(CONFIGS)


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint of architecture `name`: float32 safetensors, tokenizer with a chat template, LICENSE."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        with torch.no_grad():
            # Initial biases are zero and initial gains one: values that a mistake in either would not move.
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    (directory / "LICENSE").write_text(LICENSE_TEXT)
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: id n is byte n."""
    vocabulary = {symbol: byte for byte, symbol in _byte_symbols().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    symbols = _byte_symbols()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=symbols[_SPECIAL["pad_token_id"]],
        bos_token=symbols[_SPECIAL["bos_token_id"]],
        eos_token=symbols[_SPECIAL["eos_token_id"]],
        chat_template=CHAT_TEMPLATE,
        model_max_length=128,
    )


def _byte_symbols() -> dict[int, str]:
    """The printable character that the byte-level alphabet writes for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
