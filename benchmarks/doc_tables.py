"""Tables of measured figures in docs/, each between two markers that name it: `<!-- name -->` and `<!-- /name -->`."""

from pathlib import Path
from typing import Any

from rtn_table import ROOT, say, write_json


def publish(result: dict[str, Any], path: Path, document: str, name: str, table: str) -> None:
    """Write what a benchmark measured: its JSON to `path`, and its table into a document; both below the project."""
    write_json(result, ROOT / path)
    put_table(document, name, table)
    say(f"wrote {path} and {document}")


def put_table(document: str, name: str, table: str) -> None:
    """Replace what stands between the markers `name` of a document. Raises ValueError where it has no such markers."""
    path = ROOT / document
    before, opening, rest = path.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(f"{document} has no table named {name}")
    path.write_text(f"{before}{opening}{table}\n{closing}{after}", encoding="utf-8")
