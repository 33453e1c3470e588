"""Reports and artifacts that are made up where measuring them would say no more."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.evaluate.breakdown import CLASSES, Part, breakdown
from quantkit.evaluate.protocol import PROTOCOL_VERSION, protocol_hash
from quantkit.evaluate.scoring import Scores
from quantkit.evaluate.suite import Suite, load_suite
from quantkit.evaluate.uncertainty import BOOTSTRAP
from quantkit.manifest import Manifest, OutputError, read_manifest
from quantkit.report import REPORT_VERSION, Report, Subject, SuiteRecord, write_report

HOSTILE = "<script>x('y')</script>&\"$\\frac"


def estimate(value: float, spread: float = 0.02) -> dict[str, float]:
    return {"value": value, "low": value - spread, "high": value + spread}


def perplexity(ratio: float) -> dict[str, Any]:
    return {"value": estimate(20 * ratio, 1), "reference": estimate(20, 1), "ratio": estimate(ratio), "tokens": 12264}


def sample_breakdown(name: str = "wiki-en", opening: str = "The valve opens") -> dict[str, Any]:
    random = np.random.default_rng(0)
    parts = []
    for text, language in ((name, "en"), ("handbook-zh", "zh")):
        shape = (6, 600)
        kl = random.lognormal(-2, 1.5, shape)
        scores = Scores(random.exponential(3, shape), random.exponential(2.8, shape), kl, kl < 0.4, np.exp(-kl))
        openings = [f"{opening} {n}" for n in range(6)]
        parts.append(Part(text, language, scores, random.integers(0, len(CLASSES), shape), openings))
    return breakdown(parts)


def sample_tasks(task: str = "quantkit_copy") -> dict[str, Any]:
    metric = {
        "value": estimate(0.61), "reference": estimate(0.7), "drop": estimate(0.09), "lost": 31, "gained": 4,
    }  # fmt: skip
    margin = {"value": estimate(0.8), "reference": estimate(1.0), "drop": estimate(0.2)}
    languages = {"en": {"n": 150, "exact": metric}, "zh": {"n": 150, "exact": metric}}
    lengths = {length: {"n": 150, "exact": metric} for length in ("1024", "256")}  # as JSON sorts its keys
    parts = {"by_language": languages, "by_length": lengths}
    return {task: {"n": 300, "exact": metric, "margin": margin, **parts}}


def sample_answers(prompt: str = "en-claim", words: str = "The valve") -> dict[str, Any]:
    """`generation` and `batching`: a prompt whose answers part, one that is unequal in a batch, and one of neither."""

    def token(number: int) -> dict[str, Any]:
        return {"id": number, "text": f" {words}"}

    parted = {
        "index": 7, "before": words, "token": token(8), "reference_token": token(9), "reference_gap": 0.25,
    }  # fmt: skip
    samples = [
        {
            "prompt": f"{prompt}{n}", "language": "en", "question": f"{words}?", "answer": f"{words} opens {end}",
            "reference_answer": f"{words} opens late", "tokens": 9, "reference_tokens": 9, "divergence": divergence,
        }
        for n, (end, divergence) in enumerate((("late", None), ("early", parted)))
    ]  # fmt: skip
    share = {name: estimate(0.5) for name in ("identical", "prefix_mean", "prefix_median", "prefix_share")}
    unequal = {
        "prompt": prompt, "index": 3, "token": token(5), "alone_token": token(6), "alone_gap": 0.01, "difference": 0.02,
    }  # fmt: skip
    batching = {
        "n": 2, "tokens": 128, "equal": estimate(0.5), "logit_difference": {"value": 0.02},
        "smallest_gap": {"value": 0.01}, "within_reach": 1, "unequal": [unequal],
    }  # fmt: skip
    by_language = {"en": {"n": 2, **share}}
    return {
        "generation": {"n": 2, **share, "by_language": by_language, "samples": samples},
        "batching": batching,
    }


def sample_metrics(ratio: float = 1.04) -> dict[str, Any]:
    return {
        "perplexity": {"wiki-en": perplexity(ratio), "handbook-zh": perplexity(ratio * 1.1)},
        "fidelity": {
            "kl_mean": estimate(ratio - 1), "kl_p99": estimate(9 * (ratio - 1)), "top1": estimate(0.9),
            "acceptance": estimate(0.92), "tokens": 12264,
        },
        "tasks": sample_tasks(),
        "breakdown": sample_breakdown(),
        **sample_answers(),
    }  # fmt: skip


def sample_protocol(suite: Suite) -> dict[str, Any]:
    """The protocol record of a run of `suite` beside a reference."""
    texts = {
        key: {
            "text": corpus.text, "language": corpus.text[-2:], "text_sha256": "a" * 64, "separator": "\n\n",
            "bos": "none", "windows": corpus.windows, "length": corpus.length, "tokens_sha256": "b" * 64,
        }
        for key, corpus in suite.corpora(with_reference=True).items()
    }  # fmt: skip
    return {"version": PROTOCOL_VERSION, "texts": texts, "dtype": "float32", "bootstrap": BOOTSTRAP}


def sample_report(manifest: Manifest, **changes: Any) -> Report:
    """A report of suite `quick` that belongs to the artifact of `manifest`."""
    record = changes.get("protocol_record", sample_protocol(load_suite("quick")))
    values: dict[str, Any] = {
        "schema_version": REPORT_VERSION,
        "identity": manifest.identity,
        "subject": Subject(kind="artifact", name="artifact", identity=manifest.identity),
        "reference": Subject(kind="checkpoint", name=manifest.source.name, identity=manifest.source_identity),
        "suite": SuiteRecord(name="quick", sha256=load_suite("quick").sha256, limit=None),
        "protocol": protocol_hash(record),
        "protocol_record": record,
        "metrics": sample_metrics(),
        "notes": [],
        "run": {"seconds": 61.2, "scored_tokens": 18396, "versions": {"quantkit": "0.1.0"}},
    }
    return Report(**values | changes)


def with_report(artifact: Path, target: Path, **changes: Any) -> Path:
    """A copy of an artifact with a made-up report of suite `quick` inside."""
    path = shutil.copytree(artifact, target)
    write_report(sample_report(read_manifest(path), **changes), path / "evals" / "quick.json")
    return path


def with_output_errors(manifest: Manifest) -> Manifest:
    """The manifest as a calibrated recipe would leave it: layers know the error of their output."""
    layers = [
        layer.model_copy(
            update={"output_error": OutputError(before=0.004 * (n + 1), after=0.001 * (n + 1)), "tokens": 999}
        )
        for n, layer in enumerate(manifest.layers)
    ]
    return manifest.model_copy(update={"layers": layers})
