"""Standard statements about an artifact, as plain JSON: in-toto provenance with SLSA fields, and a CycloneDX ML-BOM.

Both are made from the manifest, the run record and the reports, and from nothing else; the same artifact gives the same
bytes. They say what quantkit recorded: who signs a statement vouches for it.
"""

import json
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from quantkit.artifact import disk_errors, refuse_changed
from quantkit.canonical import sha256_file
from quantkit.card import carried_facts
from quantkit.checkpoint import config_values
from quantkit.errors import ArtifactError, UsageError
from quantkit.files import replace_file
from quantkit.manifest import MANIFEST_FILE, RUN_FILE, Manifest
from quantkit.report import Report, as_metric, refuse_harm, reports_of
from quantkit.schema import read_json
from quantkit.tables import flat_metrics

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PROVENANCE_TYPE = "https://slsa.dev/provenance/v1"
# What `quantkit convert` is, as a type of build: docs/attestations.md says what its parameters mean.
BUILD_TYPE = "pkg:pypi/quantkit#convert/v1"
CYCLONEDX_VERSION = "1.6"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "pkg:pypi/quantkit")


def attest(artifact: Path, format: str, builder: str | None = None) -> dict[str, Any]:
    """The statement of `format` (slsa or cyclonedx) about an artifact of which every byte is as recorded.

    builder: URI of the platform that ran the conversion, for slsa; default the quantkit that did. Raises ArtifactError
    where the artifact is not what its manifest says, UsageError for another format, or a builder that is no URI.
    """
    if format not in FORMATS:
        raise UsageError(f"--format {format} is not known", f"use one of: {', '.join(FORMATS)}")
    if builder is not None and (format != "slsa" or ":" not in builder or not builder.isprintable() or " " in builder):
        raise UsageError(
            f"--builder-id {builder!r} is no URI, or not for {format}", "give it with --format slsa, as in https://..."
        )
    manifest = refuse_changed(artifact)
    return FORMATS[format](artifact, manifest, builder)


def write_statement(statement: dict[str, Any], path: Path) -> None:
    """Write a statement as a whole. Raises ArtifactError where it cannot be written, ReportError inside an artifact."""
    refuse_harm(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(statement, indent=2, sort_keys=True).encode() + b"\n")


def _slsa(artifact: Path, manifest: Manifest, builder: str | None) -> dict[str, Any]:
    """An in-toto Statement v1 with SLSA provenance v1 as its predicate."""
    tool = _package("quantkit", manifest.versions.get("quantkit", ""))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in _subjects(manifest).items()],
        "predicateType": PROVENANCE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "model": manifest.source.name,
                    "revision": manifest.source.revision,
                    "recipe": manifest.recipe,
                    "calibration": manifest.calibration,
                },
                "internalParameters": {"format": manifest.format, "recipe_sha256": manifest.recipe_sha256},
                "resolvedDependencies": _dependencies(manifest),
            },
            "runDetails": {
                "builder": {"id": builder or tool, "version": manifest.versions},
                "metadata": _run_metadata(artifact, manifest),
                "byproducts": [
                    {"name": name, "digest": {"sha256": sha256_file(artifact / name)}, "mediaType": "application/json"}
                    for name in reports_of(artifact, manifest)
                ],
            },
        },
    }


def _subjects(manifest: Manifest) -> dict[str, str]:
    """SHA-256 by name of all that the identity covers; the manifest itself first."""
    return {MANIFEST_FILE: manifest.identity} | {name: r.sha256 for name, r in sorted(manifest.files.items())}


def _dependencies(manifest: Manifest) -> list[dict[str, Any]]:
    """What the build took: the source's files, the calibration texts, and the packages that determine the numbers."""
    source = manifest.source
    hub = f"pkg:huggingface/{source.name}@{source.revision}" if source.revision else None
    files = [
        {"name": f"{source.name}/{r.name}", "digest": {"sha256": r.sha256}} | ({"uri": hub} if hub else {})
        for r in source.files
    ]
    texts = [{"name": f"calibration/{name}", "digest": {"sha256": digest}} for name, digest in _texts(manifest)]
    packages = [{"uri": _package(name, version)} for name, version in sorted(manifest.versions.items())]
    return [*files, *texts, *packages]


def _texts(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and SHA-256 of each calibration text."""
    parts = (manifest.calibration or {}).get("parts")
    texts = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [(str(part["text"]), str(part["text_sha256"])) for part in texts if {"text", "text_sha256"} <= set(part)]


def _run_metadata(artifact: Path, manifest: Manifest) -> dict[str, Any]:
    """When the run began and ended, where its record is there; its name is the identity of what it made."""
    found: dict[str, Any] = {"invocationId": manifest.identity}
    run = read_json(artifact / RUN_FILE, ArtifactError, "restore it") if (artifact / RUN_FILE).is_file() else {}
    try:
        started = datetime.strptime(run["started"], "%Y-%m-%dT%H:%M:%SZ")
        finished = started + timedelta(seconds=round(run["seconds"]))
    except (LookupError, TypeError, ValueError, OverflowError):
        return found
    return found | {"startedOn": f"{started.isoformat()}Z", "finishedOn": f"{finished.isoformat()}Z"}


def _cyclonedx(artifact: Path, manifest: Manifest, _: str | None) -> dict[str, Any]:
    """A CycloneDX BOM: the model with its card, its files, and what it was made from."""
    model, base = f"model:{manifest.identity}", f"base:{manifest.source_identity}"
    files = [_file(f"file:{name}", name, digest) for name, digest in _subjects(manifest).items()]
    texts = [{"type": "data", "bom-ref": f"data:{n}"} | _named(*text) for n, text in enumerate(_texts(manifest))]
    packages = [
        {"type": "library", "bom-ref": _package(name, version), "name": name, "version": version}
        | {"purl": _package(name, version)}
        for name, version in sorted(manifest.versions.items())
    ]
    source = {
        "type": "machine-learning-model",
        "bom-ref": base,
        "name": manifest.source.name,
        "version": manifest.source.revision or manifest.source_identity,
        "components": [_file(f"base-file:{r.name}", r.name, r.sha256) for r in manifest.source.files],
    }
    made_of = [component["bom-ref"] for component in [source, *texts, *packages]]
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{CYCLONEDX_VERSION}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": CYCLONEDX_VERSION,
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, manifest.identity)}",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application"} | {key: packages[0][key] for key in ("name", "version")}]},
            "component": _model(artifact, manifest, model),
        },
        "components": [*files, source, *texts, *packages],
        "dependencies": [{"ref": model, "dependsOn": made_of}],
    }


def _model(artifact: Path, manifest: Manifest, reference: str) -> dict[str, Any]:
    """The artifact as a machine-learning model: its licence, architecture, and every figure of its reports."""
    config = config_values(artifact)
    names = config.get("architectures")
    family, license = config.get("model_type"), carried_facts(manifest, artifact).get("license")
    licenses = [license] if isinstance(license, str) else license or []
    figures = [figure for report in reports_of(artifact, manifest).values() for figure in _figures(report)]
    parameters: dict[str, Any] = {"task": "text-generation"}
    if isinstance(family, str):
        parameters["architectureFamily"] = family
    if isinstance(names, list) and names and isinstance(names[0], str):
        parameters["modelArchitecture"] = names[0]
    bits = manifest.totals.bits_per_weight
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": f"{manifest.source.name} {manifest.recipe['name']}",
        "version": manifest.identity,
        "hashes": [{"alg": "SHA-256", "content": manifest.identity}],
        **({"licenses": [{"license": {"name": name}} for name in licenses]} if licenses else {}),
        "modelCard": {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": figures}},
        "properties": [
            {"name": "quantkit:recipe_sha256", "value": manifest.recipe_sha256},
            {"name": "quantkit:bits_per_weight", "value": "none" if bits is None else f"{bits:g}"},
            {"name": "quantkit:fallbacks", "value": str(len(manifest.fallbacks))},
        ],
    }


def _figures(report: Report) -> list[dict[str, Any]]:
    """The metrics of a report, but for its breakdown, each with its interval and its suite."""
    found = []
    for path, value in flat_metrics({name: value for name, value in report.metrics.items() if name != "breakdown"}):
        metric = as_metric(value)
        if metric is None:
            continue
        figure: dict[str, Any] = {"type": path, "value": f"{metric['value']:.6g}", "slice": report.suite.name}
        if "low" in metric and "high" in metric:
            figure["confidenceInterval"] = {
                "lowerBound": f"{metric['low']:.6g}", "upperBound": f"{metric['high']:.6g}",
            }  # fmt: skip
        found.append(figure)
    return found


def _file(reference: str, name: str, digest: str) -> dict[str, Any]:
    return {"type": "file", "bom-ref": reference} | _named(name, digest)


def _named(name: str, digest: str) -> dict[str, Any]:
    return {"name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}


def _package(name: str, version: str) -> str:
    """The package URL of a PyPI package."""
    return f"pkg:pypi/{name.lower()}@{version}"


FORMATS: dict[str, Callable[[Path, Manifest, str | None], dict[str, Any]]] = {"slsa": _slsa, "cyclonedx": _cyclonedx}
