"""Grow the items of the quantkit tasks: `python evals/tasks/grow.py` writes the same bytes every time.

The parts (parts.json) are written by hand in English and Chinese; a seed of each task and language draws from them.
Items alternate between the languages, so that the first so many of a task are balanced.
"""

import json
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS: dict[str, Any] = json.loads((HERE / "parts.json").read_text(encoding="utf-8"))
LANGUAGES = ("en", "zh")
PAIRS = 150

# Lengths of the retrieval contexts in tokens, and how many characters of them make a token. Measured with the tokenizer
# of the demo's model, which knows few Chinese words; another tokenizer counts differently, the items stay the same.
LENGTHS = (256, 512, 1024, 1536)
PER_LENGTH = 30
CHARACTERS_A_TOKEN = {"en": 4.24, "zh": 0.584}
QUESTION_TOKENS = {"en": 100, "zh": 170}

Item = dict[str, Any]


class Writer:
    """Draws parts in one language, with its own stream of random numbers."""

    def __init__(self, task: str, language: str) -> None:
        self.random = random.Random(f"{task} {language}")
        self.language = language

    def shuffled(self, kind: str) -> Iterator[str]:
        """All parts of a kind in an order of chance, again and again."""
        while True:
            yield from map(self.say, self.random.sample(PARTS[kind], len(PARTS[kind])))

    def say(self, pair: list[str]) -> str:
        """The half of an [English, Chinese] pair that is in this language."""
        return pair[LANGUAGES.index(self.language)]

    def pick(self, kind: str) -> str:
        return self.say(self.random.choice(PARTS[kind]))

    def number(self) -> int:
        """Four digits. The prompts and the calibration texts use smaller numbers, so nothing can be remembered."""
        return self.random.randint(2000, 9999)

    def numbers(self, size: int) -> list[int]:
        return self.random.sample(range(2000, 10000), size)

    def components(self, size: int) -> list[str]:
        return [part[self.language] for part in self.random.sample(PARTS["components"], size)]

    def pressure(self) -> str:
        return f"{self.random.randint(3, 98) / 10:.1f} MPa"

    def join(self, sentences: list[str]) -> str:
        return (" " if self.language == "en" else "").join(sentences)


def json_schema(writer: Writer) -> Item:
    """A note to be drafted as a hazard-log entry."""
    part = writer.random.choice(PARTS["components"])
    component, hazard = part[writer.language], writer.say(writer.random.choice(part["hazards"]))
    entry = {
        "id": f"HZ-{writer.number()}",
        "component": component,
        "hazard": hazard,
        "severity": writer.pick("severity"),
        "likelihood": writer.random.randint(1, 5),
    }
    cause = writer.pick("causes")
    text = {
        "en": f"Note: Entry {entry['id']}. The {component} {hazard}. {cause} "
        f"Severity {entry['severity']}, likelihood {entry['likelihood']}.\nJSON:",
        "zh": f"记录：编号 {entry['id']}。{component}{hazard}。{cause}"
        f"后果{entry['severity']}，可能性 {entry['likelihood']}。\nJSON:",
    }
    answer = " " + json.dumps(entry, ensure_ascii=False)
    return {"text": text[writer.language], "entry": entry["id"], "answer": answer}


def evidence_copy(writer: Writer) -> Item:
    """Sentences of which some hold evidence references, among other numbers that look alike."""
    references = [f"EV-{number}" for number in writer.numbers(2)]
    kinds = ["copying"] * len(references) + ["plain"] * writer.random.randint(1, 2)
    writer.random.shuffle(kinds)
    left = iter(references)
    sentences = []
    for kind, component in zip(kinds, writer.components(len(kinds)), strict=True):
        sentences.append(
            writer.pick(kind).format(
                component=component,
                evidence=writer.pick("evidence"),
                section=writer.pick("sections"),
                number=writer.number(),
                ref=next(left) if kind == "copying" else "",
            )
        )
    body = _capital(writer.join(sentences))
    text = {"en": f"Text: {body}\nEvidence:", "zh": f"文本：{body}\n证据："}
    return {"text": text[writer.language], "references": references, "answer": _lead(writer) + ", ".join(references)}


def domain_check(writer: Writer) -> Item:
    """A register of evidence, a claim that one of its entries supports, and what is known of it."""
    components = writer.components(3)
    references = [f"EV-{number}" for number in writer.numbers(3)]
    evidence = [writer.say(pair) for pair in writer.random.sample(PARTS["evidence"], 3)]
    chosen = writer.random.randrange(3)
    claim = writer.pick("claims").format(component=components[chosen])
    severity, status = writer.pick("severity"), writer.pick("status")
    entries = list(zip(references, evidence, components, strict=True))
    if writer.language == "en":
        register = "; ".join(f"{ref} {what} of the {which}" for ref, what, which in entries)
        text = f"Register: {register}.\nClaim: {claim} Its failure would be {severity}. The point is {status}.\n"
        answer = f"Severity: {severity}\nEvidence: {references[chosen]}\nStatus: {status}"
    else:
        register = "；".join(f"{ref} {which}的{what}" for ref, what, which in entries)
        text = f"清单：{register}。\n论点：{claim}失效后果{severity}。此点{status}。\n"
        answer = f"严重度：{severity}\n证据：{references[chosen]}\n状态：{status}"
    return {"text": text, "references": references, "answer": answer}


def passage_choice(writer: Writer) -> Item:
    """Facts of two kinds and a question about one of them; the four options are of its kind."""
    asked, other = writer.random.sample(PARTS["facts"], 2)
    options = _values(writer, asked["kind"], 4)
    components, tags = writer.components(4), writer.numbers(4)
    facts = [asked, asked, other, other]
    values = [*options[:2], *_values(writer, other["kind"], 2)]
    sentences = [
        fact[writer.language][0].format(component=component, tag=f"T-{tag}", value=value)
        for fact, component, tag, value in zip(facts, components, tags, values, strict=True)
    ]
    question = asked[writer.language][1].format(component=components[0], tag=f"T-{tags[0]}")
    correct = options[0]
    writer.random.shuffle(sentences)
    writer.random.shuffle(options)
    passage = writer.join(sentences)
    text = {
        "en": f"Passage: {passage}\nQuestion: {question}\nAnswer:",
        "zh": f"短文：{passage}\n问题：{question}\n回答：",
    }
    return {
        "text": text[writer.language],
        "choices": [_lead(writer) + option for option in options],
        "gold": options.index(correct),
    }


def retrieval(writer: Writer, length: int) -> Item:
    """Notes of about `length` tokens, in one of which stands a code that the question asks for."""
    budget = (length - QUESTION_TOKENS[writer.language]) * CHARACTERS_A_TOKEN[writer.language]
    tags, codes = writer.numbers(3), writer.numbers(3)
    needles = [writer.pick("needles").format(tag=f"RV-{tag}", code=code) for tag, code in zip(tags, codes, strict=True)]
    sentences: list[str] = []
    fillers = writer.shuffled("filler")
    while sum(map(len, sentences)) < budget:
        sentences.append(
            next(fillers).format(
                hour=writer.random.randint(2, 23),
                value=writer.pressure(),
                number=writer.number(),
                component=writer.components(1)[0],
                evidence=writer.pick("evidence"),
                section=writer.pick("sections"),
                person=writer.pick("people"),
                place=writer.pick("places"),
                month=writer.pick("months"),
                medium=writer.pick("media"),
            )
        )
    for needle in needles:
        sentences.insert(writer.random.randint(0, len(sentences)), needle)
    notes = writer.join([_capital(sentence) for sentence in sentences])
    text = {
        "en": f"{notes}\nQuestion: What is the locker code of valve RV-{tags[0]}?\n"
        f"Answer: The locker code of valve RV-{tags[0]} is",
        "zh": f"{notes}\n问题：阀门 RV-{tags[0]} 的柜锁密码是多少？\n回答：阀门 RV-{tags[0]} 的柜锁密码是",
    }
    return {"text": text[writer.language], "length": length, "code": str(codes[0]), "answer": f" {codes[0]}"}


def _values(writer: Writer, kind: str, size: int) -> list[str]:
    """`size` different values of a kind."""
    if kind == "pressure":
        found: list[str] = []
        while len(found) < size:
            found = [*found, *({writer.pressure()} - set(found))]
        return found
    return [writer.say(pair) for pair in writer.random.sample(PARTS[kind], size)]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lead(writer: Writer) -> str:
    """What stands between a prompt and its answer: English writes a space."""
    return " " if writer.language == "en" else ""


def _alternate(task: str, grow: Callable[[Writer], Item]) -> Iterator[Item]:
    writers = [Writer(task, language) for language in LANGUAGES]
    for _ in range(PAIRS):
        for writer in writers:
            yield {"language": writer.language, **grow(writer)}


def _by_length() -> Iterator[Item]:
    writers = [Writer("retrieval", language) for language in LANGUAGES]
    for _ in range(PER_LENGTH):
        for length in LENGTHS:
            for writer in writers:
                yield {"language": writer.language, **retrieval(writer, length)}


def grown() -> dict[str, str]:
    """The text of every file, by its name."""
    items = {
        "quantkit_json_schema": _alternate("json_schema", json_schema),
        "quantkit_evidence_copy": _alternate("evidence_copy", evidence_copy),
        "quantkit_domain_check": _alternate("domain_check", domain_check),
        "quantkit_passage_choice": _alternate("passage_choice", passage_choice),
        "quantkit_retrieval": _by_length(),
    }
    files = {}
    for task, drawn in items.items():
        lines = (json.dumps({"id": f"{number:03}", **item}, ensure_ascii=False) for number, item in zip(count(), drawn))
        files[f"{task}.jsonl"] = "".join(line + "\n" for line in lines)
    return files


def main() -> None:
    """Write every file beside this one."""
    for name, text in grown().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
