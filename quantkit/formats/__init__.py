"""On-disk formats. Each is one object with the four verbs of `Format`; FORMATS finds it by the recipe's name for it."""

from quantkit.formats.base import Format, StoredLayer
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.int_quantized import IntQuantized

FORMATS: dict[str, Format] = {"compressed-tensors": CompressedTensors()}

# What the same name stands for in a recipe that quantises activations too.
INT8_FORMATS: dict[str, Format] = {"compressed-tensors": IntQuantized()}


def format_of(name: str, int8_activations: bool) -> Format:
    """The format of a recipe or a manifest."""
    return (INT8_FORMATS if int8_activations else FORMATS)[name]


__all__ = ["FORMATS", "Format", "StoredLayer", "format_of"]
