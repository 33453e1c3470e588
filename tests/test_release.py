"""Promotion and rollback: nothing reaches a channel but through verify and gate, and a rollback restores all of it."""

import json
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quantkit.canonical import sha256_bytes, sha256_file
from quantkit.checkpoint import open_checkpoint
from quantkit.diff import diff, named_manifest
from quantkit.entries import Entry, Stamp
from quantkit.errors import ArtifactError, LedgerError, ReportError, RestoreError
from quantkit.gates import Policy
from quantkit.ledger import check_ledger, read_ledger
from quantkit.manifest import read_manifest
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.release import promote, rollback, state, unrestorable
from quantkit.report import SuiteRecord, write_report
from tests.samples import sample_report, with_report

STAMP = Stamp(by="ana", at="2026-01-31T09:00:00Z")
POLICY = Policy(name="mine", limits=[{"metric": "fidelity.kl_mean", "max": 0.1}])
STRICT = Policy(name="strict", limits=[{"metric": "fidelity.kl_mean", "max": 0.001}])
_FORK = multiprocessing.get_context("fork")


@dataclass
class Place:
    """Artifacts a and b (another chat template, scheme and generation defaults), and the ledger beside them."""

    root: Path

    @property
    def ledger(self) -> Path:
        return self.root / "manifests"

    def promote(self, name: str, channel: str = "production", policy: Policy = POLICY) -> Entry | None:
        return promote(self.root / name, channel, policy, self.ledger, STAMP).entry

    def rollback(self, channel: str = "production", **options: Any) -> Entry:
        return rollback(channel, self.ledger, STAMP, **options)

    def holds(self, channel: str = "production") -> str | None:
        held = read_ledger(self.ledger).held(channel)
        return held[-1].release.identity if held else None

    def identity(self, name: str) -> str:
        return read_manifest(self.root / name).identity


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("release")
    changed = shutil.copytree(zoo("llama"), root / "changed")
    template = changed / "chat_template.jinja"
    template.write_text("You are terse. " + template.read_text())
    defaults = json.loads((changed / "generation_config.json").read_text())
    (changed / "generation_config.json").write_text(json.dumps(defaults | {"temperature": 0.5, "do_sample": True}))
    for name, source, recipe in (("a", zoo("llama"), "rtn-g64"), ("b", changed, "rtn-int8")):
        convert(make_plan(open_checkpoint(str(source)), load_recipe(recipe)), root / f"bare-{name}")
        with_report(root / f"bare-{name}", root / "artifacts" / name)
    return root / "artifacts"


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Place:
    return Place(shutil.copytree(pristine, tmp_path / "place"))


# Promotion


def test_a_promotion_records_identity_report_policy_verdict_who_when_and_what_was_there(place: Place) -> None:
    first, second = place.promote("a"), place.promote("b")
    assert first is not None
    assert second is not None
    assert first.release.identity == place.identity("a")
    assert first.release.report_sha256 == sha256_file(place.root / "a" / "evals" / "quick.json")
    assert (first.release.policy, first.release.policy_sha256, first.release.verdict) == ("mine", POLICY.sha256, "pass")
    assert first.stamp == STAMP
    assert (first.previous_identity, second.previous_identity) == (None, place.identity("a"))
    assert check_ledger(place.ledger).problems == []


def test_the_evidence_is_kept_when_the_artifact_goes(place: Place) -> None:
    entry = place.promote("a")
    assert entry is not None
    report = (place.root / "a" / "evals" / "quick.json").read_bytes()
    manifest = read_manifest(place.root / "a")
    shutil.rmtree(place.root / "a")
    kept = {name: (place.ledger / "records" / f"{name}.json").read_bytes() for name in entry.release.records}
    assert kept == {
        manifest.identity: manifest.data, sha256_bytes(report): report, POLICY.sha256: POLICY.data,
    }  # fmt: skip
    assert named_manifest(place.ledger / "records" / f"{manifest.identity}.json") == manifest
    assert Policy.model_validate_json(kept[POLICY.sha256]) == POLICY


def test_a_failed_gate_leaves_the_ledger_as_it_was(place: Place) -> None:
    done = promote(place.root / "a", "production", STRICT, place.ledger, STAMP)
    assert done.entry is None
    assert not done.verdict.passed
    assert not place.ledger.exists()
    place.promote("b")
    known = (place.ledger / "ledger.jsonl").read_bytes()
    assert place.promote("a", policy=STRICT) is None
    assert (place.ledger / "ledger.jsonl").read_bytes() == known


def test_an_artifact_with_one_changed_byte_is_not_promoted(place: Place) -> None:
    path = place.root / "a" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = promote(place.root / "a", "production", POLICY, place.ledger, STAMP)
    assert done.entry is None
    assert done.verdict.rows[0].value == "changed: model.safetensors (weights)"


def foreign_reports(place: Place) -> dict[str, dict[str, Any]]:
    """Changes to a report of artifact a that make it one of something else, by what the refusal says."""
    suite = sample_report(read_manifest(place.root / "a")).suite
    return {
        "is the report of": {"identity": place.identity("b")},
        "was made with another suite than quick": {"suite": SuiteRecord(name="quick", sha256="0" * 64, limit=None)},
        "cut short by --limit 4": {"suite": suite.model_copy(update={"limit": 4})},
        "protocol version 0, this quantkit measures with 1": {"protocol_record": {"version": 0}},
        "is not that of its protocol record": {"protocol": "0" * 64},
        "which is not the source": {
            "reference": sample_report(read_manifest(place.root / "b")).subject
        },
    }  # fmt: skip


def test_reports_of_other_bytes_suites_protocols_references_and_cut_runs_are_refused_with_the_reason(
    place: Place,
) -> None:
    manifest = read_manifest(place.root / "a")
    for words, changes in foreign_reports(place).items():
        write_report(sample_report(manifest, **changes), place.root / "a" / "evals" / "quick.json")
        with pytest.raises(ReportError, match=words):
            place.promote("a")
    (place.root / "a" / "evals" / "quick.json").unlink()
    with pytest.raises(ReportError, match=r"quick\.json does not exist; run quantkit eval"):
        place.promote("a")
    assert not place.ledger.exists()


def test_an_edited_report_is_not_promoted_on(place: Place) -> None:
    path = place.root / "a" / "evals" / "quick.json"
    path.write_text(path.read_text().replace('"value": 0.9', '"value": 0.99', 1))
    with pytest.raises(ReportError, match="was changed after it was written"):
        place.promote("a")


def test_a_report_may_lie_elsewhere(place: Place) -> None:
    elsewhere = (place.root / "a" / "evals" / "quick.json").rename(place.root / "kept.json")
    done = promote(place.root / "a", "production", POLICY, place.ledger, STAMP, report=elsewhere)
    assert done.entry is not None
    assert done.entry.release.report_sha256 == sha256_file(elsewhere)


def test_an_artifact_that_changes_while_it_is_judged_is_not_promoted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    import quantkit.release as module

    real = module.gate

    def slow(*arguments: Any) -> Any:
        verdict = real(*arguments)
        write_report(sample_report(read_manifest(place.root / "a"), notes=["newer"]), arguments[2])
        return verdict

    monkeypatch.setattr(module, "gate", slow)
    with pytest.raises(ReportError, match="was changed while it was judged"):
        place.promote("a")
    assert not place.ledger.exists()


def test_a_channel_without_a_name_and_an_artifact_without_a_manifest_are_errors(place: Place) -> None:
    with pytest.raises(LedgerError, match="cannot name a channel"):
        place.promote("a", "../production")
    with pytest.raises(ArtifactError, match="is not a directory"):
        place.promote("nothing")


def test_the_same_arguments_give_the_same_ledger(place: Place, tmp_path: Path) -> None:
    other = Place(shutil.copytree(place.root, tmp_path / "other"))
    for where in (place, other):
        where.promote("a")
        where.promote("b")
        where.rollback()
    for name in ("ledger.jsonl", "ledger.head"):
        assert (place.ledger / name).read_bytes() == (other.ledger / name).read_bytes()


def test_an_artifact_outside_the_ledgers_folder_is_kept_by_its_full_path(place: Place, tmp_path: Path) -> None:
    far = shutil.copytree(place.root / "a", tmp_path / "far" / "a")
    entry = promote(far, "canary", POLICY, place.ledger, STAMP).entry
    near = place.promote("a")
    assert entry is not None
    assert near is not None
    assert (entry.release.artifact, near.release.artifact) == (str(far), "../a")


# Rollback


def test_a_rollback_restores_weights_template_and_defaults_together(place: Place) -> None:
    place.promote("a")
    place.promote("b")
    apart = diff(read_manifest(place.root / "a"), read_manifest(place.root / "b"))
    assert {name for name, part in apart.components.items() if not part.same} == {
        "weights", "scheme", "chat_template", "system_prompt", "generation",
    }  # fmt: skip
    entry = place.rollback()
    assert (entry.action, entry.restores) == ("rollback", 1)
    held = state(read_ledger(place.ledger))["production"]
    assert held["identity"] == place.identity("a")
    restored = named_manifest(place.ledger / "records" / f"{held['identity']}.json")
    assert restored == read_manifest(Path(held["artifact"]))
    assert diff(restored, read_manifest(place.root / "a")).same


def test_a_rollback_is_an_entry_with_the_evidence_of_the_release_that_it_restores(place: Place) -> None:
    first = place.promote("a")
    place.promote("b")
    entry = place.rollback()
    assert first is not None
    assert entry.release == first.release
    assert entry.previous_identity == place.identity("b")
    assert [found.action for found in read_ledger(place.ledger).entries] == ["promote", "promote", "rollback"]
    assert check_ledger(place.ledger).problems == []


def test_there_is_nothing_before_the_first_release(place: Place) -> None:
    with pytest.raises(LedgerError, match=r"nothing was ever released on channel 'production'; channels of .* none"):
        place.rollback()
    place.promote("a")
    with pytest.raises(LedgerError, match="holds its first release: there is none before it"):
        place.rollback()
    place.promote("b")
    place.rollback()
    with pytest.raises(LedgerError, match="holds its first release"):
        place.rollback()
    assert place.holds() == place.identity("a")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (shutil.rmtree, "is not there; pass --artifact"),
        (lambda path: (path / "chat_template.jinja").write_text("x"), r"not whole \(changed: chat_template\.jinja"),
        (lambda path: (path / "generation_config.json").unlink(), r"not whole \(missing: generation_config\.json"),
        (lambda path: shutil.rmtree(path) or shutil.copytree(path.parent / "b", path), "is now the artifact of"),
    ],
)
def test_a_rollback_to_bytes_that_are_gone_is_refused_and_changes_nothing(
    damage: Callable[[Path], Any], words: str, place: Place
) -> None:
    place.promote("a")
    place.promote("b")
    known = (place.ledger / "ledger.jsonl").read_bytes()
    damage(place.root / "a")
    with pytest.raises(RestoreError, match=words):
        place.rollback()
    assert (place.ledger / "ledger.jsonl").read_bytes() == known
    assert len(unrestorable(read_ledger(place.ledger))) == 1


def test_an_artifact_that_was_moved_is_restored_from_where_it_lies_now(place: Place, tmp_path: Path) -> None:
    place.promote("a")
    place.promote("b")
    moved = (place.root / "a").rename(tmp_path / "archive")
    with pytest.raises(RestoreError, match="is now the artifact of"):
        place.rollback(artifact=place.root / "b")
    place.rollback(artifact=moved)
    assert state(read_ledger(place.ledger))["production"]["artifact"] == str(moved)
    assert unrestorable(read_ledger(place.ledger)) == []
    place.promote("b")
    place.rollback()  # the ledger remembers the new place
    assert check_ledger(place.ledger).problems == []


def test_a_channel_that_moves_while_a_rollback_looks_at_bytes_is_not_rolled_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "a"):
        place.promote(name)
    import quantkit.release as module

    real = module.refuse_unrestorable

    def slow(*arguments: Any) -> None:
        real(*arguments)
        monkeypatch.undo()
        place.rollback()

    monkeypatch.setattr(module, "refuse_unrestorable", slow)
    with pytest.raises(LedgerError, match="channel production was changed meanwhile"):
        place.rollback()
    assert len(read_ledger(place.ledger).entries) == 4


def test_the_state_of_each_channel_says_what_it_holds_and_could_go_back_to(place: Place) -> None:
    place.promote("a", "canary")
    place.promote("a")
    place.promote("b")
    found = state(read_ledger(place.ledger))
    assert found["canary"]["before"] is None
    assert found["production"] == {
        "identity": place.identity("b"), "artifact": str(place.root / "b"), "policy": "mine", "by": "ana",
        "at": STAMP.at, "promoted_as": 3, "before": place.identity("a"),
    }  # fmt: skip


# Eight at once


def promote_and_leave(place: Place, start: Any, number: int) -> None:
    start.wait()
    stamp = Stamp(by=f"p{number}", at=STAMP.at)
    name, channel = "ab"[number % 2], ("canary", "production")[number // 4]
    assert promote(place.root / name, channel, POLICY, place.ledger, stamp).entry is not None


def test_eight_processes_that_promote_at_once_lose_no_entry(place: Place) -> None:
    start = _FORK.Barrier(8)
    processes = [_FORK.Process(target=promote_and_leave, args=(place, start, number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 8
    entries = read_ledger(place.ledger).entries
    assert sorted(entry.stamp.by for entry in entries) == [f"p{number}" for number in range(8)]
    assert check_ledger(place.ledger).problems == []
    for channel in ("canary", "production"):
        own = [entry for entry in entries if entry.channel == channel]
        held = [None, *(entry.release.identity for entry in own[:-1])]
        assert [entry.previous_identity for entry in own] == held
