"""Imports point to lower layers, and are at the top of their file."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

LAYERS = (
    {"errors"},
    {"config", "drawing"},
    {"grammar", "kernels", "planner", "registry", "tokenization"},
    {"cache"},
    {"documents", "retrieval"},
    {"policies", "reuse"},
    {"models"},
    {"engine"},
    {"exactness_gate"},
    {"llm"},
    {"step_thread"},
    {"async_llm"},
    {"eval", "hf"},
    {"bench"},
    {"__init__"},
    {"server"},
    {"batch"},
    {"cli", "integrations"},  # users of the public interface
    {"__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

LAZY_PARTS = {"cli", "__init__"}
"""Parts that import on use: a command pays for what it needs, `import keyhole` for nothing."""

LAZY_FILES = {
    "keyhole/kernels/__init__.py",  # chooses its backend at the first use of an operation
    "keyhole/kernels/triton/__init__.py",  # no kernel, and no Triton, before one is needed
    "keyhole/registry.py",  # tables of methods, with entries from other packages
}
"""Files whose job is to import by name."""

OPTIONAL = {
    *("aiohttp", "apsw", "flashinfer", "gguf", "llguidance", "markitdown", "matplotlib"),
    *("opentelemetry", "peft", "scipy", "sqlite_vec"),
}
"""Packages that may be absent, and so may be imported inside the function that needs them."""


class Import(NamedTuple):
    line: int
    target: str
    in_function: bool


class _Imports(ast.NodeVisitor):
    def __init__(self, package: str) -> None:
        self.package = package.split(".")
        self.found: list[Import] = []
        self.depth = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_Import(self, node: ast.Import) -> None:
        self._add(node, *(alias.name for alias in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self.package[: len(self.package) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inside = f"{base}.{alias.name}"
            self._add(node, inside if base == "keyhole" or is_module(inside) else base)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else None
        called = node.func.id if isinstance(node.func, ast.Name) else called
        if called in ("import_module", "__import__") and node.args:
            first = node.args[0]
            name = first.value if isinstance(first, ast.Constant) else "a computed name"
            self._add(node, str(name))
        self.generic_visit(node)

    def _add(self, node: ast.stmt | ast.expr, *targets: str) -> None:
        self.found += [Import(node.lineno, target, self.depth > 0) for target in targets]


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(source: str, package: str) -> list[Import]:
    """Every import in `source`, a module directly inside `package`, with absolute targets."""
    visitor = _Imports(package)
    visitor.visit(ast.parse(source))
    return visitor.found


def part_of(module: str) -> str:
    """The part of Keyhole that `module` belongs to; the top level for any other public name."""
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in LEVEL else "__init__"


def upward(part: str, found: list[Import]) -> Iterator[str]:
    for line, target, _ in found:
        if target.split(".")[0] != "keyhole":
            continue
        other = part_of(target)
        if other != part and LEVEL[other] >= LEVEL[part]:
            yield f"line {line}: {part} imports {target}, which is not below it"


def hidden(part: str, found: list[Import]) -> Iterator[str]:
    for line, target, in_function in found:
        if in_function and part not in LAZY_PARTS and target.split(".")[0] not in OPTIONAL:
            yield f"line {line}: imports {target} inside a function"


@cache
def modules() -> list[tuple[str, str, list[Import]]]:
    """Path, part and imports of every module of the package."""
    found = []
    for path in sorted((ROOT / "keyhole").rglob("*.py")):
        inside = path.relative_to(ROOT)
        part = inside.parts[1].removesuffix(".py")
        found.append((str(inside), part, imports(path.read_text(), ".".join(inside.parts[:-1]))))
    return found


def circle(files: Mapping[str, list[Import]]) -> list[str]:
    """Modules that import each other, the first one again at the end; empty if there are none.

    The `__init__` of a package is a door to what is in it, and may be imported from there.
    """
    try:
        TopologicalSorter({m: {at.target for at in found} for m, found in files.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_layers_are_those_of_the_package() -> None:
    assert {part for _, part, _ in modules()} == set(LEVEL)


def test_imports_point_down() -> None:
    assert not [
        f"{path} {fault}" for path, part, found in modules() for fault in upward(part, found)
    ]


def test_no_two_files_import_each_other() -> None:
    assert not circle(
        {
            path.removesuffix(".py").replace("/", "."): found
            for path, _, found in modules()
            if not path.endswith("__init__.py")
        }
    )


def test_two_files_that_import_each_other_are_found() -> None:
    upper = imports("def f():\n    from keyhole.cli import bench", "keyhole.cli")
    lower = imports("from keyhole.cli.about import SHELLS", "keyhole.cli")
    assert circle({"keyhole.cli.about": upper, "keyhole.cli.bench": lower})
    assert not circle({"keyhole.cli.about": upper, "keyhole.cli.bench": []})


def test_imports_stand_at_the_top_of_the_file() -> None:
    assert not [
        f"{path} {fault}"
        for path, part, found in modules()
        if path not in LAZY_FILES
        for fault in hidden(part, found)
    ]


@pytest.mark.parametrize(
    "source",
    [
        "import keyhole.engine",
        "from keyhole import engine",
        "from keyhole import LLM",
        "import keyhole",
        "from keyhole.llm import LLM",
        "from ..engine import llm",
        "from .. import engine",
        "from keyhole.reuse import base",
        "if True:\n    from keyhole.models import loading",
        "importlib.import_module('keyhole.engine')",
    ],
)
def test_an_import_that_does_not_point_down_is_found(source: str) -> None:
    assert len(list(upward("policies", imports(source, "keyhole.policies")))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from keyhole import errors",
        "from keyhole.cache.pages import Pages",
        "from ..kernels import attend",
        "from . import base",
        "from keyhole.policies.base import Policy",
        "import torch, keyholes",
    ],
)
def test_an_import_that_points_down_is_accepted(source: str) -> None:
    assert not list(upward("policies", imports(source, "keyhole.policies")))


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch",
        "class A:\n    async def f(self):\n        from keyhole import errors",
        "def f(name):\n    return importlib.import_module(name)",
        "f = lambda: __import__('torch')",
    ],
)
def test_an_import_inside_a_function_is_found(source: str) -> None:
    found = imports(source, "keyhole.policies")
    assert len(list(hidden("policies", found))) == 1
    assert not list(hidden("cli", found))


def test_an_optional_package_may_be_imported_inside_a_function() -> None:
    found = imports("def plot():\n    from matplotlib import pyplot", "keyhole.eval")
    assert not list(hidden("eval", found))


def test_the_documented_layers_are_these() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = text.split("| layer, from the top |")[1].split("\n\n")[0].splitlines()[2:]
    shown = [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in reversed(rows)]
    # `__init__` and `__main__` are doors, not layers.
    assert shown == [parts for parts in LAYERS if not parts & {"__init__", "__main__"}]
