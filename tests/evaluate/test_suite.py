"""Suites: strict documents that name a text once, and a limit that is part of what a report says."""

from pathlib import Path

import pytest

from quantkit.data import shipped_names
from quantkit.errors import SchemaError, UsageError
from quantkit.evaluate.suite import Suite, load_suite
from quantkit.texts import load_text

CORPUS = {"text": "handbook-zh", "windows": 12, "length": 64}


def write(directory: Path, text: str) -> str:
    path = directory / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", shipped_names("evals/suites"))
def test_every_shipped_suite_loads_under_its_own_name(name: str) -> None:
    assert load_suite(name).name == name


def test_the_default_suite_has_two_corpora_and_one_is_chinese() -> None:
    suite = load_suite("quick")
    assert len(suite.perplexity) == 2
    chinese = [corpus.text for corpus in suite.perplexity if corpus.text.endswith("-zh")]
    assert load_text(chinese[0]).language == "zh"
    assert suite.fidelity in suite.perplexity, "fidelity shares the run of a perplexity corpus"


def test_a_limit_that_no_library_can_count_to_cuts_nothing() -> None:
    limited = load_suite("standard").limited(10**30)
    assert {entry.limit for entry in limited.task_entries} == {48, 80, 200}
    assert limited.generation is not None
    assert limited.generation.limit == 16


def test_a_limit_cuts_every_text_and_never_adds_windows() -> None:
    suite = Suite(name="s", perplexity=[CORPUS, {**CORPUS, "text": "b", "windows": 2}], fidelity=CORPUS)
    limited = suite.limited(5)
    assert [corpus.windows for corpus in limited.perplexity] == [5, 2]
    assert limited.fidelity is not None
    assert limited.fidelity.windows == 5
    assert suite.limited(None) is suite
    assert [corpus.windows for corpus in suite.perplexity] == [12, 2]


def test_a_task_is_a_name_or_a_name_with_settings(tmp_path: Path) -> None:
    body = (
        "perplexity: [{text: a, windows: 1, length: 64}]\ntasks: [arc_easy, {name: own.yaml, limit: 9, num_fewshot: 2}]"
    )
    first, second = load_suite(write(tmp_path, f"name: mine\n{body}\n")).task_entries
    assert (first.name, first.limit, first.num_fewshot) == ("arc_easy", None, None)
    assert (second.name, second.limit, second.num_fewshot) == ("own.yaml", 9, 2)


def test_a_limit_cuts_every_task_and_keeps_its_examples() -> None:
    suite = Suite(name="s", perplexity=[CORPUS], tasks=["a", {"name": "b", "limit": 2, "num_fewshot": 3}])
    limited = suite.limited(5)
    assert [(entry.limit, entry.num_fewshot) for entry in limited.task_entries] == [(5, None), (2, 3)]
    cut = Suite(name="s", perplexity=[{**CORPUS, "windows": 2}], tasks=[{"name": "b", "limit": 2}])
    assert cut.limited(5) == cut


def test_tasks_are_part_of_the_hash_and_their_absence_changes_none() -> None:
    plain = Suite(name="s", perplexity=[CORPUS])
    assert Suite(name="s", perplexity=[CORPUS], tasks=[]).sha256 == plain.sha256
    some = [
        plain,
        *(Suite(name="s", perplexity=[CORPUS], tasks=tasks) for tasks in (["a"], [{"name": "a", "limit": 3}])),
    ]
    assert len({suite.sha256 for suite in some}) == 3


def test_what_is_generated_is_part_of_the_hash_and_its_absence_changes_none() -> None:
    plain, asked = Suite(name="s", perplexity=[CORPUS]), {"prompts": "case-study", "new_tokens": 8}
    assert Suite(name="s", perplexity=[CORPUS], generation=None).sha256 == plain.sha256
    some = [Suite(name="s", perplexity=[CORPUS], generation=asked | changes) for changes in ({}, {"batch": 8})]
    assert len({suite.sha256 for suite in [plain, *some]}) == 3


def test_a_limit_cuts_the_prompts_and_nothing_else_of_what_is_generated() -> None:
    asked = {"prompts": "case-study", "new_tokens": 8, "batch": 4}
    for own, expected in ((None, 5), (16, 5), (3, 3)):
        limited = Suite(name="s", perplexity=[CORPUS], generation=asked | {"limit": own}).limited(5).generation
        assert limited is not None
        assert limited.model_dump() == asked | {"limit": expected}


def test_the_hash_of_quick_is_that_of_the_reports_made_before_there_were_tasks() -> None:
    assert load_suite("quick").sha256 == "974bac38e0853530851f2d105b4f5453e67e1e1b275108482e4b4070fcc7c002"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_leaves_nothing_is_an_error(limit: int) -> None:
    with pytest.raises(UsageError, match="leaves nothing"):
        load_suite("quick").limited(limit)


def test_the_hash_changes_with_the_windows() -> None:
    first = Suite(name="s", perplexity=[CORPUS])
    assert first.sha256 == Suite(name="s", perplexity=[CORPUS]).sha256
    assert first.sha256 != Suite(name="s", perplexity=[{**CORPUS, "windows": 11}]).sha256
    assert first.sha256 != Suite(name="s", perplexity=[CORPUS], bos="window").sha256


def test_an_unknown_key_names_the_nearest_one(tmp_path: Path) -> None:
    path = write(tmp_path, "name: mine\nperplexity: [{text: a, windows: 1, lenght: 64}]\n")
    with pytest.raises(SchemaError, match=r"perplexity\.0\.lenght.*did you mean 'length'"):
        load_suite(path)


@pytest.mark.parametrize(
    "body",
    [
        "perplexity: []",
        "perplexity: [{text: a, windows: 0, length: 64}]",
        "perplexity: [{text: a, windows: 1, length: 1}]",
        "perplexity: [{text: a, windows: 1.5, length: 64}]",
        "perplexity: [{text: a, windows: 1, length: 64}, {text: a, windows: 2, length: 64}]",
        "perplexity: [{text: a, windows: 1, length: 64}]\nbos: sometimes",
        "fidelity: {text: a, windows: 1, length: 64}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ntasks: [a, {name: a, limit: 3}]",
        "perplexity: [{text: a, windows: 1, length: 64}]\ntasks: [{name: a, limit: 0}]",
        "perplexity: [{text: a, windows: 1, length: 64}]\ntasks: [{name: a, num_fewshot: -1}]",
        "perplexity: [{text: a, windows: 1, length: 64}]\ntasks: [7]",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: {prompts: a}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: {prompts: a, new_tokens: 0}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: {prompts: a, new_tokens: 8, limit: 0}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: {prompts: a, new_tokens: 8, batch: 1}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: {prompts: a, new_tokens: 8, batch: 1025}",
        "perplexity: [{text: a, windows: 1, length: 64}]\ngeneration: [a]",
        "perplexity: [{text: a, windows: 1, length: 64}]\nperplexity: []",
    ],
)
def test_a_suite_that_makes_no_sense_is_an_error_naming_the_file(body: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"mine\.yaml"):
        load_suite(write(tmp_path, f"name: mine\n{body}\n"))


def test_a_wrong_setting_of_a_task_is_named(tmp_path: Path) -> None:
    body = "name: mine\nperplexity: [{text: a, windows: 1, length: 64}]\ntasks: [b, {name: a, limit: 0}]\n"
    with pytest.raises(SchemaError, match=r"tasks\.1\..*limit: .*greater than or equal to 1"):
        load_suite(write(tmp_path, body))


def test_a_name_that_is_not_shipped_lists_the_near_ones() -> None:
    with pytest.raises(SchemaError, match="quick"):
        load_suite("quik")
