"""JSON Schemas of the documents, generated from their models into manifests/: `python -m quantkit.schemas`."""

import json

from pydantic import BaseModel

from quantkit.data import data_dir
from quantkit.entries import Entry
from quantkit.evaluate.prompts import PromptSet
from quantkit.evaluate.suite import Suite
from quantkit.files import write_file
from quantkit.gates import Policy
from quantkit.manifest import Manifest
from quantkit.recipe import Recipe
from quantkit.report import Report
from quantkit.texts import TextDefinition

DOCUMENTS: dict[str, type[BaseModel]] = {
    "ledger-entry": Entry,
    "manifest": Manifest,
    "policy": Policy,
    "prompts": PromptSet,
    "recipe": Recipe,
    "report": Report,
    "suite": Suite,
    "text": TextDefinition,
}


def schema_text(model: type[BaseModel]) -> str:
    """The JSON Schema of a document as it stands in its file."""
    return json.dumps(model.model_json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every schema."""
    for name, model in DOCUMENTS.items():
        write_file(data_dir("manifests") / f"{name}.schema.json", schema_text(model).encode())


if __name__ == "__main__":
    main()
