"""Typed errors: each says in one line what is wrong and what to do next.

The command line prints the line and leaves with `exit_code`; a library user catches the type. A traceback is never the
answer to something that a user can cause.
"""


def one_line(error: BaseException) -> str:
    """All that a library's error says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of what a library's error says; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """`text` with control characters, half character pairs and the like written as escapes: safe on a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)


class QuantkitError(Exception):
    """Base of every error that a user can cause. `problem` names the file, layer or key; `action` is the next step."""

    exit_code = 2

    def __init__(self, problem: str, action: str) -> None:
        self.problem = problem
        self.action = action
        super().__init__(f"{problem}; {action}")


class UsageError(QuantkitError):
    """A flag or argument cannot be used as given."""


class CheckpointError(QuantkitError):
    """The source checkpoint is missing, broken, hostile, or holds something that cannot be read safely."""


class SchemaError(QuantkitError):
    """A YAML or JSON document (recipe, suite, policy, manifest, report) does not fit its schema."""


class RecipeError(QuantkitError):
    """The recipe is well formed but cannot be applied to this model."""


class NumericsError(QuantkitError):
    """A value that no honest number format can hold: NaN, infinity, a scale outside its dtype."""


class TextError(QuantkitError):
    """A text source cannot be fetched, read, or is too short for what was asked."""


class TaskError(QuantkitError):
    """An evaluation task is not known, cannot be had, or cannot be run on this model."""


class CalibrationError(QuantkitError):
    """The calibration set is missing, too short, or holds nothing to calibrate on."""


class ArtifactError(QuantkitError):
    """An artifact directory cannot be written, or is not what its manifest says."""


class ReportError(QuantkitError):
    """An evaluation report is missing, or belongs to other bytes or another protocol."""


class LedgerError(QuantkitError):
    """The ledger is damaged, cannot be written, or holds nothing to do what was asked."""


class RestoreError(QuantkitError):
    """The artifact that a rollback would restore is gone or changed: the check said no."""

    exit_code = 1


class InterruptedRunError(QuantkitError):
    """The run was stopped by a signal; nothing stands under the final name."""

    exit_code = 3
