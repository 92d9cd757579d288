"""The shape of the package: imports point one way, the scheduler needs no torch, the public names are pinned."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import QwenImagePipeline

import diffusers_continuous
from diffusers_continuous import ContinuousBatchingPipeline

SOURCE = Path(diffusers_continuous.__file__).parent

# A module may import what stands to its right, or a noun. Never what stands to its left.
PATH = [
    "cli",
    "serving",
    "loading",
    "prometheus",
    "pipeline",
    "streams",
    "callbacks",
    "engine",
    "scheduler",
    "admission",
    "runner",
    "batch",
    "layouts",
    "models",
    "attention",
    "decode",
    "pid",
    "memory",
]
NOUNS = {
    "arguments",
    "config",
    "cost_model",
    "cpu_threads",
    "devices",
    "embedded",
    "errors",
    "extras",
    "futures",
    "hooks",
    "memory.block_pool",
    "metrics",
    "models.interface",
    "policy",
    "request",
    "sizes",
}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that `path` imports when it runs; what only a type checker sees does not count."""
    package = path.relative_to(SOURCE).parts[:-1]
    found = set()
    tree = ast.parse(path.read_text())
    for block in [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]:
        block.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            parts = [part for part in base if part]
            names = [".".join(parts)] if parts else [alias.name for alias in node.names]
            found.update(name if name in NOUNS else name.split(".")[0] for name in names)
    return found


def test_no_import_points_left():
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if module not in PATH:
            continue
        for other in imported_modules(path) - NOUNS - {module, "__version__"}:
            assert other in PATH, f"{path}: {other} has no place in the path"
            assert PATH.index(other) > PATH.index(module), f"{path} imports {other}, which is to its left"


@pytest.mark.parametrize(
    "module", ["scheduler", "admission", "policy", "request", "futures", "metrics", "config", "cost_model"]
)
def test_deciding_imports_no_torch(module):
    code = f"import sys, diffusers_continuous.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names_are_sorted_and_all_there():
    names = diffusers_continuous.__all__
    assert names == sorted(names)
    assert [name for name in names if not getattr(diffusers_continuous, name).__doc__] == []
    assert set(names) == set(diffusers_continuous._MODULE_OF_NAME)


def test_call_keeps_the_stock_parameters_in_the_stock_order():
    stock = inspect.signature(QwenImagePipeline.__call__).parameters
    ours = inspect.signature(ContinuousBatchingPipeline.__call__).parameters
    assert list(ours)[: len(stock)] == list(stock)
    for name, parameter in stock.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind), name
    extras = list(ours.values())[len(stock) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in extras)
