"""Int8 activations where one channel dwarfs the others: what a static scale loses, and what smoothing wins back.

    python benchmarks/outlier_table.py            about a minute on two cores; writes the JSON

Two down-projections: the one of block 11 of the demo's base, whose input has a channel thousands of times the median,
and a random one with a channel of 2000 times the median. Weights are int8 by channel. Activations are int8 with one
scale for all tokens (static: the largest value of the calibration text), or one for each token (dynamic). The error is
that of the output, relative to each token's own output and averaged over tokens that calibration did not see.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from doc_tables import publish
from rtn_table import say

from quantkit.affine import choose_qparams, dequantize, quantize
from quantkit.algorithms.smoothquant import fake_quantize_tokens, search_alpha, smooth_scales
from quantkit.calibration import calibrate_from, load_set
from quantkit.checkpoint import open_checkpoint
from quantkit.demo import base_checkpoint, load_demo
from quantkit.evaluate.protocol import load_windows
from quantkit.live import LiveModel
from quantkit.types import QuantScheme

RESULT = Path("benchmarks/results/outlier_table.json")
BLOCK = 11
ALPHAS: list[float | str | None] = [None, 0.5, 0.8, "auto"]


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only; leave the committed result alone")
    arguments = parser.parse_args()
    layers = {f"block {BLOCK} of the demo's base": real_layer(), "random, one channel times 2000": random_layer()}
    rows = [row(name, alpha, *layer) for name, layer in layers.items() for alpha in ALPHAS]
    result = {
        "what": "mean relative squared output error of a down-projection with int8 weights and activations",
        "command": "python benchmarks/outlier_table.py",
        "versions": {name: version(name) for name in ("quantkit", "torch", "transformers")},
        "rows": rows,
    }
    if not arguments.no_write:
        publish(result, RESULT, "docs/quality.md", "outlier", markdown(rows))
    print(markdown(rows))
    return 0


def real_layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight of the down-projection, and what it reads on calibration text and on other text."""
    checkpoint = open_checkpoint(str(base_checkpoint(load_demo(), say)))
    tokenizer = checkpoint.tokenizer()
    seen = calibrate_from(load_set("encyclopaedia"), tokenizer, 8, 512).ids
    unseen = load_windows("news-en", tokenizer, 4, 512).ids
    (on_seen, weight), (on_unseen, _) = (inputs_of(checkpoint, ids) for ids in (seen, unseen))
    return weight, on_seen, on_unseen


def inputs_of(checkpoint: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    live = LiveModel(checkpoint)
    hidden = live.start(ids)
    found: list[torch.Tensor] = []
    for index in range(BLOCK + 1):
        block = live.load(index)
        if index == BLOCK:
            down = block.get_submodule("mlp.down_proj")
            down.register_forward_pre_hook(lambda _, given: found.append(given[0].flatten(0, 1).clone()))
        live.advance(index, hidden)
        if index < BLOCK:
            live.free(index)
    return torch.cat(found), down.weight


def random_layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = torch.ones(1536)
    size[700] = 2000
    weight = torch.randn(576, 1536, generator=generator) / 40
    seen, unseen = (torch.randn(2048, 1536, generator=generator) * size for _ in range(2))
    return weight, seen, unseen


def row(name: str, alpha: float | str | None, weight: torch.Tensor, seen: torch.Tensor, unseen: torch.Tensor) -> Any:
    maxima = seen.abs().amax(0)
    chosen: float | None
    if alpha == "auto":
        # The search looks at samples of all positions, as the statistics of a conversion keep them.
        best = search_alpha(seen[:: len(seen) // 512], [weight], act_absmax=maxima)
        scales, chosen = best.scales, best.alpha
    elif isinstance(alpha, float):
        scales, chosen = smooth_scales(maxima, weight.abs().amax(0), alpha), alpha
    else:
        scales, chosen = torch.ones_like(maxima), None
    scheme = QuantScheme(8, "channel")
    scaled = weight * scales
    rounded = dequantize(quantize(scaled, *choose_qparams(scaled, scheme), scheme))
    smooth = unseen / scales
    step = (seen / scales).abs().max() / 127
    static = (smooth / step).round().clamp(-127, 127) * step
    exact = unseen @ weight.T
    errors = {
        kind: ((values @ rounded.T - exact).square().sum(1) / exact.square().sum(1)).mean().item()
        for kind, values in (("static", static), ("dynamic", fake_quantize_tokens(smooth)))
    }
    largest = (maxima.max() / maxima.median()).item()
    return {"layer": name, "largest_over_median": largest, "alpha": alpha, "alpha_used": chosen, **errors}


def markdown(rows: list[Any]) -> str:
    """The table of docs/quality.md."""
    lines = ["| down-projection | largest channel / median | alpha | static | dynamic |", "|---|---:|---|---:|---:|"]
    for one in rows:
        alpha = f"auto ({one['alpha_used']})" if one["alpha"] == "auto" else one["alpha"] or "none"
        lines.append(
            f"| {one['layer']} | {one['largest_over_median']:.0f} | {alpha} | "
            f"{one['static']:.2g} | {one['dynamic']:.2g} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
