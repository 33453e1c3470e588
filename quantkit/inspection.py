"""`quantkit inspect` and `--dry-run`: what an artifact is, or what a conversion would make, as plain values."""

from pathlib import Path
from typing import Any

from quantkit.blocks import block_linears, build_skeleton, find_blocks
from quantkit.checkpoint import Checkpoint
from quantkit.manifest import LayerRecord, read_manifest
from quantkit.pipeline import dtype_name, totals
from quantkit.plan import Plan


def inspect_artifact(artifact: Path) -> dict[str, Any]:
    """An artifact by its manifest: layers with scheme, bytes, bits per weight as stored and by the book, fallbacks."""
    manifest = read_manifest(artifact)
    return {
        "kind": "artifact",
        "name": artifact.resolve().name,
        "identity": manifest.identity,
        "source": manifest.source.name,
        "recipe": manifest.recipe["name"],
        "layers": [_layer(record) for record in manifest.layers],
        "kept": [record.model_dump() for record in manifest.kept],
        "dropped": [record.model_dump() for record in manifest.dropped],
        "fallbacks": [record.model_dump() for record in manifest.fallbacks],
        "fold_sites": [record.model_dump() for record in manifest.fold_sites],
        "notes": manifest.notes,
        "readers": manifest.readers,
        "totals": manifest.totals.model_dump(),
    }


def inspect_plan(plan: Plan) -> dict[str, Any]:
    """A conversion that has not run: the same values as far as headers tell them, and what the run needs."""
    return {
        "kind": "plan",
        "name": plan.checkpoint.name,
        "recipe": plan.recipe.name,
        "layers": [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "scheme": layer.scheme.describe(),
                "bits_nominal": round(layer.scheme.nominal_bits(layer.shape[1]), 6),
                "fallback": layer.fallback,
            }
            for layer in plan.quantised
        ],
        "kept": [{"name": kept.entry.name, "reason": kept.reason} for kept in plan.kept],
        "dropped": [{"name": dropped.entry.name, "reason": dropped.reason} for dropped in plan.dropped],
        "fallbacks": [record.model_dump() for record in plan.fallbacks],
        "not_copied": plan.checkpoint.skipped,
        "notes": plan.notes,
        "readers": plan.readers,
        "totals": totals(plan).model_dump(),
        "needs": {"disk_bytes": plan.output_bytes, "memory_bytes": plan.peak_bytes},
    }


def inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """An unquantised checkpoint: its blocks, linears, tensors and bytes."""
    model = build_skeleton(checkpoint)
    prefix, blocks = find_blocks(model)
    linears = block_linears(model)
    parameters = sum(entry.numel for entry in checkpoint.entries.values())
    return {
        "kind": "checkpoint",
        "name": checkpoint.name,
        "dtype": dtype_name(checkpoint.dtype),
        "blocks": {"name": prefix, "count": len(blocks)},
        "linears": {name: [module.out_features, module.in_features] for name, module in linears.items()},
        "tensors": len(checkpoint.entries),
        "parameters": parameters,
        "weight_bytes": sum(path.stat().st_size for path in checkpoint.weight_files),
        "side_files": checkpoint.side_files,
        "not_copied": checkpoint.skipped,
    }


def _layer(record: LayerRecord) -> dict[str, Any]:
    weights = record.shape[0] * record.shape[1]
    return {
        "name": record.name,
        "shape": list(record.shape),
        "scheme": record.scheme.scheme.describe(),
        "bytes": record.bytes,
        "bits_per_weight": round(8 * record.bytes / weights, 6),
        "bits_nominal": round(record.scheme.scheme.nominal_bits(record.shape[1]), 6),
        "error": record.error.model_dump(),
        "fallback": record.fallback,
    }
