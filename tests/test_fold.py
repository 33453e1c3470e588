"""Fold sites are found from data flow on every architecture, proved, and leave the function alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from quantkit.checkpoint import open_checkpoint
from quantkit.fold import TOLERANCE, apply_fold, check_closure, discover_fold_sites
from quantkit.live import LiveModel
from quantkit.types import FoldSite
from tests.zoo import ARCHITECTURES

IDS = torch.arange(5, 5 + 32).unsqueeze(0)

# Producer to consumers, as a reader of the model's code would list them.
_GROUPED = {
    "input_layernorm": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "post_attention_layernorm": {"mlp.gate_proj", "mlp.up_proj"},
    "self_attn.v_proj": {"self_attn.o_proj"},
    "mlp.up_proj": {"mlp.down_proj"},
}
EXPECTED: dict[str, dict[str, set[str]]] = {
    "llama": _GROUPED,
    "llama_untied": _GROUPED,
    "qwen2": _GROUPED,
    "gemma3": {
        **{name: readers for name, readers in _GROUPED.items() if name != "post_attention_layernorm"},
        "pre_feedforward_layernorm": {"mlp.gate_proj", "mlp.up_proj"},
    },
    "gpt2": {},
    "phi3": {
        "input_layernorm": {"self_attn.qkv_proj"},
        "post_attention_layernorm": {"mlp.gate_up_proj"},
        "self_attn.qkv_proj": {"self_attn.o_proj"},
        "mlp.gate_up_proj": {"mlp.down_proj"},
    },
    "neox": {"input_layernorm": {"attention.query_key_value"}, "post_attention_layernorm": {"mlp.dense_h_to_4h"}},
    "bloom": {
        "input_layernorm": {"self_attention.query_key_value"},
        "post_attention_layernorm": {"mlp.dense_h_to_4h"},
    },
    # The norm before the experts is read by the router too, so it is no site.
    "mixtral": {name: readers for name, readers in _GROUPED.items() if "self_attn" in next(iter(readers))},
}


def _block(directory: Path) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    live = LiveModel(open_checkpoint(str(directory)))
    hidden = live.start(IDS)
    return live.load(0), lambda sample: live.run(0, sample), hidden


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sites_are_found_and_close_on_every_architecture(name: str, zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo(name))
    sites = discover_fold_sites(block, run, hidden)
    assert {site.producer: set(site.consumers) for site in sites} == EXPECTED[name]
    proved = check_closure(block, sites, run, hidden, torch.Generator().manual_seed(1))
    assert all(site.residual < TOLERANCE for site in proved)


def test_grouped_heads_repeat_the_channels_of_their_values(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("llama"))
    site = next(s for s in discover_fold_sites(block, run, hidden) if s.producer == "self_attn.v_proj")
    heads = torch.arange(32).reshape(2, 16).repeat_interleave(2, dim=0).reshape(-1)
    assert torch.equal(site.channel, heads)


def test_a_fused_projection_feeds_the_next_with_its_value_rows(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("phi3"))
    site = next(s for s in discover_fold_sites(block, run, hidden) if s.producer == "self_attn.qkv_proj")
    assert site.channel.min() == 96  # after 64 query and 32 key rows


def test_the_offset_of_a_norm_is_recognised(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("gemma3"))
    kinds = {site.producer: site.kind for site in discover_fold_sites(block, run, hidden)}
    assert kinds["input_layernorm"] == "offset_norm"


def test_a_second_reader_makes_a_site_fail(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("llama"))
    missing_one = FoldSite("norm", "post_attention_layernorm", ("mlp.gate_proj",), torch.arange(64))
    (found,) = check_closure(block, [missing_one], run, hidden, torch.Generator().manual_seed(1))
    assert found.residual > 100 * TOLERANCE


def test_a_site_fails_where_all_outputs_of_a_block_lie_in_one_place(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("llama"))
    place = torch.empty_like(hidden)
    missing_one = FoldSite("norm", "post_attention_layernorm", ("mlp.gate_proj",), torch.arange(64))
    (found,) = check_closure(
        block, [missing_one], lambda sample: place.copy_(run(sample)), hidden, torch.Generator().manual_seed(1)
    )
    assert found.residual > 100 * TOLERANCE


class _Routed(nn.Module):
    """A block whose last two linears see only tokens that are large in the first channel of a linear before them."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self.first, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.first(hidden)
        output = hidden + mixed
        chosen = mixed[..., 0] > self.threshold
        if chosen.any():
            output[chosen] += self.down(self.up(mixed[chosen]))
        return output


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_a_linear_to_which_other_tokens_are_routed_than_before_is_fed_by_nothing(quantile: float) -> None:
    torch.manual_seed(0)
    block, hidden = _Routed(0.0), torch.randn(1, 64, 16)
    with torch.no_grad():
        block.threshold = block.first(hidden)[..., 0].quantile(quantile).item()
        sites = discover_fold_sites(block, block, hidden)
    assert [(site.producer, site.consumers) for site in sites] == [("up", ("down",))]


def test_the_check_leaves_every_weight_as_it_was(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("qwen2"))
    before = {name: tensor.clone() for name, tensor in block.named_parameters()}
    check_closure(block, discover_fold_sites(block, run, hidden), run, hidden, torch.Generator().manual_seed(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.named_parameters())


def test_a_norm_rounded_to_bfloat16_is_made_up_for_by_its_consumers(zoo: Callable[[str], Path]) -> None:
    block, run, hidden = _block(zoo("llama"))
    site = next(s for s in discover_fold_sites(block, run, hidden) if s.kind == "norm")
    norm = block.get_submodule(site.producer)
    norm.weight.copy_(norm.weight.bfloat16().float())  # as a bfloat16 checkpoint holds it
    expected = run(hidden)
    scales = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    factors = apply_fold(block, site, scales, torch.bfloat16)
    assert torch.equal(norm.weight, norm.weight.bfloat16().float())
    assert not torch.equal(factors, scales)
    torch.testing.assert_close(run(hidden), expected, rtol=1e-4, atol=1e-5)
