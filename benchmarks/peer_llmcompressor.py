"""Quantise a checkpoint with llm-compressor; runs in that tool's own environment, started by peers.py.

    python peer_llmcompressor.py MODEL TOKENS.json CASE OUTPUT

Prints one JSON line: versions, CPU and wall seconds of the quantisation alone (loading and saving are not counted), and
the peak memory of the process in bytes.
"""

import json
import resource
import sys
import time
from importlib.metadata import version

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM


def scheme(symmetric):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": symmetric}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


CASES = {
    "rtn-zp": lambda: [QuantizationModifier(**scheme(False))],
    "gptq-sym": lambda: [GPTQModifier(**scheme(True))],
    "gptq-zp": lambda: [GPTQModifier(**scheme(False))],
    "awq-zp": lambda: [AWQModifier(), QuantizationModifier(**scheme(False))],
}


def main():
    model_path, tokens_path, case, output = sys.argv[1:]
    with open(tokens_path, encoding="utf-8") as stream:
        ids = json.load(stream)
    # It pins memory for an accelerator that is not there, and stops.
    IntermediatesCache.pin_memory = lambda *_, **__: None
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    rows = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]})
    wall, cpu = time.time(), time.process_time()
    oneshot(
        model=model,
        dataset=rows,
        recipe=CASES[case](),
        num_calibration_samples=len(ids),
        max_seq_length=len(ids[0]),
        shuffle_calibration_samples=False,
    )
    seconds = {"wall": round(time.time() - wall, 1), "cpu": round(time.process_time() - cpu, 1)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    model.save_pretrained(output, save_compressed=True)
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")}
    print(json.dumps({"oneshot_seconds": seconds, "peak_resident_bytes": peak, "versions": versions}))


if __name__ == "__main__":
    main()
