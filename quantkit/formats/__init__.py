"""On-disk formats. Each is one object with the four verbs of `Format`; FORMATS finds it by the recipe's name for it."""

from quantkit.formats.base import Format, StoredLayer
from quantkit.formats.compressed_tensors import CompressedTensors

FORMATS: dict[str, Format] = {"compressed-tensors": CompressedTensors()}

__all__ = ["FORMATS", "Format", "StoredLayer"]
