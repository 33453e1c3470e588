"""Every reader of files that others wrote, as a function of bytes: it may raise a typed error and nothing else.

`TARGETS` is what both the hypothesis tests and `make fuzz` run. Each target gets a folder of its own making and bytes
to put in one place of it; an exception that is no QuantkitError, more memory than `MEMORY` or more time than `SECONDS`
is a failure.
"""

import copy
import io
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import safetensors.torch
import torch
from hypothesis import strategies as st
from rich.console import Console

from quantkit.artifact import verify
from quantkit.attest import FORMATS, attest
from quantkit.blocks import build_skeleton
from quantkit.calibration import load_set
from quantkit.checkpoint import open_checkpoint
from quantkit.compare import compare
from quantkit.errors import QuantkitError
from quantkit.evaluate.loader import load_artifact
from quantkit.evaluate.suite import load_suite
from quantkit.gates import gate, load_policy
from quantkit.ggufheader import check_gguf
from quantkit.inspection import inspect_artifact, inspect_plan
from quantkit.manifest import read_manifest
from quantkit.pages import artifact_page
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe, matches
from quantkit.report import write_report
from quantkit.scorecard import update_card
from quantkit.tables import comparison_table, inspection_tables, verdict_table
from quantkit.tensorfile import read_header, read_tensor
from quantkit.texts import load_source
from tests import zoo
from tests.samples import HOSTILE, sample_report

SECONDS = 60
MEMORY = 2 << 30

# Values that a field may hold and should not.
WILD: list[Any] = [
    None, True, -1, 0, 1, 1 << 31, 1 << 62, 10**30, 1.5, -1e308, float("nan"), float("inf"), "", "0", "..",
    "/etc/passwd", "../../outside", "a/../../b", "\0", "\ud800", "\x1b[31m", HOSTILE, "{{ 7 * 7 }}", "${7*7}",
    r"re:(.|\w|[a-z.]+)*\d\d$", "[/bold]", "x" * 5000, [], [[]], {}, {"": None}, [None] * 50, "model.safetensors",
    "torch", "os.system", f"model.layers.{'1' * 5000}.mlp.up_proj", "1" * 5000,
]  # fmt: skip


@contextmanager
def bounded() -> Iterator[None]:
    """Fails what takes more than SECONDS or MEMORY more bytes, with an exception that no reader turns into its own."""

    def stop(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


class Hang(BaseException):
    """Time is up. No Exception, so that readers that catch those do not hide it."""


@dataclass
class Target:
    """prepare: fills an empty folder once. place: the file in it that gets the bytes. read: the reader under test.

    seed: a good document, as bytes or as the values of a JSON one. slow: examples take long, so there are fewer.
    """

    place: str
    read: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda _: None
    values: Any = None
    data: bytes = b""
    slow: bool = False
    folders: dict[Path, Any] = field(default_factory=dict)

    def good(self, folder: Path) -> bytes:
        """The document that the reader takes, where there is one in the folder."""
        if self.values is not None:
            return json.dumps(self.values).encode()
        return self.data or (folder / self.place).read_bytes()

    def run(self, folder: Path, data: bytes) -> bool:
        """Put `data` in its place and read; whether it was taken. Raises whatever is no typed error."""
        path = folder / self.place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        try:
            with bounded():
                self.read(folder)
        except QuantkitError as error:
            if not (error.problem and error.action):
                raise AssertionError(f"{error!r} says too little") from error
            return False
        return True


def _checkpoint(folder: Path) -> None:
    zoo.save("llama", folder / "model")


def _sharded(folder: Path) -> None:
    _checkpoint(folder)
    tensors = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for n, part in enumerate((names[:7], names[7:]), 1):
        shard = f"model-0000{n}-of-00002.safetensors"
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / "model" / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model" / "model.safetensors").unlink()
    shutil.copy(folder / "model" / shard, folder / "outside.safetensors")
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _artifact(folder: Path) -> None:
    _checkpoint(folder)
    plan = make_plan(open_checkpoint(str(folder / "model")), load_recipe("rtn-g64"))
    converted = convert(plan, folder / "artifact")
    write_report(sample_report(converted.manifest), folder / "artifact" / "evals" / "quick.json")


def _gguf(folder: Path) -> None:
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    writer.add_tensor("token_embd.weight", torch.zeros(2, 64).numpy())
    writer.add_tensor("output_norm.weight", torch.zeros(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _read_safetensors(folder: Path) -> None:
    for entry in read_header(folder / "m.safetensors").values():
        assert read_tensor(entry).nbytes == entry.nbytes <= entry.path.stat().st_size


def _read_model(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder / "model"))
    assert all(path.parent == folder / "model" for path in checkpoint.weight_files)
    _show(inspect_plan(make_plan(checkpoint, load_recipe("rtn-g64"))))
    build_skeleton(checkpoint, real_buffers=True)


def _read_artifact(folder: Path) -> None:
    """All that reads a manifest, each on its own: one that refuses it must not keep the others from it."""
    artifact = folder / "artifact"
    for read in (
        lambda: verify(artifact),
        lambda: _show(inspect_artifact(artifact)),
        lambda: _show_verdict(artifact),
        lambda: artifact_page(artifact, "quick"),
        lambda: update_card(artifact),
        lambda: load_artifact(artifact),
        *(lambda name=name: attest(artifact, name) for name in FORMATS),
    ):
        try:
            read()
        except QuantkitError:
            continue
    read_manifest(artifact)


def _read_run(folder: Path) -> None:
    verify(folder / "artifact")
    for name in FORMATS:
        attest(folder / "artifact", name)


def _read_report(folder: Path) -> None:
    artifact = folder / "artifact"
    update_card(artifact)
    for name in FORMATS:
        attest(artifact, name)
    artifact_page(artifact, "quick")
    Console(file=io.StringIO()).print(comparison_table(compare([artifact, artifact], "quick")))
    _show_verdict(artifact)


def _show_verdict(artifact: Path) -> None:
    Console(file=io.StringIO()).print(verdict_table(gate(artifact, load_policy("smoke"))))


def _show(found: dict[str, Any]) -> None:
    for table in inspection_tables(found):
        Console(file=io.StringIO()).print(table)


def _read_recipe(folder: Path) -> None:
    recipe = load_recipe(str(folder / "recipe.yaml"))
    for pattern in [*recipe.ignore, *(override.match for override in recipe.overrides)]:
        matches(pattern, "model.layers.0.self_attn.q_proj")


_RECIPE = {
    "name": "r", "description": "d",
    "weights": {"bits": 4, "granularity": "group", "group_size": 64, "symmetric": True},
    "group_fallback": [32], "ignore": ["lm_head", "re:.*gate"], "passes": [{"awq": {"n_grid": 20}}, "rtn"],
    "overrides": [{"match": "re:.*down_proj$", "weights": None}],
    "calibration": {"set": "default", "samples": 4, "sequence_length": 16},
}  # fmt: skip
_POLICY = {
    "name": "p", "suite": "quick", "require": {"corpora_at_least": 2},
    "limits": [{"metric": "fidelity.kl_mean", "max": 0.5, "upper": True}],
}  # fmt: skip
_SUITE = {
    "name": "s", "perplexity": [{"text": "wiki-en", "windows": 2, "length": 16}],
    "fidelity": {"text": "wiki-en", "windows": 2, "length": 16}, "tasks": [{"name": "t", "limit": 2}],
}  # fmt: skip
_TEXT = {
    "name": "t", "description": "d", "language": "en", "license": "x", "file": "notes.jsonl", "layout": "jsonl",
    "field": "text", "documents": 3,
}  # fmt: skip
_SET = {"name": "c", "description": "d", "parts": [{"text": "notes.jsonl", "share": 1.0}]}

TARGETS: dict[str, Target] = {
    "safetensors": Target(
        "m.safetensors", _read_safetensors, data=safetensors.torch.save({"a": torch.zeros(2), "b": torch.zeros(3, 2)})
    ),
    "index": Target("model/model.safetensors.index.json", _read_model, _sharded, slow=True),
    "config": Target("model/config.json", _read_model, _checkpoint, slow=True),
    "weights": Target("model/model.safetensors", _read_model, _checkpoint, slow=True),
    "manifest": Target("artifact/manifest.json", _read_artifact, _artifact, slow=True),
    "run": Target("artifact/run.json", _read_run, _artifact, slow=True),
    "report": Target("artifact/evals/quick.json", _read_report, _artifact, slow=True),
    "card": Target("artifact/README.md", lambda folder: update_card(folder / "artifact"), _artifact, slow=True),
    "gguf": Target("model.gguf", lambda folder: check_gguf(folder / "model.gguf"), _gguf),
    "recipe": Target("recipe.yaml", _read_recipe, values=_RECIPE),
    "policy": Target("policy.yaml", lambda folder: load_policy(str(folder / "policy.yaml")), values=_POLICY),
    "suite": Target("suite.yaml", lambda folder: load_suite(str(folder / "suite.yaml")), values=_SUITE),
    "text": Target("text.yaml", lambda folder: load_source(str(folder / "text.yaml")), values=_TEXT),
    "set": Target("set.yaml", lambda folder: load_set(str(folder / "set.yaml")), values=_SET),
    "rows": Target("notes.jsonl", lambda folder: load_source(str(folder / "notes.jsonl")), values={"text": "a b c"}),
}
JSON_TARGETS = [name for name in TARGETS if name not in {"safetensors", "weights", "gguf", "card"}]


def places(value: Any, so_far: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a JSON document, the whole first."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value[:3]))
    return [so_far, *(place for key, part in inner for place in places(part, (*so_far, key)))]


def spelt(value: Any) -> bytes:
    """JSON as the manifest is spelt: another spelling would be refused before its values are looked at."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="surrogatepass") + b"\n"


@st.composite
def changed(draw: st.DrawFn, good: Any) -> bytes:
    """A JSON document with one to three of its values replaced, removed or renamed."""
    value = json.loads(json.dumps(good))
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(places(value)[1:] or [(None,)]))
        place = value
        for key in path:
            place = place[key]
        if not isinstance(place, dict | list) or last is None:
            continue
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"]))
        if action == "replace":
            place[last] = copy.deepcopy(draw(st.sampled_from(WILD)))
        elif isinstance(place, dict):
            kept = place.pop(last)
            if action == "rename":
                place[draw(st.sampled_from([wild for wild in WILD if isinstance(wild, str)]))] = kept
        else:
            del place[last]
    return spelt(value)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Bytes with some changed, cut off, doubled, or replaced altogether."""
    data = bytearray(good)
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(data)), st.integers(0, 255)), max_size=6)):
        if data:
            data[place % len(data)] = byte
    start, stop = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
    action = draw(st.sampled_from(["keep", "keep", "cut", "repeat", "other"]))
    if action == "cut":
        del data[start:stop]
    elif action == "repeat":
        data[stop:stop] = data[start:stop]
    elif action == "other":
        return draw(st.binary(max_size=200))
    return bytes(data)


if sys.platform != "linux":  # the limits above read /proc
    raise RuntimeError("the hostile input tests need Linux")
