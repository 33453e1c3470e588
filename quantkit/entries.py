"""What a ledger holds: entries, their chain of hashes, and what they leave on a channel."""

import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, field_validator

from quantkit.canonical import canonical_json, sha256_json
from quantkit.errors import LedgerError
from quantkit.schema import Strict

LEDGER_FILE = "ledger.jsonl"
HEAD_FILE = "ledger.head"
RECORDS = "records"
LEDGER_VERSION: Literal[1] = 1
# What the first entry holds in the place of the line before it.
NOTHING_BEFORE = "0" * 64
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_CHANNEL = "[a-z0-9][a-z0-9._-]{0,63}"
Channel = Annotated[str, Field(pattern=f"^{_CHANNEL}$")]
Action = Literal["promote", "rollback"]


class Stamp(Strict):
    """Who releases, and when (UTC, as 2026-01-31T09:00:00Z). Given by the caller: nothing here asks a clock."""

    by: Annotated[str, Field(min_length=1, max_length=200)]
    at: str

    @field_validator("by")
    @classmethod
    def _is_one_line(cls, value: str) -> str:
        if not value.isprintable() or value != value.strip():
            raise ValueError("not one line of readable text")
        return value

    @field_validator("at")
    @classmethod
    def _is_a_time(cls, value: str) -> str:
        with suppress(ValueError):
            if datetime.strptime(value, TIME_FORMAT).strftime(TIME_FORMAT) == value:
                return value
        raise ValueError(f"{value!r} is not a time like 2026-01-31T09:00:00Z")


class Release(Strict):
    """What an entry says of an artifact: its identity and place, and the evidence on which it was released.

    artifact: its directory, relative to the ledger's where it lies beside or under it, else absolute.
    """

    identity: Digest
    artifact: Annotated[str, Field(min_length=1)]
    report_sha256: Digest
    policy: str
    policy_sha256: Digest
    verdict: Literal["pass"]

    @property
    def records(self) -> tuple[str, str, str]:
        """The hashes under which its manifest, report and policy are kept."""
        return self.identity, self.report_sha256, self.policy_sha256


class Entry(Strict):
    """One line. previous_identity: what the channel held before; restores: the entry that a rollback goes back to.

    previous_sha256: `sha256` of the entry before; sha256: of the canonical JSON of everything else in this one.
    """

    schema_version: Literal[1]
    sequence: Annotated[int, Field(ge=1)]
    action: Action
    channel: Channel
    release: Release
    stamp: Stamp
    previous_identity: Digest | None
    restores: int | None
    previous_sha256: Digest
    sha256: Digest

    @property
    def line(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    @property
    def seal(self) -> str:
        """What `sha256` has to be."""
        return sha256_json(self.model_dump(mode="json", exclude={"sha256"}))


class Head(Strict):
    """How many entries a ledger has, and the hash of the last."""

    entries: Annotated[int, Field(ge=1)]
    sha256: Digest


@dataclass(frozen=True)
class Held:
    """A release that a channel holds, or could go back to. sequence: of its promotion; stamp: of what put it there."""

    sequence: int
    release: Release
    stamp: Stamp


def held_after(held: list[Held], entry: Entry) -> list[Held]:
    """What a channel holds after one more entry of its own."""
    if entry.action == "rollback":
        kept = [release for release in held if release.sequence < (entry.restores or 0)]
        return [*kept, Held(entry.restores or 0, entry.release, entry.stamp)]
    if held and held[-1].release.identity == entry.release.identity:
        held = held[:-1]
    return [*held, Held(entry.sequence, entry.release, entry.stamp)]


def refuse_channel(name: str) -> None:
    """Raises LedgerError where a channel cannot have this name."""
    if not re.fullmatch(_CHANNEL, name):
        raise LedgerError(
            f"{name!r} cannot name a channel", "use lower-case letters, digits, '.', '_' and '-', as in production"
        )
