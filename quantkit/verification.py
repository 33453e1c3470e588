"""`quantkit verify`: an artifact by component, and the reports in it, so that a change names what it may have moved."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import REPORTS, changed_files, differences
from quantkit.components import SHARED, component_hashes
from quantkit.errors import ReportError
from quantkit.manifest import COMPONENTS, Component, Manifest, component_of, read_manifest
from quantkit.report import read_report
from quantkit.seals import page_intact


@dataclass(frozen=True)
class ComponentState:
    """A component as recorded. files, size: those under its own name; changed: whether its content is another now."""

    sha256: str | None
    files: int
    size: int
    changed: bool


@dataclass(frozen=True)
class Verification:
    """Everything that verify found. reports: for each report and page, what is wrong, or None."""

    identity: str
    components: dict[Component, ComponentState]
    reports: dict[str, str | None]
    problems: list[str]

    def values(self) -> dict[str, Any]:
        """The same as plain values for --json."""
        return {
            "identity": self.identity,
            "verified": not self.problems,
            "problems": self.problems,
            "components": {name: vars(state) for name, state in self.components.items()},
            "reports": self.reports,
        }


def verify_components(artifact: Path) -> Verification:
    """Every byte of an artifact against its manifest, by component, and every report and page in it against its hash.

    A report or page that was changed is a problem, though the identity does not cover it. Raises ArtifactError where
    there is no readable manifest.
    """
    manifest = read_manifest(artifact)
    changed = changed_files(artifact, manifest)
    problems = differences(artifact, manifest, changed)
    found = [path for path in sorted((artifact / REPORTS).glob("*")) if path.is_file() and not path.is_symlink()]
    reports = {f"{REPORTS}/{path.name}": _report_problem(path) for path in found if path.suffix in {".json", ".html"}}
    problems += [f"changed: {name} ({problem})" for name, problem in reports.items() if problem is not None]
    return Verification(manifest.identity, _states(artifact, manifest, changed), reports, problems)


def _states(artifact: Path, manifest: Manifest, changed: Iterable[str]) -> dict[Component, ComponentState]:
    recorded = manifest.component_sha256
    now = component_hashes(artifact, manifest.components, recorded)
    moved = {name for name in COMPONENTS if now[name] != recorded[name]}
    for name in changed:
        # What changed in a file of two components shows in their contents, unless it was only the way of writing it.
        if name not in SHARED or not moved & {component_of(name), SHARED[name][1]}:
            moved.add(component_of(name))
    return {
        name: ComponentState(recorded[name], len(files), sum(record.size for record in files), name in moved)
        for name, files in ((name, manifest.components[name]) for name in COMPONENTS)
    }


def _report_problem(path: Path) -> str | None:
    """Why a report or page is not as it was written; None where it is."""
    if path.suffix == ".html":
        try:
            intact = page_intact(path.read_bytes())
        except OSError:
            intact = False
        return None if intact else "page; write it again with quantkit report"
    try:
        read_report(path)
    except ReportError as error:
        return f"report: {error.problem.replace(str(path), path.name)}; {error.action}"
    return None
