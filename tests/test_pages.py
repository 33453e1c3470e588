"""Pages: a verdict first, everything escaped, nothing loaded, and no report that could break one."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from quantkit.artifact import verify
from quantkit.checkpoint import open_checkpoint
from quantkit.compare import Comparison, Entry
from quantkit.errors import ArtifactError, ReportError
from quantkit.evaluate.suite import load_suite
from quantkit.gates import Policy, Row, Verdict
from quantkit.manifest import DroppedRecord, FallbackRecord, KeptRecord, Manifest, read_manifest
from quantkit.pages import artifact_page, comparison_page, judge, judgement_values, report_page, write_page
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from quantkit.report import Report, Subject, SuiteRecord
from quantkit.seals import page_intact
from tests.samples import (
    HOSTILE,
    estimate,
    perplexity,
    sample_answers,
    sample_breakdown,
    sample_metrics,
    sample_report,
    sample_tasks,
    with_output_errors,
    with_report,
)  # fmt: skip

# Elements that have no end tag.
VOID = {"meta", "link", "br", "hr", "img", "input"}


@pytest.fixture(scope="module")
def pristine(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64"))
    return convert(plan, tmp_path_factory.mktemp("pages") / "artifact").path


@pytest.fixture(scope="module")
def manifest(pristine: Path) -> Manifest:
    return with_output_errors(read_manifest(pristine))


@pytest.fixture
def artifact(pristine: Path, tmp_path: Path) -> Path:
    return with_report(pristine, tmp_path / "artifact")


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text outside of style. Tags must nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def verdict_of(manifest: Manifest, outcome: Any = "pass") -> Verdict:
    policy = Policy(name="smoke", description="Not broken.", limits=[{"metric": "fidelity.kl_mean", "max": 0.6}])
    rows = [Row("corpora", ">= 2", "2", "+0", "pass"), Row("fidelity.kl_mean", "<= 0.6", "0.04", "+0.56", outcome)]
    return Verdict(manifest.identity, policy, rows)


def comparison_of(manifest: Manifest, **changes: Any) -> Comparison:
    entries = [Entry(Path(name), manifest, sample_report(manifest, **changes)) for name in "ab"]
    return Comparison(entries, ["first", "second"])


# What a reviewer finds


def test_the_verdict_and_the_checks_come_first(manifest: Manifest) -> None:
    text = Page(report_page(sample_report(manifest), manifest, verdict_of(manifest))).text
    assert text.index("✓ Pass policy smoke: all 2 checks passed") < text.index("bits a weight") < text.index("Gate")
    assert "fidelity.kl_mean ≤ 0.6 0.04 +0.56 ✓ pass" in text


def test_a_failed_verdict_says_how_many_checks_failed(manifest: Manifest) -> None:
    text = Page(report_page(sample_report(manifest), manifest, verdict_of(manifest, "fail"))).text
    assert "✗ Fail policy smoke: 1 of 2 checks failed fidelity.kl_mean bits a weight" in text
    assert "+0.56 ✗ fail" in text


def test_without_a_verdict_the_page_says_why(manifest: Manifest) -> None:
    text = Page(report_page(sample_report(manifest), manifest, "no such suite")).text
    assert "Not judged no such suite" in text
    assert "Gate" not in text


def test_the_page_holds_every_part_of_the_report_and_the_manifest(manifest: Manifest) -> None:
    report = sample_report(manifest, notes=["a note of the evaluation"])
    changes = {
        "notes": ["a note of the conversion"],
        "fallbacks": [FallbackRecord(layer="some.layer", kind="group_size", detail="group 32 instead of 64")],
        "dropped": [DroppedRecord(name="lm_head.weight", reason="the same bytes as the embedding")],
    }
    text = Page(report_page(report, manifest.model_copy(update=changes), verdict_of(manifest))).text
    for shown in (
        "Quality", "Tasks", "Where it breaks", "Worst windows", "Layers", "Largest errors", "All 14 layers",
        "Done differently from the recipe", "Provenance", "Protocol", "a note of the evaluation", "some.layer",
        "a note of the conversion", "group 32 instead of 64", "the same bytes as the embedding", "not a linear of",
        report.identity, report.protocol, manifest.source_identity, manifest.recipe_sha256, manifest.source.name,
        "quantkit_copy", "by predicted token", "128-511", "The valve opens", "quantkit 0.1.0", "torch ",
        "Where they part", "Side by side", "In a batch", "Prompts that differ in the batch",
        manifest.source.files[0].sha256, '"dtype": "float32"', '"group_size": 64', "1.0400",
    ):  # fmt: skip
        assert shown in text, shown


def test_the_page_has_its_pictures_and_an_outline(manifest: Manifest) -> None:
    page = Page(report_page(sample_report(manifest), manifest, verdict_of(manifest)))
    labels = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    assert labels == [
        "perplexity on wiki-en against bits a weight",
        "perplexity on handbook-zh against bits a weight",
        "histogram of the KL of single predictions",
        "error of every layer by block and kind",
    ]
    assert [tag for tag, _ in page.elements].count("h1") == 1
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_of_a_checkpoint_shows_what_there_is(manifest: Manifest) -> None:
    report = sample_report(
        manifest,
        subject=Subject(kind="checkpoint", name="base", identity="f" * 64),
        reference=None,
        metrics={"perplexity": {"wiki-en": {"value": estimate(20, 1), "tokens": 9}}},
        notes=["fidelity was not measured"],
    )
    page = Page(report_page(report, None, "An unquantised checkpoint."))
    assert "20.00 19.00 – 21.00" in page.text
    assert "fidelity was not measured" in page.text
    assert "Layers" not in page.text
    assert "svg" not in [tag for tag, _ in page.elements]


def test_a_cut_run_says_so(manifest: Manifest) -> None:
    report = sample_report(manifest, suite=SuiteRecord(name="quick", sha256="a" * 64, limit=3))
    assert "cut short to 3 windows a text" in Page(report_page(report, manifest, "cut")).text


def test_the_comparison_has_the_base_and_every_artifact(manifest: Manifest) -> None:
    page = Page(comparison_page(comparison_of(manifest)))
    for shown in ("2 artifacts of llama", "first", "second", "Perplexity on wiki-en", "Fidelity to the base", "Tasks"):
        assert shown in page.text
    assert [tag for tag, _ in page.elements].count("svg") == 2
    assert page.text.count(manifest.identity) == 2
    assert sample_report(manifest).protocol in page.text


# Escaping


def hostile(manifest: Manifest) -> tuple[Report, Manifest, Verdict]:
    """A report, a manifest and a verdict in which every free text is an attack."""
    layers = [layer.model_copy(update={"name": HOSTILE, "notes": [HOSTILE]}) for layer in manifest.layers]
    layers[0] = layers[0].model_copy(update={"module": f"model.layers.0.{HOSTILE}", "fallback": HOSTILE})
    evil = manifest.model_copy(
        update={
            "layers": layers,
            "notes": [HOSTILE],
            "fallbacks": [FallbackRecord(layer=HOSTILE, kind="kept", detail=HOSTILE)],
            "kept": [KeptRecord(name=HOSTILE, dtype="F32", shape=[1], reason=HOSTILE)],
            "dropped": [DroppedRecord(name=HOSTILE, reason=HOSTILE)],
            "readers": {HOSTILE: HOSTILE},
            "versions": {HOSTILE: HOSTILE},
            "recipe": {"name": HOSTILE, HOSTILE: HOSTILE},
            "calibration": {HOSTILE: HOSTILE},
            "source": manifest.source.model_copy(update={"name": HOSTILE, "revision": HOSTILE}),
        }
    )
    metrics = {
        "perplexity": {HOSTILE: perplexity(1.2)},
        "fidelity": {"kl_mean": estimate(0.1)},
        "tasks": sample_tasks(HOSTILE) | {"t": {HOSTILE: {"value": 1}, "by_language": {HOSTILE: {"m": {"value": 1}}}}},
        "breakdown": sample_breakdown(HOSTILE, HOSTILE)
        | {"language": {HOSTILE: {"kl_mean": 0.1}}, "class": {HOSTILE: {"kl_mean": 0.1}}},
        **sample_answers(HOSTILE, HOSTILE),
    }
    report = sample_report(
        manifest,
        subject=Subject(kind="artifact", name=HOSTILE, identity=HOSTILE),
        reference=Subject(kind="checkpoint", name=HOSTILE, identity=HOSTILE),
        suite=SuiteRecord(name=HOSTILE, sha256=HOSTILE, limit=None),
        identity=HOSTILE,
        protocol=HOSTILE,
        protocol_record={HOSTILE: HOSTILE, "texts": {HOSTILE: {"language": HOSTILE}}},
        metrics=metrics,
        notes=[HOSTILE],
        run={HOSTILE: HOSTILE, "versions": {HOSTILE: HOSTILE}, "started": HOSTILE},
    )
    policy = Policy(name="p", description=HOSTILE, limits=[{"metric": HOSTILE, "max": 1}])
    return report, evil, Verdict(HOSTILE, policy, [Row(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "fail")])


def test_a_name_that_turns_the_direction_of_reading_does_not_turn_what_stands_beside_it(manifest: Manifest) -> None:
    turned = "\u202ename"
    report = sample_report(manifest, metrics=sample_metrics() | sample_answers(turned))
    subject = report.subject.model_copy(update={"name": turned})
    page = report_page(report.model_copy(update={"subject": subject}), manifest, "not judged")
    assert f"<b><bdi>{turned}0</bdi></b>" in page
    assert f"<bdi>{turned}</bdi> (artifact)" in page


def test_every_text_of_model_manifest_report_and_policy_is_escaped(manifest: Manifest) -> None:
    report, evil, verdict = hostile(manifest)
    entries = [Entry(Path(HOSTILE), evil, report)] * 2
    for page in (
        report_page(report, evil, verdict),
        report_page(report, evil, HOSTILE),
        comparison_page(Comparison(entries, [HOSTILE, HOSTILE])),
    ):
        assert "<script" not in page.lower()
        assert page.count("&lt;script&gt;") > 20
        parsed = Page(page)
        assert HOSTILE in parsed.text
        tags = {tag for tag, _ in parsed.elements}
        assert "script" not in tags
        assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)


def test_a_page_loads_nothing_and_forbids_the_rest(manifest: Manifest) -> None:
    for page in (
        report_page(sample_report(manifest), manifest, verdict_of(manifest)),
        comparison_page(comparison_of(manifest)),
    ):
        elements = Page(page).elements
        loading = {"src", "href", "xlink:href", "action", "data", "poster", "srcset"}
        targets = {value for _, attributes in elements for name, value in attributes.items() if name in loading}
        assert all(value is not None and value.startswith("#") for value in targets)
        assert not {tag for tag, _ in elements} & {"script", "link", "img", "iframe", "object", "embed", "base"}
        assert re.findall(r"url\((?!#)", page) == []
        assert "@import" not in page
        policies = [a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy"]
        assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, {"a": 1}, {"a": {"value": None}}, [[1]]])
def test_no_metrics_break_a_page(value: Any, manifest: Manifest) -> None:
    metrics = dict.fromkeys(("perplexity", "fidelity", "tasks", "breakdown", "generation", "batching"), value)
    report = sample_report(manifest, metrics=metrics, run={"versions": value}, protocol_record={"texts": value})
    Page(report_page(report, manifest, "not judged"))
    Page(comparison_page(Comparison([Entry(Path("a"), manifest, report)] * 2, ["a", "b"])))


# The same bytes, written as a whole


def test_a_page_is_the_same_each_time(manifest: Manifest) -> None:
    made = {report_page(sample_report(manifest), manifest, verdict_of(manifest)) for _ in range(2)}
    assert len(made) == 1
    assert len({comparison_page(comparison_of(manifest)) for _ in range(2)}) == 1


def test_half_a_character_pair_is_written_as_a_question_mark(manifest: Manifest, tmp_path: Path) -> None:
    page = report_page(sample_report(manifest, notes=[json.loads('"half \\ud800"')]), manifest, "x")
    write_page(page, tmp_path / "new" / "page.html")
    assert "half ?" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_a_written_page_is_the_page_with_its_hash_as_the_last_line(manifest: Manifest, tmp_path: Path) -> None:
    page = report_page(sample_report(manifest), manifest, verdict_of(manifest))
    write_page(page, tmp_path / "page.html")
    written = (tmp_path / "page.html").read_bytes()
    assert written.startswith(page.encode())
    assert page_intact(written)
    assert Page(written.decode()).text == Page(page).text


def test_a_page_that_cannot_be_placed_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot be written"):
        write_page("x", tmp_path / "file" / "page.html")


@pytest.mark.parametrize("name", ["index.html", "config.json", "evals/quick.json"])
def test_a_page_takes_no_place_in_an_artifact_but_beside_its_reports(name: str, artifact: Path) -> None:
    before = sorted(artifact.rglob("*"))
    with pytest.raises(ReportError, match=r"would not verify with it|not of a page"):
        write_page("x", artifact / name)
    assert sorted(artifact.rglob("*")) == before
    write_page("x", artifact / "evals" / "other.html")
    assert verify(artifact) == []


# Judging


def test_the_default_policy_judges_where_it_can(artifact: Path) -> None:
    page, judgement = artifact_page(artifact, "quick")
    assert judgement_values(judgement) == {"verdict": "pass", "policy": "smoke", "reason": None}
    assert "✓ Pass" in page


def test_the_default_policy_is_the_one_for_the_reports_suite(pristine: Path, tmp_path: Path) -> None:
    suite = SuiteRecord(name="standard", sha256=load_suite("standard").sha256, limit=None)
    path = with_report(pristine, tmp_path / "artifact", suite=suite)
    (path / "evals" / "quick.json").rename(path / "evals" / "standard.json")
    _, judgement = artifact_page(path, "standard")
    # The report at hand lacks what that policy bounds, which tells who was asked.
    assert isinstance(judgement, str)
    assert judgement.startswith("The default policy release cannot judge: ")


def test_a_named_policy_judges_instead(artifact: Path, tmp_path: Path) -> None:
    policy = tmp_path / "strict.yaml"
    policy.write_text("name: strict\nlimits: [{metric: fidelity.kl_mean, max: 0.000001}]\n", encoding="utf-8")
    page, judgement = artifact_page(artifact, "quick", str(policy))
    assert judgement_values(judgement)["verdict"] == "fail"
    assert "✗ Fail" in page


def test_the_default_policy_that_cannot_judge_leaves_a_reason_and_a_named_one_an_error(
    pristine: Path, tmp_path: Path
) -> None:
    suite = SuiteRecord(name="quick", sha256="a" * 64, limit=None)
    path = with_report(pristine, tmp_path / "artifact", suite=suite)
    page, judgement = artifact_page(path, "quick")
    assert isinstance(judgement, str)
    assert "quick.json was made with another suite than quick" in judgement
    assert str(tmp_path) not in page
    assert judgement_values(judgement)["verdict"] is None
    with pytest.raises(ReportError, match="another suite than quick"):
        judge(path, path / "evals" / "quick.json", "smoke")


def test_a_page_of_other_bytes_or_of_no_report_is_refused(pristine: Path, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no report of suite quick"):
        artifact_page(pristine, "quick")
    foreign = with_report(pristine, tmp_path / "foreign", identity="0" * 64)
    with pytest.raises(ReportError, match="is the report of 000000000000"):
        artifact_page(foreign, "quick")
    with pytest.raises(ArtifactError):
        artifact_page(tmp_path, "quick")


def test_answers_stand_side_by_side_and_equal_ones_once(manifest: Manifest) -> None:
    text = Page(report_page(sample_report(manifest), manifest, verdict_of(manifest))).text
    assert (
        "en-claim1 en, the same for 7 tokens The valve? base The valve opens late artifact The valve opens early"
        in text
    )
    assert "en-claim0 en, the same tokens The valve? The valve opens late In a batch" in text


def test_more_answers_than_fit_are_one_click_away(manifest: Manifest) -> None:
    generation = sample_answers()["generation"]
    metrics = {"generation": generation | {"samples": generation["samples"] * 4}}
    page = report_page(sample_report(manifest, metrics=metrics), manifest, "x")
    assert "The other 4 answers" in Page(page).text
    assert page.count('<div class="transcript">') == 8
    assert "In a batch" not in Page(page).text


def test_white_space_of_an_answer_is_kept(manifest: Manifest) -> None:
    generation = sample_answers(words="one\n\n  two")["generation"]
    page = report_page(sample_report(manifest, metrics={"generation": generation}), manifest, "x")
    assert '<p class="written">one\n\n  two opens late</p>' in page


def test_a_page_needs_no_tasks_and_no_breakdown(manifest: Manifest) -> None:
    metrics = {key: value for key, value in sample_metrics().items() if key in {"perplexity", "fidelity"}}
    text = Page(report_page(sample_report(manifest, metrics=metrics), manifest, verdict_of(manifest))).text
    assert "Tasks" not in text
    assert "Where it breaks" not in text
    assert "Answers" not in text
