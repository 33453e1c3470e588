"""Chat messages into text: rendered with the model's own template, in the sandbox of transformers.

A conversation is a list of `{"role": ..., "content": ...}`, both text; further keys are handed to the template.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from quantkit.canonical import sha256_bytes
from quantkit.errors import CalibrationError, TextError, one_line
from quantkit.limits import run_bounded
from quantkit.texts import Chat, Text

# What rendering may take, for any text and for what is in it: a row takes a millisecond, and little more than itself.
_SECONDS = 120
_SECONDS_A_ROW = 0.02
_MEMORY = 1 << 30
_MEMORY_A_CHARACTER = 32

# A template may write today's date, and the same source has to give the same bytes on every day: it is given this one.
_DAY = {
    "%Y": "2025", "%y": "25", "%m": "01", "%B": "January", "%b": "Jan", "%d": "01", "%A": "Wednesday", "%a": "Wed",
    "%H": "12", "%M": "00", "%S": "00",
}  # fmt: skip
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f"|replace('{code}', '{value}')" for code, value in _DAY.items())
    # The environment drops the newline after a block, so that the template starts on a line of its own as before.
    + " }}{% endmacro %}\n"
)
# Stands for a message where only what surrounds it is asked for.
_MARK = "THE MESSAGE"


def render(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The conversations of `chat` as the model sees them, joined with nothing: a template ends its turns itself.

    Conversations without messages, or of which the template writes nothing, are counted in `blank`. Raises
    CalibrationError: the tokenizer has no template; a row is no list of messages, or a message lacks role or content;
    the template refuses a row; nothing is left.
    """
    documents = _rendered(chat, tokenizer, _dated(_template(tokenizer)))
    kept = [document for document in documents if document.strip()]
    if not kept:
        raise CalibrationError(f"calibration text {chat.name} holds no messages", "check its file and its field")
    return Text(chat.name, chat.language, kept, "", len(documents) - len(kept))


def ask(question: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """`question` as a user's message, up to where the model is to answer; None where the tokenizer has no template.

    Raises TextError: there are several templates and no default, or the template refuses the message.
    """
    if not tokenizer.chat_template:
        return None

    def write() -> str:
        return _whole(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                chat_template=_dated(str(tokenizer.get_chat_template())),
                tokenize=False,
                add_generation_prompt=True,
            )
        )

    text, problem = _written(write)
    if problem is not None:
        raise TextError(
            f"the chat template refuses a question ({problem})",
            "correct the model's chat template, or leave generation out of the suite",
        )
    return text


def opening(template: str, special: dict[str, str]) -> str | None:
    """What the model reads before the first word of a user who gives no system message: with most templates the default
    system prompt. special: the tokenizer's special tokens by name, as templates know them.

    None where the template writes no such conversation.
    """
    if "strftime_now" in template:
        template = _FIXED_DAY + template
    for content in (_MARK, [{"type": "text", "text": _MARK}]):
        conversation = [{"role": "user", "content": content}]
        write = partial(_plainly, template, conversation, special)
        before, mark, _ = _written(write)[0].partition(_MARK)
        if mark:
            return before.encode(errors="replace").decode()  # a template may write half of a character pair
    return None


def _plainly(template: str, conversation: list[dict[str, Any]], special: dict[str, str]) -> str:
    """What a template makes of a conversation, without a tokenizer."""
    (text,), _ = render_jinja_template([conversation], chat_template=template, **special)
    return str(text)


def _written(write: Callable[[], str]) -> tuple[str, str | None]:
    """The text that a template writes, in a child process with bounds; or nothing, and what is wrong."""

    def work() -> list[str | None]:
        try:
            return [write(), None]
        except Exception as error:  # a template is a program of the model's maker
            return ["", one_line(error)]

    try:
        text, problem = run_bounded(work, _SECONDS, _MEMORY)
    except TimeoutError:
        return "", f"it takes more than {_SECONDS} s"
    except MemoryError as error:
        return "", f"it takes {error} of memory"
    return text, problem


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of the chat template in UTF-8. Raises CalibrationError where there is none."""
    return sha256_bytes(_template(tokenizer).encode())


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except Exception:
        raise CalibrationError(
            "the tokenizer has no chat template, or several and no default",
            "calibrate on plain text, or add the model's chat_template.jinja to the checkpoint",
        ) from None


def _whole(rendered: Any) -> str:
    """What a template wrote. Raises ValueError for half of a character pair, which no tokenizer takes."""
    text = str(rendered)
    text.encode()
    return text


def _dated(template: str) -> str:
    """The template with today's date fixed, where it writes one."""
    return _FIXED_DAY + template if "strftime_now" in template else template


def _rendered(chat: Chat, tokenizer: PreTrainedTokenizerBase, template: str) -> list[str]:
    """The text of each row; empty where it has no messages.

    A template is a program of the model's maker. The sandbox keeps it from files and attributes, but not from loops
    without end or texts without bound: it runs in a child process with a limit on both.
    """
    rows = []
    for number, row in enumerate(chat.rows, 1):
        try:
            rows.append(_messages(row))
        except ValueError as error:
            raise CalibrationError(f"calibration text {chat.name}, row {number}: {error}", "correct that row") from None

    def render_all() -> list[list[str]]:
        """["text", what a row became] each, or up to the first that fails, and then ["problem", what is wrong]."""
        found: list[list[str]] = []
        for messages in rows:
            made = ""
            try:
                if messages:
                    made = _whole(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
            except MemoryError:
                return [*found, ["problem", f"more than {memory >> 20} MiB"]]
            except Exception as error:
                return [*found, ["problem", one_line(error)]]
            found.append(["text", made])
        return found

    seconds = _SECONDS + _SECONDS_A_ROW * len(rows)
    memory = _MEMORY + _MEMORY_A_CHARACTER * sum(len(str(messages)) for messages in rows)
    try:
        answers = run_bounded(render_all, seconds, memory)
    except (TimeoutError, MemoryError) as error:
        reason = f"takes more than {seconds:.0f} s" if isinstance(error, TimeoutError) else f"takes {error} of memory"
        raise CalibrationError(
            f"calibration text {chat.name}: the chat template {reason}", "use another template, or plain text"
        ) from None
    if answers and answers[-1][0] == "problem":
        raise CalibrationError(
            f"calibration text {chat.name}, row {len(answers)}: the chat template refuses it ({answers[-1][1]})",
            "leave out that row, or change its roles to those that the model knows",
        )
    return [text for _, text in answers]


def _messages(row: object) -> list[dict[str, Any]]:
    """The messages of a row. Raises ValueError saying which one is wrong."""
    if not isinstance(row, list):
        raise ValueError(f"it holds {type(row).__name__}, not a list of messages")
    return [_message(number, message) for number, message in enumerate(row, 1)]


def _message(number: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {type(message).__name__}, not an object with role and content")
    # In a table every message has the keys of all others, as null.
    given = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in given:
            raise ValueError(f"message {number} has no {key}")
        if not isinstance(given[key], str):
            raise ValueError(f"{key} of message {number} is {type(given[key]).__name__}, not text")
    return given
