"""Which decoder architectures of transformers can be calibrated: every one that it knows, as a tiny random model.

    python benchmarks/architectures.py               some minutes on two cores; writes the JSON and the table
    python benchmarks/architectures.py llama bloom   these only; writes nothing

A model is run one block at a time as calibration does, in several batches, and as a whole; the hidden states behind the
last block must agree. No architecture is known to this script: it makes numbers of a config small by the names that
configs commonly use, and what is then too large, cannot be built, or does not run by itself is told apart.
"""

import argparse
import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from doc_tables import publish
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quantkit import live as live_module
from quantkit.blocks import find_blocks
from quantkit.checkpoint import open_checkpoint, quiet_transformers
from quantkit.errors import QuantkitError, first_line
from quantkit.live import LiveModel

RESULT = Path("benchmarks/results/architectures.json")
DOCUMENT = "docs/calibrated.md"
BLOCKS = 4
SAMPLES, LENGTH = 5, 24
LARGEST = 30_000_000
# Relative to the largest hidden state: float32 sums in another order.
TOLERANCE = 1e-4
SAME, WRONG, REFUSED = "as the whole model", "otherwise than the whole model, or not at all", "refused"
NOT_RUN, NOT_BUILT = "does not run, or cannot be saved, at this size", "not built at this size"

_WIDTHS = {
    64: "hidden_size d_model n_embd word_embed_proj_dim embedding_size moe_intermediate_size sliding_window "
    "shared_expert_intermediate_size",
    128: "intermediate_size ffn_dim d_ff decoder_ffn_dim ffn_hidden_size",
    256: "vocab_size max_position_embeddings n_positions n_ctx",
    BLOCKS: "num_hidden_layers num_layers n_layer n_layers decoder_layers num_attention_heads num_heads n_head n_heads "
    "decoder_attention_heads num_local_experts num_experts n_routed_experts",
    16: "head_dim kv_lora_rank q_lora_rank v_head_dim",
    8: "rotary_dim qk_rope_head_dim qk_nope_head_dim",
    2: "num_key_value_heads num_experts_per_tok eos_token_id",
    1: "n_group topk_group first_k_dense_replace num_shared_experts n_shared_experts bos_token_id",
    0: "pad_token_id",
}
_SMALL = {name: size for size, names in _WIDTHS.items() for name in names.split()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures, as transformers calls them; default all")
    names = parser.parse_args().names
    warnings.filterwarnings("ignore")
    found = {name: outcome(name) for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    result = {
        "what": "hidden states of tiny random models, one block at a time in several batches, beside the whole model",
        "command": "python benchmarks/architectures.py",
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "rows": [{"architecture": name, "outcome": kind, "detail": detail} for name, (kind, detail) in found.items()],
    }
    if not names:
        publish(result, RESULT, DOCUMENT, "architectures", markdown(result))
    print(markdown(result))
    return 1 if any(kind == WRONG for kind, _ in found.values()) else 0


@torch.no_grad()
def outcome(name: str) -> tuple[str, str]:
    """What became of an architecture, and why."""
    print(name, flush=True)
    try:
        with quiet_transformers():
            model = build(small(CONFIG_MAPPING[name]))
    except Exception as error:  # of any kind: the code of a model
        return NOT_BUILT, first_line(error)
    ids = torch.randint(3, 256, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory(prefix="architecture-") as folder:
        try:
            whole = last_hidden(model, ids)
            with quiet_transformers():
                model.save_pretrained(folder)
        except Exception as error:
            return NOT_RUN, first_line(error)
        try:
            apart = block_by_block(folder, ids)
        except QuantkitError as error:
            return REFUSED, error.problem.partition(": ")[2]
        except Exception as error:
            return WRONG, f"{type(error).__name__}: {first_line(error)}"
    difference = ((apart - whole).abs().max() / whole.abs().max()).item()
    return (SAME if difference < TOLERANCE else WRONG), f"{difference:.1e}"


def small(make: Callable[..., PretrainedConfig]) -> PretrainedConfig:
    """A config whose sizes are small, as far as they have common names."""
    usual = make()
    plain = usual.to_dict()
    sizes: dict[str, Any] = {name: _SMALL[name] for name in {*plain, *usual.attribute_map} & _SMALL.keys()}
    if "qk_rope_head_dim" in sizes:  # there the width of a head is that of its rotary part
        sizes.pop("head_dim", None)
    kinds = {"layer_types": plain["layer_types"][:BLOCKS]} if plain.get("layer_types") else {}
    while True:
        try:
            return make(**sizes, **kinds)
        except AttributeError as error:  # a value that the config works out itself
            computed = re.search(r"property '(\w+)'", str(error))
            if computed is None or not (kinds.pop("layer_types", None) or sizes.pop(computed[1], None)):
                raise


def build(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f}M parameters: some of its sizes have names of their own")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


def last_hidden(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def keep(_: object, __: object, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple | list) else output)

    with find_blocks(model)[1][-1].register_forward_hook(keep):
        model(input_ids=ids, use_cache=False)
    return found[-1]


def block_by_block(folder: str, ids: torch.Tensor) -> torch.Tensor:
    with patch.object(live_module, "_BATCH_TOKENS", 2 * LENGTH):
        live = LiveModel(open_checkpoint(folder))
        hidden = live.start(ids)
        for index in range(len(live.blocks)):
            live.load(index)
            live.advance(index, hidden)
            live.free(index)
    return hidden


def markdown(result: dict[str, Any]) -> str:
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in result["rows"]:
        reason = row["detail"] if row["outcome"] in {REFUSED, WRONG} else ""
        groups[row["outcome"]][reason].append(row["architecture"])
    lines = ["| block by block | architectures | |", "|---|---:|---|"]
    for kind in (SAME, WRONG, REFUSED, NOT_RUN, NOT_BUILT):
        for reason, names in groups[kind].items():
            what = f"{kind}: {reason}" if reason else kind
            lines.append(f"| {what} | {len(names)} | {', '.join(names)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
