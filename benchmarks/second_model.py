"""A second real model for quality figures: a GPT-2 of microbiome genera, 8.9M parameters, LayerNorm and biases.

Its linears are Conv1D, which quantkit keeps as they are, so it is written down once more as an OPT, whose function is
the same: separate projections, position rows moved by two, the same activation. Both are compared when it is made. Its
tokens are no language; what calibrates and what judges are sequences that the model itself draws.
"""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, PreTrainedModel

from quantkit.checkpoint import cache_dir
from quantkit.material import PackageFile, package_file

NAME = "microformer-mgm-as-opt"
_FOLDER = "mgm/resources/general_model/"
_WEIGHTS = PackageFile(
    package="microformer-mgm", version="0.5.8", member=_FOLDER + "pytorch_model.bin",
    sha256="7a83b442dcb0cbe2a4248ea9922de58e15edfa3a1ad71d07519dc8594f4511b8",
)  # fmt: skip
_GPT2 = {"vocab_size": 9669, "n_embd": 256, "n_layer": 8, "n_head": 8, "n_positions": 512,
         "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}  # fmt: skip


def second_checkpoint() -> Path:
    """The folder of the model as OPT, made in the cache where it is not there yet."""
    folder = cache_dir() / "models" / NAME
    if not (folder / "model.safetensors").is_file():
        original = _original()
        model = as_opt(original)
        ids = torch.randint(4, original.config.vocab_size, (2, 96), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-4, atol=1e-3)
        model.save_pretrained(folder)
    return folder


@torch.no_grad()
def drawn(model: PreTrainedModel, count: int, length: int, seed: int) -> torch.Tensor:
    """Token ids `[count, length]` drawn from the model itself, one after the other, without its end token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        start = torch.full((count, 1), _GPT2["bos_token_id"])
        # The first four are padding, mask, begin and end.
        return model.generate(start, max_length=length, do_sample=True, top_k=0, suppress_tokens=[0, 1, 2, 3])


def _original() -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(GPT2Config(**_GPT2, activation_function="gelu_new")).eval()
    state = torch.load(package_file(_WEIGHTS), weights_only=True, map_location="cpu")
    missing, unexpected = model.load_state_dict(state, strict=False)
    if [name for name in missing if name != "lm_head.weight"] or [n for n in unexpected if "attn" not in n]:
        raise SystemExit(f"the package holds another model: {json.dumps([missing, unexpected])}")
    model.tie_weights()
    return model


def as_opt(source: GPT2LMHeadModel) -> OPTForCausalLM:
    """The same function as an OPT."""
    old = source.config
    config = OPTConfig(
        vocab_size=old.vocab_size, hidden_size=old.n_embd, num_hidden_layers=old.n_layer, ffn_dim=4 * old.n_embd,
        num_attention_heads=old.n_head, max_position_embeddings=old.n_positions, word_embed_proj_dim=old.n_embd,
        activation_function="gelu_new", do_layer_norm_before=True, bos_token_id=old.bos_token_id,
        eos_token_id=old.eos_token_id, pad_token_id=old.pad_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()
    decoder, body = model.model.decoder, source.transformer
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(body.wte.weight)
        decoder.embed_positions.weight[2:] = body.wpe.weight
        _copy(decoder.final_layer_norm, body.ln_f.weight, body.ln_f.bias)
        for new, block in zip(decoder.layers, body.h, strict=True):
            _copy(new.self_attn_layer_norm, block.ln_1.weight, block.ln_1.bias)
            _copy(new.final_layer_norm, block.ln_2.weight, block.ln_2.bias)
            weights, biases = block.attn.c_attn.weight.T.chunk(3), block.attn.c_attn.bias.chunk(3)
            names = (new.self_attn.q_proj, new.self_attn.k_proj, new.self_attn.v_proj)
            for module, weight, bias in zip(names, weights, biases, strict=True):
                _copy(module, weight, bias)
            _copy(new.self_attn.out_proj, block.attn.c_proj.weight.T, block.attn.c_proj.bias)
            _copy(new.fc1, block.mlp.c_fc.weight.T, block.mlp.c_fc.bias)
            _copy(new.fc2, block.mlp.c_proj.weight.T, block.mlp.c_proj.bias)
    return model


def _copy(module: torch.nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    module.weight.copy_(weight)
    module.bias.copy_(bias)
