"""The project keeps its own rules: packaging, layers, documents that tell the truth."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
PACKAGE = HERE / "src" / "deltabox"
LOW_TO_HIGH = {
    "errors": 0,
    "linux": 1,
    "deltafs": 2,
    "deltacr": 2,
    "host": 2,
    "doctor": 3,
    "keeper": 3,
    "sandbox": 4,
    "aio": 5,
}


def _modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    """The parts of deltabox (`deltabox.X...` -> X) that a module imports when it runs."""
    found = set()
    tree = ast.parse(path.read_text())
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = ["deltabox", *path.relative_to(PACKAGE).parts][: -node.level]
                module = ".".join([*above, *filter(None, [node.module])])
            names = [module]
            if module == "deltabox":
                names = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("deltabox.")}
    return found


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = _part(path)
    for used in _imports(path) - {own}:
        if own in LOW_TO_HIGH and used in LOW_TO_HIGH:
            assert LOW_TO_HIGH[used] < LOW_TO_HIGH[own], f"{own} must not import {used}"
        elif own in LOW_TO_HIGH and LOW_TO_HIGH[own] < 3:
            pytest.fail(f"{own} must not import {used}")


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_ctypes_lives_in_linux_only(path: Path) -> None:
    if _part(path) != "linux":
        assert not re.search(r"^\s*(import|from) ctypes", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_says_why(path: Path) -> None:
    assert path.stat().st_size == 0 or ast.get_docstring(ast.parse(path.read_text()))


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test   #" in (HERE / "README.md").read_text()
    script = (HERE / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line and not line.startswith("#")] == ["exec make test"]
    assert os.access(HERE / ".ci" / "run", os.X_OK)


def test_the_readmes_links_lead_somewhere() -> None:
    for document in [HERE / "README.md", HERE / "CONTRIBUTING.md", *(HERE / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_make_target_of_the_documents_exists() -> None:
    makefile = (HERE / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for document in (HERE / "README.md", HERE / "CONTRIBUTING.md"):
        assert (
            set(re.findall(r"(?:`|^)make ([a-z-]+)", document.read_text(), re.MULTILINE)) <= targets
        )


def test_the_versions_agree() -> None:
    version = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (HERE / "CHANGELOG.md").read_text()


def test_the_wheel_holds_the_interpreter(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build leaves its own directory beside setup.py
    built = shutil.ignore_patterns("_interpreter", "__pycache__", "*.egg-info")
    shutil.copytree(HERE / "src", source / "src", ignore=built)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(HERE / name, source)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [
            *pip,
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            str(source),
        ],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"deltabox-[\d.]+-py3-none-linux_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        assert {"deltabox/py.typed", "deltabox/deltacr/_interpreter"} <= names
        assert not any(name.startswith(("tests/", "bench/")) for name in names)
        info = packed.getinfo("deltabox/deltacr/_interpreter")
        assert info.external_attr >> 16 & 0o111, "the interpreter must be executable"
        assert packed.read(info)[:4] == b"\x7fELF"
    installed = tmp_path / "site"
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--target", str(installed), str(wheel)],
        check=True,
        capture_output=True,
    )
    assert os.access(installed / "deltabox/deltacr/_interpreter", os.X_OK)


def test_the_interpreter_is_static_and_bare() -> None:
    program = (PACKAGE / "deltacr" / "_interpreter").read_bytes()
    assert program[:4] == b"\x7fELF"
    assert b"GLIBC" not in program and b"ld-linux" not in program
