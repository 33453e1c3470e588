"""The package as layers: a module imports only from lower levels, and nothing knows a model by name."""

import ast
import re
from pathlib import Path

import pytest

import quantkit

ROOT = Path(quantkit.__file__).parent

# Lowest first. Modules of one row do not import each other. A new module goes into the first row above its imports.
LEVELS: list[list[str]] = [
    ["errors", "types", "canonical", "data", "files", "spill", "figures", "hooks"],
    ["schema", "affine", "bitpack", "seals", "limits", "sequential"],
    # algorithms: tensors in, tensors out. rtn, search and smoothquant stand alone; gptq uses search; awq uses both.
    ["algorithms.rtn", "algorithms.search", "algorithms.smoothquant"],
    ["algorithms.gptq", "algorithms.reconstruct"],
    ["algorithms.awq", "algorithms.feedback"],
    # the source: files, structure, text, statistics
    ["tensorfile", "ggufheader", "stats"],
    ["checkpoint", "fold"],
    ["blocks", "loading", "material"],
    ["live", "texts"],
    ["tokens", "chat", "sensitivity"],
    ["formats.base"],
    ["formats.compressed_tensors"],
    ["formats.int_quantized"],
    ["formats"],
    ["passes"],
    ["recipe"],
    ["calibration"],
    # the artifact
    ["manifest"],
    ["components", "journal"],
    ["artifact"],
    ["card", "signing", "workspace", "saving"],
    ["plan"],
    ["sink"],
    ["blockwise"],
    ["pipeline"],
    # its evaluation and its release
    ["report", "entries", "diff", "evaluate.uncertainty", "evaluate.kernels", "evaluate.protocol", "evaluate.prompts"],
    ["chain", "evaluate.generation", "evaluate.loader", "evaluate.outcomes", "evaluate.suite"],
    ["evaluate.scoring"],
    ["evaluate.breakdown", "evaluate.decoding", "evaluate.kept", "evaluate.tasks", "evaluate.serving"],
    ["evaluate.asked", "verification"],
    ["ledger", "evaluate.run"],
    ["gates", "inspection", "compare"],
    ["release"],
    ["grids"],
    ["answers"],
    ["tables", "pages"],
    ["attest", "scorecard"],
    ["demo"],
    ["schemas", "cli"],
]
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}
# Packages that hold a docstring and nothing else.
EMPTY = {"", "algorithms", "evaluate"}

FAMILIES = re.compile(r"\b(llama|qwen\d?|mistral|mixtral|gemma\d?|deepseek|phi3?|gpt2|opt|neox)\b", re.IGNORECASE)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


SOURCES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(source: str, modules: set[str]) -> set[str]:
    """Modules of the package that a source imports, wherever the import stands; relative imports as `.`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names = ["quantkit.."]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("quantkit.") in modules else str(node.module) for name in whole]
        else:
            continue
        found |= {name.removeprefix("quantkit").removeprefix(".") for name in names if name.split(".")[0] == "quantkit"}
    return found


def test_every_module_has_exactly_one_level() -> None:
    assert set(LEVEL) == set(SOURCES) - EMPTY
    assert len(LEVEL) == sum(len(modules) for modules in LEVELS)


@pytest.mark.parametrize("module", sorted(set(SOURCES) - EMPTY))
def test_a_module_imports_only_from_lower_levels(module: str) -> None:
    imported = imports(SOURCES[module].read_text(encoding="utf-8"), set(SOURCES))
    assert {name for name in imported if LEVEL.get(name, len(LEVELS)) >= LEVEL[module]} == set()


@pytest.mark.parametrize("package", sorted(EMPTY))
def test_packages_without_a_level_hold_no_code(package: str) -> None:
    body = ast.parse(SOURCES[package].read_text(encoding="utf-8")).body
    assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body)


def test_imports_inside_functions_and_of_whole_modules_are_seen() -> None:
    source = """
import quantkit.plan
import torch
from quantkit import recipe
from quantkit.formats import FORMATS
from quantkit.formats import base
def f():
    from quantkit.cli import main
    from . import other
"""
    modules = {"plan", "recipe", "formats", "formats.base", "cli"}
    assert imports(source, modules) == {"plan", "recipe", "formats", "formats.base", "cli", "."}


def test_algorithms_know_neither_models_nor_files_nor_logs() -> None:
    for module, path in SOURCES.items():
        if module.startswith("algorithms"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            roots = {
                name.split(".")[0]
                for node in ast.walk(tree)
                if isinstance(node, ast.Import | ast.ImportFrom)
                for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            }
            assert roots <= {"torch", "quantkit", "math", "dataclasses", "collections", "typing"}, module
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not names & {"open", "print", "Path"}, module
            assert not re.search(r"\bnn\.Module\b", path.read_text(encoding="utf-8")), module


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_no_model_family_is_named(module: str) -> None:
    lines = SOURCES[module].read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if FAMILIES.search(line)] == []


def test_the_search_for_family_names_would_find_one() -> None:
    assert all(FAMILIES.search(text) for text in ('"Qwen2"', "a Llama model", "gemma3", "phi3", "NeoX"))
    assert not FAMILIES.search("option optimal phips hyperopt")
