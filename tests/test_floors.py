"""The import rules of docs/architecture.md hold, and the tool that checks them notices a breach."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "comera_compile"
MODULES = sorted(PACKAGE.rglob("*.py"))


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([tool, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=120)


def test_imports_go_down_the_floors_only() -> None:
    # A package whose floors hold can be read from the bottom up, one folder at a time.
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("tt/shape.py", "import comera_compile.planning"),
        ("planning/__init__.py", "import comera_compile.passes"),
        ("passes/__init__.py", "import comera_compile.codegen"),
        ("errors.py", "import comera_compile.tt.shape"),
    ],
)
def test_an_import_that_goes_up_is_noticed(tmp_path: Path, module: str, line: str) -> None:
    # The contract would also pass if its list of floors named nothing that exists; each of these breaks one floor.
    shutil.copytree(PACKAGE, tmp_path / "comera_compile", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "comera_compile" / module).open("a") as file:
        file.write(f"\n{line}\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1 and "BROKEN" in result.stdout


def test_inner_packages_hold_a_docstring_and_no_code() -> None:
    # Code in an inner __init__.py runs for everyone who imports anything below it.
    inner = [path for path in MODULES if path.name == "__init__.py" and path.parent != PACKAGE]
    assert len(inner) >= 4
    for path in inner:
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and ast.get_docstring(ast.parse(path.read_text())), path


def imported_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add("." * node.level + node.module)
    return names


def test_nothing_imports_the_links_at_the_top() -> None:
    # The links passes and codegen are for people; an unrelated distribution named codegen exists.
    folders = ("comera_compile", "tests", "examples", "benchmarks")
    for path in [path for folder in folders for path in (ROOT / folder).rglob("*.py")]:
        roots = {name.split(".")[0] for name in imported_names(path)}
        assert not roots & {"passes", "codegen"}, path
