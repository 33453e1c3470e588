"""Signatures: what they cover, what they do not, and that nothing but the right key over the right bytes passes."""

import base64
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import seal_run, verify
from quantkit.canonical import canonical_json, sha256_bytes, sha256_file
from quantkit.checkpoint import open_checkpoint
from quantkit.components import component_hashes
from quantkit.errors import ArtifactError, UsageError
from quantkit.manifest import Manifest, read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.signing import sign, signature_problems

model_signing = pytest.importorskip("model_signing.signing", reason="needs the extra quantkit[signing]")
hashing = pytest.importorskip("model_signing.hashing")
verifying = pytest.importorskip("model_signing.verifying")

from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def write_keys(folder: Path, private: Any, password: bytes | None = None) -> tuple[Path, Path]:
    """The two files of a key: private, public."""
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    (folder / "key.pem").write_bytes(private.private_bytes(PEM, PKCS8, secret))
    public = private.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pub").write_bytes(public)
    return folder / "key.pem", folder / "key.pub"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_keys(tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], keys: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(shutil.copytree(zoo("llama"), tmp_path_factory.mktemp("source") / "tiny"))
    (source / "README.md").write_text("# Tiny\n")
    plan = make_plan(open_checkpoint(str(source)), load_recipe("rtn-g64"))
    path = convert(plan, tmp_path_factory.mktemp("signed") / "artifact").path
    sign(path, keys[0])
    return path


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    """A signed artifact that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "artifact"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_signature_is_found_good_and_changes_neither_identity_nor_verification(
    artifact: Path, keys: tuple[Path, Path]
) -> None:
    before = read_manifest(artifact).identity
    assert signature_problems(artifact, keys[1]) == []
    assert sign(artifact, keys[0]) == artifact / "model.sig"  # again, in the place of the first
    assert signature_problems(artifact, keys[1]) == verify(artifact) == []
    assert read_manifest(artifact).identity == before


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_curves_sign_too(artifact: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    key, public = write_keys(tmp_path, ec.generate_private_key(curve))
    sign(artifact, key)
    assert signature_problems(artifact, public) == []


def test_whoever_has_the_library_needs_no_quantkit(artifact: Path, keys: tuple[Path, Path]) -> None:
    """Also after reports and card have changed: the signature itself says what it leaves out."""
    (artifact / "evals").mkdir()
    (artifact / "evals" / "quick.json").write_text("{}")
    (artifact / "README.md").write_text("edited")
    (artifact / "run.json").unlink()
    check = verifying.Config().use_elliptic_key_verifier(public_key=keys[1])
    check.verify(artifact, artifact / "model.sig")
    assert signature_problems(artifact, keys[1]) == []
    flip(artifact / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        check.verify(artifact, artifact / "model.sig")


def test_a_change_in_any_covered_file_is_found(artifact: Path, keys: tuple[Path, Path]) -> None:
    covered = sorted(read_manifest(artifact).files)
    assert {"model.safetensors", "config.json", "tokenizer.json", "LICENSE", "source/README.md"} <= set(covered)
    for name in covered:
        good = (artifact / name).read_bytes()
        flip(artifact / name)
        assert any(name in problem for problem in signature_problems(artifact, keys[1])), name
        (artifact / name).write_bytes(good)
    assert signature_problems(artifact, keys[1]) == []


def test_a_forged_artifact_that_agrees_with_itself_is_not_signed(artifact: Path, keys: tuple[Path, Path]) -> None:
    """Weights, manifest and run record changed together pass `verify`: only the signature knows better."""
    flip(artifact / "model.safetensors")
    values = json.loads((artifact / "manifest.json").read_bytes())
    values["components"]["weights"][0]["sha256"] = sha256_file(artifact / "model.safetensors")
    forged = Manifest.model_validate_json(canonical_json(values))
    values["component_sha256"] = component_hashes(artifact, forged.components, forged.component_sha256)
    (artifact / "manifest.json").write_bytes(canonical_json(values))
    run = json.loads((artifact / "run.json").read_bytes())
    run["identity"] = sha256_bytes(canonical_json(values))
    del run["sha256"]
    (artifact / "run.json").write_bytes(seal_run(run))
    assert verify(artifact) == []
    problems = signature_problems(artifact, keys[1])
    assert problems
    assert "model.safetensors" in problems[0]


def test_a_file_added_and_a_file_removed_are_found(artifact: Path, keys: tuple[Path, Path]) -> None:
    (artifact / "extra.py").write_text("")
    assert "extra.py" in signature_problems(artifact, keys[1])[0]
    (artifact / "extra.py").unlink()
    (artifact / "LICENSE").unlink()
    assert "LICENSE" in signature_problems(artifact, keys[1])[0]


def test_another_key_is_refused(artifact: Path, tmp_path: Path) -> None:
    _, public = write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    assert len(signature_problems(artifact, public)) == 1


def test_a_statement_under_a_signature_of_another_is_refused(artifact: Path, keys: tuple[Path, Path]) -> None:
    bundle = json.loads((artifact / "model.sig").read_bytes())
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    payload["predicate"]["resources"] = payload["predicate"]["resources"][:1]
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    (artifact / "model.sig").write_text(json.dumps(bundle))
    assert len(signature_problems(artifact, keys[1])) == 1


def test_a_good_signature_that_leaves_out_the_weights_is_refused(artifact: Path, keys: tuple[Path, Path]) -> None:
    """Its own list of what it ignores would let any weights pass."""
    left_out = ["model.safetensors", "run.json", "README.md", "model.sig"]
    signer = model_signing.Config().use_elliptic_key_signer(private_key=keys[0])
    signer.set_hashing_config(hashing.Config().set_ignored_paths(paths=left_out)).sign(artifact, artifact / "model.sig")
    verifying.Config().use_elliptic_key_verifier(public_key=keys[1]).verify(artifact, artifact / "model.sig")
    assert signature_problems(artifact, keys[1]) == ["signature: it does not cover model.safetensors"]


def test_a_signature_that_was_taken_away_is_a_no(artifact: Path, keys: tuple[Path, Path]) -> None:
    elsewhere = (artifact / "model.sig").rename(artifact.parent / "kept.sig")
    assert signature_problems(artifact, keys[1]) == ["unsigned: there is no model.sig"]
    assert signature_problems(artifact, keys[1], elsewhere) == []
    (artifact / "model.sig").symlink_to(elsewhere)
    assert signature_problems(artifact, keys[1]) == ["unsigned: there is no model.sig"]
    with pytest.raises(UsageError, match="nowhere is no regular file"):
        signature_problems(artifact, keys[1], Path("nowhere"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"verificationMaterial": {}}', b"{}" * 3],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_what_is_no_signature_is_one_readable_no(artifact: Path, keys: tuple[Path, Path], content: bytes) -> None:
    (artifact / "model.sig").write_bytes(content)
    problems = signature_problems(artifact, keys[1])
    assert len(problems) == 1
    assert "\n" not in problems[0]


def test_a_changed_artifact_is_not_signed(artifact: Path, keys: tuple[Path, Path]) -> None:
    flip(artifact / "config.json")
    with pytest.raises(ArtifactError, match=r"changed: config\.json"):
        sign(artifact, keys[0])


def test_keys_that_cannot_be_used_are_refused_with_the_command_that_makes_one(
    artifact: Path, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    locked = write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()), b"secret")[0]
    other = tmp_path / "rsa"
    other.mkdir()
    rsa_key, rsa_public = write_keys(other, rsa.generate_private_key(65537, 2048))
    for key in (locked, rsa_key, keys[1], tmp_path / "none.pem", artifact):
        with pytest.raises(UsageError, match="openssl ecparam") as caught:
            sign(artifact, key)
        assert str(key) in caught.value.problem
        assert "\n" not in str(caught.value)
    for public in (rsa_public, keys[0], tmp_path / "none.pub"):
        with pytest.raises(UsageError, match="openssl ec -in"):
            signature_problems(artifact, public)


def test_without_the_library_the_extra_is_named(
    artifact: Path, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(UsageError, match=r"pip install 'quantkit\[signing\]'"):
        sign(artifact, keys[0])
    with pytest.raises(UsageError, match=r"pip install 'quantkit\[signing\]'"):
        signature_problems(artifact, keys[1])
