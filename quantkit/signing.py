"""Signatures of artifacts by the OpenSSF model-signing library (extra `quantkit[signing]`): local keys, no network.

The signature is a Sigstore bundle over an in-toto statement that lists manifest.json and every file of the identity. It
lies in the artifact as model.sig, outside the identity. What may change after signing (reports, model card, run record)
is left out, and the signature says so: whoever has the library and the public key needs no quantkit to check it.
"""

import base64
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from sys import stderr
from typing import Any

from quantkit.artifact import OUTSIDE_IDENTITY, REPORTS, SIGNATURE_FILE, disk_errors, refuse_changed
from quantkit.errors import ArtifactError, UsageError, one_line
from quantkit.files import replace_file
from quantkit.manifest import MANIFEST_FILE, Manifest, read_manifest

# A bundle lists a line a file; a larger one is not of an artifact.
_LARGEST_SIGNATURE = 1 << 24
_MAKE_KEY = "make one with: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
_MAKE_PUBLIC = "make it with: openssl ec -in key.pem -pubout -out key.pub"


def sign(artifact: Path, key: Path) -> Path:
    """Sign an artifact with an elliptic-curve private key in PEM; returns the signature's place, where it replaces any.

    Raises ArtifactError where the artifact is not what its manifest says or cannot be written, UsageError for a key
    that cannot be used and where the library is not installed.
    """
    hashing, signing, _ = _library()
    manifest = refuse_changed(artifact)
    if SIGNATURE_FILE in manifest.files:
        raise ArtifactError(f"{artifact}: {SIGNATURE_FILE} is the source's, part of the identity", "convert again")
    try:
        signer = signing.Config().use_elliptic_key_signer(private_key=key)
    except Exception as error:
        raise UsageError(
            f"--key {key} is no unencrypted EC private key in PEM ({one_line(error)})", _MAKE_KEY
        ) from None
    signer.set_hashing_config(_hashed(hashing, manifest))
    target = artifact / SIGNATURE_FILE
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / SIGNATURE_FILE
        signer.sign(artifact, made)
        with disk_errors(target):
            replace_file(target, made.read_bytes())
    return target


def signature_problems(artifact: Path, public_key: Path, signature: Path | None = None) -> list[str]:
    """Why an artifact is not signed by `public_key`, one sentence each; empty where it is, in every byte.

    signature: its file, default model.sig in the artifact. Raises UsageError where the key or a named signature cannot
    be read or the library is not installed, and ArtifactError without a readable manifest.
    """
    hashing, _, verifying = _library()
    manifest = read_manifest(artifact)
    try:
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as error:
        raise UsageError(
            f"--public-key {public_key} is no EC public key in PEM ({one_line(error)})", _MAKE_PUBLIC
        ) from None
    path = signature or artifact / SIGNATURE_FILE
    if not path.is_file() or path.is_symlink():
        if signature is not None:
            raise UsageError(f"--signature {signature} is no regular file", "give the file that quantkit sign wrote")
        return [f"unsigned: there is no {SIGNATURE_FILE}"]
    if path.stat().st_size > _LARGEST_SIGNATURE:
        return [f"signature: {path.name} is larger than {_LARGEST_SIGNATURE} bytes"]
    data = path.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        # The bytes that are checked are the ones that are read below, whatever happens to the file meanwhile.
        copy = Path(folder) / SIGNATURE_FILE
        copy.write_bytes(data)
        try:
            with redirect_stdout(stderr):  # the library prints warnings, and stdout is for the result
                verifier.set_hashing_config(_hashed(hashing, manifest)).verify(artifact, copy)
        except Exception as error:  # whatever the library raises on the way, nothing was proved
            return [f"signature: {one_line(error)}"]
    return _not_covered(data, manifest)


def _library() -> tuple[Any, Any, Any]:
    """hashing, signing and verifying of model-signing. Raises UsageError where it is not installed."""
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise UsageError(
            f"signatures need the model-signing library ({one_line(error)})",
            "install it: pip install 'quantkit[signing]'",
        ) from None
    return hashing, signing, verifying


def _hashed(hashing: Any, manifest: Manifest) -> Any:
    """What is hashed: manifest.json and the files of the identity, by SHA-256; links are refused."""
    left_out = (OUTSIDE_IDENTITY | {REPORTS}) - {MANIFEST_FILE} - set(manifest.files)
    return hashing.Config().use_file_serialization(hashing_algorithm="sha256").set_ignored_paths(paths=sorted(left_out))


def _not_covered(bundle: bytes, manifest: Manifest) -> list[str]:
    """What a good signature does not speak of: its signer may have told the library to leave out anything."""
    try:
        payload = json.loads(base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"]))
        resources = payload["predicate"]["resources"]
        signed = {entry["name"]: entry["digest"] for entry in resources if entry["algorithm"] == "sha256"}
    except (ValueError, LookupError, TypeError):
        return ["signature: its statement lists no files by SHA-256; sign again with quantkit sign"]
    wanted = {MANIFEST_FILE: manifest.identity} | {name: record.sha256 for name, record in manifest.files.items()}
    return [f"signature: it does not cover {name}" for name in sorted(wanted) if signed.get(name) != wanted[name]]
