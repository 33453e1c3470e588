"""On-disk formats. Each is one object with the verbs of `Format`; FORMATS finds it by the recipe's name for it."""

from quantkit.formats.base import Format, StoredLayer
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.int_quantized import IntQuantized

# The two differ in embeddings of 8 bits alone: transformers loads them as int8, vLLM packed.
FORMATS: dict[str, Format] = {
    "compressed-tensors": CompressedTensors(int8_tables=IntQuantized()),
    "compressed-tensors-packed": CompressedTensors(),
}

# What the same names stand for in a recipe that quantises activations too.
INT8_FORMATS: dict[str, Format] = dict.fromkeys(FORMATS, IntQuantized())


def format_of(name: str, int8_activations: bool) -> Format:
    """The format of a recipe or a manifest."""
    return (INT8_FORMATS if int8_activations else FORMATS)[name]


__all__ = ["FORMATS", "Format", "StoredLayer", "format_of"]
