"""Releases: an artifact reaches a channel only through verify and gate, and leaves it for the whole one before it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.artifact import verify
from quantkit.canonical import sha256_bytes
from quantkit.entries import Entry, Held, Release, Stamp, refuse_channel
from quantkit.errors import LedgerError, QuantkitError, ReportError, RestoreError, UsageError
from quantkit.gates import Policy, Verdict, default_report, gate
from quantkit.ledger import Ledger, locked, read_ledger
from quantkit.manifest import read_manifest


@dataclass(frozen=True)
class Promotion:
    """What came of a promotion: the gate's verdict, and the ledger's new entry where it passed."""

    verdict: Verdict
    entry: Entry | None


def promote(
    artifact: Path, channel: str, policy: Policy, ledger: Path, stamp: Stamp, *, report: Path | None = None
) -> Promotion:
    """Verify and gate an artifact, and where it passes put it on a channel. report: default that of the policy's suite.

    Raises what the gate raises where it cannot judge, and LedgerError: no name for a channel, or a ledger that is
    damaged or cannot be written. A verdict that is no pass leaves the ledger as it is.
    """
    refuse_channel(channel)
    read_ledger(ledger)  # a damaged one is said before the minutes that verifying may take
    path = report or default_report(artifact, policy)
    verdict = gate(artifact, policy, path)
    if not verdict.passed:
        return Promotion(verdict, None)
    manifest, evidence = read_manifest(artifact), path.read_bytes()
    if manifest.identity != verdict.identity or sha256_bytes(evidence) != verdict.report_sha256:
        raise ReportError(f"{artifact} or its report was changed while it was judged", "run the same command again")
    release = Release(
        identity=verdict.identity,
        artifact=_place(artifact, ledger),
        report_sha256=verdict.report_sha256,
        policy=policy.name,
        policy_sha256=policy.sha256,
        verdict="pass",
    )
    records = dict(zip(release.records, (manifest.data, evidence, policy.data), strict=True))
    with locked(ledger) as known:
        return Promotion(verdict, known.append("promote", channel, release, stamp, records).entries[-1])


def rollback(channel: str, ledger: Path, stamp: Stamp, *, artifact: Path | None = None) -> Entry:
    """Put back the release that a channel held before the one it holds: the complete artifact, under its manifest.

    artifact: where it lies now, if it was moved. Raises LedgerError where there is nothing to go back to or the ledger
    is damaged, and RestoreError where the artifact is gone or one byte of it changed.
    """
    refuse_channel(channel)
    target = _target(read_ledger(ledger), channel)
    release = target.release
    if artifact is not None:
        release = release.model_copy(update={"artifact": _place(artifact, ledger)})
    refuse_unrestorable(read_ledger(ledger).place(release), release.identity)
    with locked(ledger) as known:
        if _target(known, channel) != target:
            raise LedgerError(f"channel {channel} was changed meanwhile", "look at quantkit ledger, and decide again")
        return known.append("rollback", channel, release, stamp, {}).entries[-1]


def refuse_unrestorable(artifact: Path, identity: str) -> None:
    """Raises RestoreError where `artifact` is not, byte for byte, the one of `identity`."""
    moved = "pass --artifact with the place where it lies now, or promote another artifact"
    if not artifact.is_dir():
        raise RestoreError(f"{artifact}, the artifact of {identity[:12]}, is not there", moved)
    found = read_manifest(artifact).identity
    if found != identity:
        raise RestoreError(f"{artifact} is now the artifact of {found[:12]}, not of {identity[:12]}", moved)
    problems = verify(artifact)
    if problems:
        raise RestoreError(
            f"{artifact}, the artifact of {identity[:12]}, is not whole ({problems[0]})",
            "restore its files, or promote another artifact",
        )


def state(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """What each channel holds: identity, place, since when, by whom, and what a rollback would go back to."""
    found = {}
    for channel in ledger.channels:
        *before, now = ledger.held(channel)
        found[channel] = {
            "identity": now.release.identity,
            "artifact": str(ledger.place(now.release)),
            "policy": now.release.policy,
            "by": now.stamp.by,
            "at": now.stamp.at,
            "promoted_as": now.sequence,
            "before": before[-1].release.identity if before else None,
        }
    return found


def unrestorable(ledger: Ledger) -> list[str]:
    """Why a channel could not be served or rolled back as it stands: artifacts that are gone or changed."""
    problems = []
    for channel in ledger.channels:
        for held in ledger.held(channel)[-2:]:
            try:
                refuse_unrestorable(ledger.place(held.release), held.release.identity)
            except QuantkitError as error:
                problems.append(f"channel {channel}: {error.problem}")
    return problems


def _target(ledger: Ledger, channel: str) -> Held:
    """What a rollback of the channel goes back to."""
    held = ledger.held(channel)
    if not held:
        known = ", ".join(ledger.channels) or "none"
        raise LedgerError(f"nothing was ever released on channel {channel!r}", f"channels of this ledger: {known}")
    if len(held) == 1:
        raise LedgerError(
            f"channel {channel} holds its first release: there is none before it", "promote another artifact"
        )
    return held[-2]


def _place(artifact: Path, ledger: Path) -> str:
    """Where an artifact lies, as the ledger keeps it: relative where both lie in one folder, so that it can move."""
    place, home = artifact.resolve(), ledger.resolve().parent
    text = os.path.relpath(place, ledger.resolve()) if place.is_relative_to(home) else place.as_posix()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{artifact!a} is not a name in UTF-8", "rename the artifact's directory") from None
    return text
