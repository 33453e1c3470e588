"""What was measured of an artifact, as Markdown tables in its model card."""

from pathlib import Path

from quantkit.artifact import CARD_FILE, disk_errors
from quantkit.card import NOT_MEASURED, escape_markdown, model_card, with_quality
from quantkit.files import replace_file
from quantkit.grids import Grid, fidelity_grid, perplexity_grid, task_grid
from quantkit.manifest import read_manifest
from quantkit.report import Report, reports_of

# A card is some pages long; a larger file is not one, and is left alone.
_LARGEST_CARD = 1 << 22


def update_card(artifact: Path) -> str | None:
    """Put the tables of all reports of an artifact into its card, and make the card where there is none.

    Only what stands between the card's markers changes. Returns why nothing was written, or None. Raises ArtifactError
    where the manifest or the disk does not allow it.
    """
    manifest, path = read_manifest(artifact), artifact / CARD_FILE
    if CARD_FILE in manifest.files:
        return f"{path} is the source's and part of the identity: left as it is"
    quality = quality_tables(reports_of(artifact, manifest))
    card: str | None = model_card(manifest, artifact, quality)
    if path.exists() or path.is_symlink():
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _LARGEST_CARD:
            return f"{path} is no card of quantkit: left as it is"
        card = with_quality(path.read_bytes().decode(errors="surrogateescape"), quality)
    if card is None:
        return f"{path} has no place for figures: left as it is (without the file, quantkit eval writes a new one)"
    with disk_errors(path):
        replace_file(path, card.encode(errors="surrogateescape"))
    return None


def quality_tables(reports: dict[str, Report]) -> str:
    """Markdown of every report by its file name: perplexity, fidelity and tasks, each with its interval."""
    return "\n\n".join(_section(name, report) for name, report in reports.items()) or NOT_MEASURED


def markdown_table(grid: Grid) -> str:
    """A grid as a Markdown table; numbers align right."""
    marks = [":--" if n in grid.left | grid.prose else "--:" for n in range(len(grid.heads))]
    head, *rows = ([str(escape_markdown(cell)) for cell in row] for row in [grid.heads, *grid.rows])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, marks, *rows])


def _section(name: str, report: Report) -> str:
    made = f"Measured on these bytes ({report.identity[:12]}) by protocol {report.protocol[:12]}; {name} has all of it."
    beside = f" Base: {report.reference.name}." if report.reference else " Without its base beside it."
    grids = [perplexity_grid(report), fidelity_grid(report), task_grid(report)]
    tables = [markdown_table(grid) for grid in grids if grid.rows]
    return "\n\n".join([f"Suite {escape_markdown(report.suite.name)}. {escape_markdown(made + beside)}", *tables])
