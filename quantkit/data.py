"""Where the shipped data lies (recipes/, calib/, evals/, manifests/), in a wheel and in a working tree."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_dir(kind: str) -> Path:
    """The shipped folder `kind`: inside the package in a wheel, beside it in an editable install."""
    shipped = _PACKAGE / "_data" / kind
    return shipped if shipped.is_dir() else _PACKAGE.parent / kind


def shipped_names(kind: str) -> list[str]:
    """Names of the shipped YAML documents in folder `kind`, sorted."""
    return sorted(path.stem for path in data_dir(kind).glob("*.yaml"))
