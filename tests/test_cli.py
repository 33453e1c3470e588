"""The command line as a contract: one result on stdout, one line for an error, exit codes that scripts depend on."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import cli
from quantkit.checkpoint import open_checkpoint
from quantkit.data import shipped_names
from quantkit.demo import DemoResult
from quantkit.gates import Row, Verdict, load_policy
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import SuiteRecord
from tests.samples import with_report

Zoo = Callable[[str], Path]


@dataclass
class Result:
    """What a command did: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON object on stdout: anything before or behind it is an error."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Iterator[Run]:
    """The command, in this process, in an empty directory; streams are taken at the descriptors."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        return Result(int(left.value.code or 0), *capfd.readouterr())

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def artifact(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return convert(plan, tmp_path_factory.mktemp("cli") / "artifact").path


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    text = tmp_path / "notes.txt"
    text.write_text("The valve opens at 3.5 MPa. " * 12)
    path = tmp_path / "tiny.yaml"
    corpus = f"{{text: {text}, windows: 3, length: 40}}"
    path.write_text(f"name: tiny\nperplexity: [{corpus}]\nfidelity: {corpus}\n")
    return path


# Results


def test_convert_writes_the_default_name_and_prints_a_table(run: Run, zoo: Zoo) -> None:
    found = run("convert", zoo("llama"), "--recipe", "rtn-g64")
    assert found.code == 0
    assert [path.name for path in Path().iterdir()] == ["llama-rtn-g64"]
    for shown in ("14 layers", "bits per weight", "4.25"):
        assert shown in found.out
    assert "identity" in found.err


def test_convert_with_json_prints_one_object_and_messages_go_to_stderr(run: Run, zoo: Zoo, tmp_path: Path) -> None:
    output = tmp_path / "out"
    found = run("convert", zoo("llama"), "--recipe", "rtn-g64-zp", "--output", output, "--json")
    assert found.code == 0
    manifest = (output / "manifest.json").read_bytes()
    assert found.json["path"] == str(output)
    assert found.json["identity"] in found.err
    assert len(found.json["layers"]) == len(json.loads(manifest)["layers"]) == 14
    assert all(layer["scheme"] == "int4 g64 zp" for layer in found.json["layers"])


def test_convert_takes_settings_and_a_shard_size(run: Run, zoo: Zoo) -> None:
    settings = ("--set", "weights.group_size=32", "--set", 'ignore=["re:.*down_proj"]')
    found = run("convert", zoo("llama_untied"), "--recipe", "rtn-g64", *settings, "--shard-size", "40KB", "--json")
    assert found.code == 0
    assert {layer["scheme"] for layer in found.json["layers"]} == {"int4 g32 sym"}
    assert not any(layer["name"].endswith("down_proj") for layer in found.json["layers"])
    assert (Path(found.json["path"]) / "model.safetensors.index.json").is_file()


def test_verify_says_yes_with_0_and_no_with_1(run: Run, artifact: Path, tmp_path: Path) -> None:
    good = run("verify", artifact)
    assert (good.code, good.err) == (0, "")
    assert "every byte is as recorded" in good.out
    assert run("verify", artifact, "--json").json["verified"] is True
    changed = shutil.copytree(artifact, tmp_path / "changed")
    (changed / "LICENSE").unlink()
    (changed / "new").write_text("")
    bad = run("verify", changed)
    assert (bad.code, bad.out.splitlines()[-2:]) == (1, ["missing: LICENSE (other)", "extra: new"])
    states = {line.split("│")[1].strip(): line.split("│")[-2].strip() for line in bad.out.splitlines() if "│" in line}
    assert {name for name, state in states.items() if state == "changed"} == {"other"}
    as_json = run("verify", changed, "--json")
    assert as_json.code == 1
    assert as_json.json["problems"] == ["missing: LICENSE (other)", "extra: new"]
    assert as_json.json["verified"] is False
    assert {name for name, part in as_json.json["components"].items() if part["changed"]} == {"other"}


def test_sign_and_verify_with_a_key(run: Run, artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing", reason="needs the extra quantkit[signing]")
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "key.pem"], check=True)
    subprocess.run(["openssl", "ec", "-in", "key.pem", "-pubout", "-out", "key.pub"], check=True, capture_output=True)
    signed = shutil.copytree(artifact, tmp_path / "signed")
    unsigned = run("verify", signed, "--public-key", "key.pub")
    assert (unsigned.code, unsigned.out.splitlines()[-1]) == (1, "unsigned: there is no model.sig")
    made = run("sign", signed, "--key", "key.pem", "--json")
    assert (made.code, made.json["path"]) == (0, str(signed / "model.sig"))
    good = run("verify", signed, "--public-key", "key.pub", "--json")
    assert (good.code, good.json["signed"], good.json["verified"]) == (0, True, True)
    assert run("verify", signed, "--json").json["signed"] is None
    (signed / "LICENSE").write_text("other")
    bad = run("verify", signed, "--public-key", "key.pub", "--json")
    assert (bad.code, bad.json["signed"], bad.json["verified"]) == (1, False, False)
    assert run("sign", signed, "--key", "key.pem").code == 2


def test_attest_prints_one_statement_or_writes_it(run: Run, artifact: Path) -> None:
    printed = run("attest", artifact, "--format", "slsa")
    assert (printed.code, printed.err) == (0, "")
    written = run("attest", artifact, "--format", "slsa", "--output", "made/here.json")
    assert (written.code, written.out) == (0, "")
    assert json.loads(Path("made/here.json").read_bytes()) == printed.json
    assert run("attest", artifact, "--format", "cyclonedx").json["bomFormat"] == "CycloneDX"


def test_inspect_of_an_artifact_shows_nominal_and_true_bits(run: Run, artifact: Path) -> None:
    table, values = run("inspect", artifact), run("inspect", artifact, "--json")
    assert table.code == values.code == 0
    assert table.err == values.err == ""
    assert "nominal" in table.out
    totals = values.json["totals"]
    assert totals["bits_per_weight_nominal"] == 4.25
    assert totals["bits_per_weight"] > 4.25
    assert f"{totals['bits_per_weight']:.4f} stored, 4.2500 nominal" in table.out
    assert values.json["kind"] == "artifact"


def test_inspect_of_a_checkpoint_shows_its_structure(run: Run, zoo: Zoo) -> None:
    table, values = run("inspect", zoo("mixtral")), run("inspect", zoo("mixtral"), "--json")
    assert table.code == values.code == 0
    assert values.json["kind"] == "checkpoint"
    assert values.json["blocks"] == {"name": "model.layers", "count": 2}
    assert len(values.json["linears"]) == 8
    assert "2 in model.layers" in table.out


def test_eval_writes_the_report_inside_the_artifact_and_prints_it(
    run: Run, zoo: Zoo, suite: Path, tmp_path: Path
) -> None:
    made = run("convert", zoo("llama"), "--recipe", "rtn-g64", "--output", tmp_path / "out", "--json").json
    table = run("eval", tmp_path / "out", "--suite", suite)
    assert table.code == 0
    assert "fidelity.kl_mean" in table.out
    report = tmp_path / "out" / "evals" / "tiny.json"
    assert json.loads(report.read_bytes())["identity"] == made["identity"]
    found = run("eval", tmp_path / "out", "--suite", suite, "--limit", "2", "--json")
    assert found.code == 0
    assert found.json["path"] == str(report.with_name("tiny-limit2.json")), "a cut run never replaces a whole one"
    assert json.loads(report.read_bytes())["suite"]["limit"] is None
    assert found.json["suite"]["limit"] == 2
    assert "its figures" not in found.err
    assert found.json["metrics"]["fidelity"]["tokens"] == 2 * 39
    assert run("verify", tmp_path / "out").code == 0


def test_eval_of_a_checkpoint_writes_beside_and_to_the_output_asked_for(run: Run, zoo: Zoo, suite: Path) -> None:
    assert run("eval", zoo("llama"), "--suite", suite).code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["llama.tiny.html", "llama.tiny.json"]
    found = run("eval", zoo("llama"), "--suite", suite, "--output", "new/mine.json", "--json")
    assert found.json["path"] == "new/mine.json"
    assert json.loads(Path("new/mine.json").read_bytes())["subject"]["kind"] == "checkpoint"


def test_eval_says_where_no_report_can_be_written_before_it_measures(run: Run, artifact: Path, suite: Path) -> None:
    found = run("eval", artifact, "--suite", suite, "--output", ".")
    assert found.code == 2
    assert found.err == "quantkit: . is a directory; choose another --output\n"


def test_eval_without_a_terminal_says_now_and_then_how_far_it_is(
    run: Run, artifact: Path, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_LINE_SECONDS", 0)
    found = run("eval", artifact, "--suite", suite, "--output", "report.json")  # the artifact is shared by all tests
    lines = [line for line in found.err.splitlines() if " %" in line]
    assert len(lines) > 1
    assert all(re.fullmatch(r"evaluating: \d+ %(, about \d:\d\d:\d\d left)?", line) for line in lines), lines
    assert lines[-1].startswith("evaluating: 100 %")


def test_convert_without_a_terminal_says_what_it_does_before_the_first_tensor(
    run: Run, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_LINE_SECONDS", 0)
    passes = "passes=[{gptq: {objective: model, sweeps: 0}}]"
    few = ("--set", "calibration.samples=2", "--set", "calibration.sequence_length=16")
    found = run("convert", zoo("llama"), "--recipe", "gptq-g64", "--calib", notes(tmp_path), *few, "--set", passes)
    said = [line.partition(":")[0] for line in found.err.splitlines() if " %" in line]
    ways = (("forwards", 0), ("forwards", 1), ("backwards", 1), ("backwards", 0))
    assert said[:4] == [f"{way} through model.layers.{index}" for way, index in ways]
    assert set(said[4:]) == {"converting"}


def test_eval_writes_the_page_beside_the_report_unless_told_not_to(
    run: Run, zoo: Zoo, suite: Path, tmp_path: Path
) -> None:
    run("convert", zoo("llama"), "--recipe", "rtn-g64", "--output", tmp_path / "out")
    evals = tmp_path / "out" / "evals"
    assert run("eval", tmp_path / "out", "--suite", suite, "--no-html").code == 0
    assert [path.name for path in evals.iterdir()] == ["tiny.json"]
    found = run("eval", tmp_path / "out", "--suite", suite)
    assert f"wrote {evals / 'tiny.json'} and {evals / 'tiny.html'}" in found.err
    assert "breakdown" not in found.out
    page = (evals / "tiny.html").read_text(encoding="utf-8")
    assert "Where it breaks" in page
    assert "tiny.json was made with another suite than quick" in page
    assert f"wrote its figures into {tmp_path / 'out' / 'README.md'}" in found.err
    assert "Suite tiny." in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert run("verify", tmp_path / "out").code == 0


def test_report_rebuilds_the_page_from_what_stands_in_the_artifact(run: Run, artifact: Path, tmp_path: Path) -> None:
    path = with_report(artifact, tmp_path / "measured")
    found = run("report", path)
    assert (found.code, found.out) == (0, "pass: smoke\n")
    assert "✓ Pass" in (path / "evals" / "quick.html").read_text(encoding="utf-8")
    policy = tmp_path / "strict.yaml"
    policy.write_text("name: strict\nlimits: [{metric: fidelity.kl_mean, max: 0.000001}]\n", encoding="utf-8")
    values = run("report", path, "--policy", policy, "--output", tmp_path / "new" / "page.html", "--json")
    assert values.json == {
        "path": str(tmp_path / "new" / "page.html"), "verdict": "fail", "policy": "strict", "reason": None,
    }  # fmt: skip
    assert values.code == 0, "the gate decides; the page only shows"
    assert "✗ Fail" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_report_takes_the_name_of_a_cut_run(run: Run, artifact: Path, tmp_path: Path) -> None:
    path = with_report(artifact, tmp_path / "measured", suite=SuiteRecord(name="quick", sha256="0" * 64, limit=2))
    (path / "evals" / "quick.json").rename(path / "evals" / "quick-limit2.json")
    found = run("report", path, "--suite", "quick-limit2")
    assert found.code == 0
    assert found.out.startswith("not judged: ")
    assert (path / "evals" / "quick-limit2.html").is_file()


def test_compare_prints_one_table_one_object_and_writes_one_page(
    run: Run, zoo: Zoo, artifact: Path, tmp_path: Path
) -> None:
    first = with_report(artifact, tmp_path / "first")
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-int8"))
    second = with_report(convert(plan, tmp_path / "made").path, tmp_path / "second")
    table = run("compare", first, second)
    assert (table.code, table.err) == (0, "")
    for shown in ("llama, suite quick", "rtn-g64", "rtn-int8", "base", "wiki-en", "1.040"):
        assert shown in table.out
    assert max(map(len, table.out.splitlines())) <= 80
    values = run("compare", first, second, "--json", "--output", tmp_path / "c.html")
    assert values.code == 0
    assert [row["label"] for row in values.json["artifacts"]] == ["rtn-g64", "rtn-int8"]
    assert "2 artifacts of llama" in (tmp_path / "c.html").read_text(encoding="utf-8")


def test_recipes_lists_every_shipped_one_and_prints_one_that_loads_again(run: Run) -> None:
    table, values = run("recipes"), run("recipes", "--json")
    assert table.code == values.code == 0
    assert sorted(values.json) == shipped_names("recipes")
    assert all(name in table.out for name in shipped_names("recipes"))
    Path("mine.yaml").write_text(run("recipes", "rtn-g64").out)
    assert run("recipes", "mine.yaml", "--json").json == run("recipes", "rtn-g64", "--json").json


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_demo_leaves_with_the_verdict_of_its_gate(
    passed: bool, options: list[str], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("fidelity.kl_mean", "<= 0.6", "0.04", "+0.56", "pass" if passed else "fail")
    verdict = Verdict("a" * 64, load_policy("smoke"), [row])
    monkeypatch.setattr(DemoResult, "rows", lambda _: {"gate": "smoke"})
    monkeypatch.setattr(DemoResult, "values", lambda self: {"gate": self.verdict.values()})
    monkeypatch.setattr("quantkit.demo.base_checkpoint", lambda *_: Path("base"))
    monkeypatch.setattr("quantkit.demo.run_demo", lambda *_: DemoResult(Path(), None, None, Path(), verdict))
    found = run("demo", *options)
    assert found.code == (0 if passed else 1)
    assert ("pass" if passed else "fail") in found.out


# Releases


@pytest.fixture
def releases(artifact: Path, tmp_path: Path) -> tuple[Path, Path]:
    """An artifact with a report, and a policy that it passes."""
    policy = tmp_path / "loose.yaml"
    policy.write_text("name: loose\nlimits: [{metric: fidelity.kl_mean, max: 1}]\n")
    return with_report(artifact, tmp_path / "measured"), policy


STAMP = ("--by", "ana", "--at", "2026-01-31T09:00:00Z")


def test_diff_says_which_components_differ_with_0_or_1(run: Run, zoo: Zoo, artifact: Path, tmp_path: Path) -> None:
    same = run("diff", artifact, artifact)
    assert (same.code, same.err) == (0, "")
    assert "components the same" in same.out
    made = run("convert", zoo("llama"), "--recipe", "rtn-int8", "--output", tmp_path / "other")
    assert made.code == 0
    table, values = run("diff", artifact, tmp_path / "other"), run("diff", artifact, tmp_path / "other", "--json")
    assert table.code == values.code == 1
    assert "components differ" in table.out
    assert values.json["same"] is False
    assert [name for name, part in values.json["components"].items() if not part["same"]] == ["scheme", "weights"]
    assert max(map(len, table.out.splitlines())) <= 80


def test_promote_shows_the_verdict_and_prints_the_head_to_keep(run: Run, releases: tuple[Path, Path]) -> None:
    path, policy = releases
    found = run("promote", path, "--channel", "canary", "--policy", policy, *STAMP)
    assert (found.code, found.err) == (0, "")
    identity = run("verify", path, "--json").json["identity"]
    head = found.out.split()[-1]
    assert f"{identity[:12]} promoted to canary in the place of nothing; entry 1, head {head}" in found.out
    assert "fidelity.kl_mean" in found.out
    checked = run("ledger", "verify", "--head", head, "--artifacts")
    assert (checked.code, checked.out) == (0, f"entries: 1, each as written; head {head}\n")
    assert run("ledger", "verify", "--head", "0" * 64).code == 1


def test_promote_and_rollback_print_one_object_with_the_entry(
    run: Run, releases: tuple[Path, Path], zoo: Zoo, tmp_path: Path
) -> None:
    path, policy = releases
    first = run("promote", path, "--channel", "canary", "--policy", policy, *STAMP, "--json").json
    assert first["verdict"]["verdict"] == "pass"
    assert first["entry"]["stamp"] == {"by": "ana", "at": "2026-01-31T09:00:00Z"}
    other = with_report(
        convert(make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-int8")), tmp_path / "i").path,
        tmp_path / "other",
    )
    assert run("promote", other, "--channel", "canary", "--policy", policy, *STAMP).code == 0
    back = run("rollback", "--channel", "canary", *STAMP, "--json").json["entry"]
    assert (back["action"], back["release"]) == ("rollback", first["entry"]["release"])
    found = run("ledger", "--json").json
    assert found["channels"]["canary"]["identity"] == first["entry"]["release"]["identity"]
    assert [entry["action"] for entry in found["entries"]] == ["promote", "promote", "rollback"]
    table = run("ledger")
    for shown in ("canary", "back to 1", first["entry"]["release"]["identity"][:12], back["sha256"], "ana"):
        assert shown in table.out
    assert max(map(len, table.out.splitlines())) <= 80


def test_what_the_gate_fails_is_not_promoted_and_leaves_with_1(
    run: Run, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    policy = tmp_path / "tight.yaml"
    policy.write_text("name: tight\nlimits: [{metric: fidelity.kl_mean, max: 0.001}]\n")
    found = run("promote", releases[0], "--channel", "canary", "--policy", policy)
    assert found.code == 1
    assert found.out.splitlines()[-1] == "not promoted: canary holds what it held"
    values = run("promote", releases[0], "--channel", "canary", "--policy", policy, "--json")
    assert (values.code, values.json["entry"], values.json["verdict"]["verdict"]) == (1, None, "fail")
    assert run("ledger").out == "manifests holds no releases\n"
    assert list(Path().iterdir()) == []


def test_a_rollback_to_a_changed_artifact_leaves_with_1_and_one_line(
    run: Run, releases: tuple[Path, Path], zoo: Zoo, tmp_path: Path
) -> None:
    path, policy = releases
    made = convert(make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-int8")), tmp_path / "i").path
    for artifact in (path, with_report(made, tmp_path / "other")):
        assert run("promote", artifact, "--channel", "canary", "--policy", policy).code == 0
    (path / "LICENSE").write_text("another")
    found = run("rollback", "--channel", "canary")
    assert (found.code, found.out) == (1, "")
    assert len(found.err.splitlines()) == 1
    assert "is not whole (changed: LICENSE (other)); restore its files" in found.err
    checked = run("ledger", "verify", "--artifacts")
    assert checked.code == 1
    assert "channel canary:" in checked.out
    assert run("ledger", "verify").code == 0


def test_the_ledgers_folder_may_stand_before_and_behind_verify(
    run: Run, releases: tuple[Path, Path], tmp_path: Path
) -> None:
    path, policy = releases
    folder = tmp_path / "kept"
    assert run("promote", path, "--channel", "canary", "--policy", policy, "--ledger", folder).code == 0
    assert run("ledger", "--ledger", folder, "verify").code == 0
    assert run("ledger", "verify", "--ledger", folder).code == 0
    assert run("ledger", "verify").code == 2
    (folder / "ledger.jsonl").write_bytes((folder / "ledger.jsonl").read_bytes().replace(b"canary", b"public"))
    found = run("ledger", "verify", "--ledger", folder, "--json")
    assert (found.code, found.json["verified"]) == (1, False)
    shown = run("ledger", "--ledger", folder)
    assert (shown.code, shown.out) == (2, "")
    assert "ledger.jsonl line 1 was changed after it was written" in shown.err


def test_who_and_when_are_asked_of_the_machine_only_where_they_are_not_given(
    run: Run, releases: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, policy = releases
    monkeypatch.setattr("getpass.getuser", lambda: "machine")
    monkeypatch.setattr("time.gmtime", lambda *_: (2030, 1, 2, 3, 4, 5, 2, 2, 0))
    default = run("promote", path, "--channel", "canary", "--policy", policy, "--json").json["entry"]["stamp"]
    assert default == {"by": "machine", "at": "2030-01-02T03:04:05Z"}
    given = run("promote", path, "--channel", "canary", "--policy", policy, *STAMP, "--json").json["entry"]["stamp"]
    assert given == {"by": "ana", "at": "2026-01-31T09:00:00Z"}

    def nobody() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr("getpass.getuser", nobody)
    found = run("promote", path, "--channel", "canary", "--policy", policy)
    assert (found.code, found.err) == (2, "quantkit: this account has no name; say with --by who releases\n")


# Resuming


def test_resume_with_nothing_unfinished_says_so_and_converts(run: Run, zoo: Zoo) -> None:
    found = run("convert", zoo("llama"), "--recipe", "rtn-g64", "--resume", "--json")
    assert found.code == 0
    assert "nothing of llama-rtn-g64 is unfinished: starting from the beginning" in found.err
    assert found.json["identity"] in found.err


def test_an_interrupt_keeps_what_is_done_and_resume_goes_on(
    run: Run, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("convert", zoo("llama"), "--recipe", "gptq-g64", "--calib", notes(tmp_path), "--json")
    small = ("--set", "calibration.samples=4", "--set", "calibration.sequence_length=32")
    expected = run(*command, *small, "--output", "whole").json["identity"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.pipeline._Digests.done", property(lambda self: self.result() is not None))
        patch.setattr("quantkit.pipeline._write_rest", interrupt)
        stopped = run(*command, *small)
    kept = Path(".llama-gptq-g64.partial")
    assert (stopped.code, stopped.out) == (3, "")
    assert stopped.err.splitlines()[-1] == (
        f"quantkit: interrupted; 2 blocks and 14 tensors are done and kept in {kept}; "
        "run the same command with --resume to go on"
    )
    for arguments, words in (
        ((*command, *small), f"unfinished conversion to llama-gptq-g64 is kept in {kept}; pass --resume"),
        ((*command, *small, "--dry-run"), "pass --resume"),
        ((*command, *small, "--set", "weights.bits=8", "--resume"), "recipe.weights.bits was 4 and is 8"),
        ((*command, *small, "--set", "calibration.samples=3", "--resume"), "recipe.calibration.samples was 4 and is 3"),
    ):
        refused = run(*arguments)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err.splitlines()[-1]
    gone_on = run(*command, *small, "--resume")
    assert gone_on.code == 0
    assert f"2 blocks and 14 tensors are done and kept in {kept}" in gone_on.err
    assert gone_on.json["identity"] == expected
    assert sorted(path.name for path in Path().iterdir()) == ["llama-gptq-g64", "whole"]


def notes(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("The valve opens at 3.5 MPa. Close it again at 2.1 MPa, slowly. " * 20)
    return path


# The plan


def test_a_dry_run_reads_no_weights_and_writes_nothing(
    run: Run, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were read")

    for module in ("tensorfile", "pipeline"):
        for function in ("read_tensor", "read_chunks"):
            monkeypatch.setattr(f"quantkit.{module}.{function}", refuse)
    before = sorted(tmp_path.rglob("*"))
    table = run("convert", zoo("llama"), "--recipe", "rtn-g64", "--dry-run")
    values = run("convert", zoo("llama"), "--recipe", "rtn-g64", "--dry-run", "--json")
    assert table.code == values.code == 0
    assert values.json["kind"] == "plan"
    assert len(values.json["layers"]) == 14
    assert values.json["needs"]["disk_bytes"] > 0
    assert "plan llama" in table.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_of_a_file_that_holds_only_a_header_works(run: Run, zoo: Zoo, tmp_path: Path) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "sparse")
    path = source / "model.safetensors"
    size = path.stat().st_size
    data = path.read_bytes()
    path.write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])
    os.truncate(path, size)
    planned = run("convert", source, "--recipe", "rtn-g64", "--dry-run", "--json").json
    expected = run("convert", zoo("llama"), "--recipe", "rtn-g64", "--dry-run", "--json").json
    assert planned["layers"] == expected["layers"]
    assert planned["totals"] == expected["totals"]


def test_the_plan_says_what_the_conversion_then_does(run: Run, zoo: Zoo, tmp_path: Path) -> None:
    for name in ("gpt2", "mixtral", "gemma3"):
        plan = run("convert", zoo(name), "--recipe", "rtn-g64", "--dry-run", "--json").json
        made = run("convert", zoo(name), "--recipe", "rtn-g64", "--output", tmp_path / name, "--json").json
        assert [layer["name"] for layer in plan["layers"]] == [layer["name"] for layer in made["layers"]]
        assert [kept["name"] for kept in plan["kept"]] == [kept["name"] for kept in made["kept"]]
        assert plan["fallbacks"] == made["fallbacks"]
        assert plan["readers"] == made["readers"]
        assert plan["totals"]["bits_per_weight"] == made["totals"]["bits_per_weight"]


@pytest.mark.parametrize("format", ["compressed-tensors", "compressed-tensors-packed"])
def test_a_quantised_embedding_stands_in_the_dry_run_and_in_inspect(
    format: str, run: Run, zoo: Zoo, tmp_path: Path
) -> None:
    override = "overrides=[{match: model.embed_tokens, weights: {bits: 8, granularity: group, group_size: 32}}]"
    command = ("convert", zoo("llama_untied"), "--recipe", "rtn-g64", "--set", override, "--set", f"format={format}")
    plan = run(*command, "--dry-run", "--json").json
    assert run(*command, "--output", tmp_path / "out").code == 0
    made = run("inspect", tmp_path / "out", "--json").json
    table = next(layer for layer in made["layers"] if layer["name"] == "model.embed_tokens")
    assert (table["shape"], table["scheme"], table["bits_nominal"]) == ([256, 64], "int8 g32 sym", 8.5)
    assert {layer["name"] for layer in plan["layers"]} == {layer["name"] for layer in made["layers"]}
    assert (plan["readers"], plan["notes"]) == (made["readers"], made["notes"])
    for key in ("bits_per_weight", "bits_per_weight_nominal", "quantised_parameters"):
        assert plan["totals"][key] == made["totals"][key]
    assert "15 layers" in run("inspect", tmp_path / "out").out


# Errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "MODEL", "--recipe", "rtn-g6"], ["rtn-g64"]),
        (["convert", "MODEL", "--recipe", "missing.yaml"], ["missing.yaml does not exist"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--set", "weights.group_sise=64"], ["group_sise", "'group_size'"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--set", "wieghts.bits=4"], ["wieghts", "did you mean 'weights'"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--set", "weights.bits=5"], ["weights.bits"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--set", "weights.bits"], ["is not KEY=VALUE"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--set", "weights.bits=[4"], ["weights.bits", "YAML"]),
        (
            ["convert", "MODEL", "--recipe", "rtn-g64", "--set", "weights.group_size=48", "--set", "group_fallback=[]"],
            ["group size 48 does not divide", "down_proj", "128"],
        ),
        (["convert", "./nothing", "--recipe", "rtn-g64"], ["./nothing does not exist"]),
        (["convert", "nothing", "--recipe", "rtn-g64"], ["nothing does not exist"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--shard-size", "5 parsecs"], ["'5 parsecs' is not a size"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--shard-size", "0GB"], ["'0GB' is not a size"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--output", "."], [". exists"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--output", ".", "--dry-run"], [". exists"]),
        (["convert", "ARTIFACT", "--recipe", "rtn-g64"], ["is quantised already"]),
        (["convert", "MODEL"], ["--recipe"]),
        (["convert"], ["model"]),
        (["convret"], ["convret"]),
        (["convert", "MODEL", "--recipe", "rtn-g64", "--fast"], ["--fast"]),
        (["verify", "./nothing"], ["nothing is not a directory"]),
        (["verify", "MODEL"], ["manifest.json does not exist"]),
        (["verify", "ARTIFACT", "--signature", "model.sig"], ["--signature says nothing", "--public-key"]),
        (["sign", "ARTIFACT"], ["--key"]),
        (["sign", "MODEL", "--key", "key.pem"], ["quantkit"]),
        (["attest", "ARTIFACT"], ["--format"]),
        (["attest", "ARTIFACT", "--format", "spdx"], ["--format spdx", "slsa, cyclonedx"]),
        (["attest", "ARTIFACT", "--format", "slsa", "--builder-id", "me"], ["'me' is no URI"]),
        (["attest", "MODEL", "--format", "slsa"], ["manifest.json does not exist"]),
        (["inspect", "./nothing"], ["./nothing does not exist"]),
        (["eval", "MODEL", "--suite", "quik"], ["quick"]),
        (["eval", "MODEL", "--limit", "0"], ["--limit 0 leaves nothing"]),
        (["eval", "MODEL", "--limit", "many"], ["--limit", "integer"]),
        (["eval", "ARTIFACT", "--output", "ARTIFACT/manifest.json"], ["would not verify", "another --output"]),
        (["eval", "MODEL", "--output", "page.html"], ["page.html names the page", "JSON"]),
        (["report", "ARTIFACT"], ["has no report of suite quick (it has: none)", "quantkit eval"]),
        (["report", "ARTIFACT", "--suite", "nowhere/q.yaml"], ["nowhere/q.yaml does not exist"]),
        (["report", "MODEL"], ["manifest.json does not exist"]),
        (["compare", "ARTIFACT"], ["one artifact cannot be compared", "two or more"]),
        (["compare", "ARTIFACT", "ARTIFACT", "--output", "c.html"], ["has no report of suite quick", "quantkit eval"]),
        (["compare", "ARTIFACT", "MODEL"], ["has no report"]),
        (["compare"], ["artifacts"]),
        (["recipes", "rtn-g6"], ["rtn-g64"]),
        (["verify", "ARTIFACT", "--quick"], ["--quick"]),
        (["diff", "ARTIFACT"], ["b"]),
        (["diff", "ARTIFACT", "MODEL"], ["manifest.json does not exist"]),
        (["promote", "ARTIFACT"], ["--channel"]),
        (["promote", "ARTIFACT", "--channel", "Production!"], ["'Production!' cannot name a channel"]),
        (["promote", "ARTIFACT", "--channel", "canary"], ["standard.json does not exist", "run quantkit eval"]),
        (["promote", "ARTIFACT", "--channel", "canary", "--policy", "relase"], ["release"]),
        (["promote", "ARTIFACT", "--channel", "canary", "--at", "yesterday"], ["'yesterday'", "2026-01-31T09:00:00Z"]),
        (["promote", "ARTIFACT", "--channel", "canary", "--by", ""], ["--by"]),
        (["promote", "MODEL", "--channel", "canary"], ["manifest.json does not exist"]),
        (["rollback", "--channel", "canary"], ["nothing was ever released on channel 'canary'"]),
        (["rollback"], ["--channel"]),
        (["ledger", "verify"], ["manifests holds no ledger.jsonl", "--ledger"]),
        (["ledger", "show"], ["show"]),
    ],
)
def test_an_error_is_one_line_that_names_the_thing_and_exit_code_2(
    arguments: list[str], words: list[str], run: Run, zoo: Zoo, artifact: Path
) -> None:
    places = {"MODEL": str(zoo("llama")), "ARTIFACT": str(artifact)}
    places["ARTIFACT/manifest.json"] = str(artifact / "manifest.json")
    found = run(*[places.get(argument, argument) for argument in arguments])
    assert found.code == 2, found.err
    assert found.out == ""
    assert len(found.err.splitlines()) == 1, found.err
    assert found.err.startswith("quantkit: ")
    for word in words:
        assert word in found.err
    assert list(Path().iterdir()) == []


def test_an_error_in_the_middle_of_a_conversion_is_one_line_and_leaves_nothing(
    run: Run, zoo: Zoo, tmp_path: Path
) -> None:
    source = shutil.copytree(zoo("llama"), tmp_path / "llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][1, 1] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    found = run("convert", source, "--recipe", "rtn-g64")
    assert (found.code, found.out) == (2, "")
    assert "Traceback" not in found.err
    lines = [line for line in found.err.splitlines() if line.startswith("quantkit: ")]
    assert len(lines) == 1
    assert found.err.splitlines()[-1] == lines[0]
    assert "model.layers.1.mlp.down_proj.weight" in lines[0]
    assert list(Path().iterdir()) == []


def test_a_changed_artifact_is_not_evaluated(run: Run, artifact: Path, suite: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(artifact, tmp_path / "changed")
    (changed / "LICENSE").write_text("another")
    found = run("eval", changed, "--suite", suite)
    assert (found.code, found.out) == (2, "")
    assert "changed: LICENSE" in found.err


def test_an_interrupt_is_exit_code_3_and_one_line(run: Run, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantkit.plan.make_plan", interrupt)
    found = run("convert", zoo("llama"), "--recipe", "rtn-g64")
    assert (found.code, found.out) == (3, "")
    assert found.err.splitlines() == [
        "quantkit: interrupted; run the same command again; nothing was left under the final name"
    ]


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["convert", "--help"], 0), (["bogus"], 2)])
def test_the_installed_command_has_the_same_exit_codes(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", "quantkit.cli", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == code
    assert "Traceback" not in found.stderr
    assert bool(found.stdout) == (code == 0)


def test_asking_for_help_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom quantkit.cli import main\nsys.argv = ['quantkit', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def test_a_dry_run_checks_that_the_calibration_set_exists(zoo, monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    for recipe, problem in (("gptq-g64", "nope.txt does not exist"), ("rtn-g64", "uses no calibration data")):
        arguments = ["quantkit", "convert", str(zoo("llama")), "--recipe", recipe, "--calib", "nope.txt", "--dry-run"]
        monkeypatch.setattr("sys.argv", [*arguments, "--output", "nowhere"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 2
        assert problem in capsys.readouterr().err
