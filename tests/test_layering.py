"""The library imports in no circle, importing stays light; `make lint` holds the rooms apart."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from measure.recording import paths

STUDY_TOOLS = ("papermill", "nbconvert", "nbclient", "matplotlib", "pandas", "jupyter_core")
FOLDERS = ("fusedlib", "notebooks", "report/press", "tests", "tools")
SOURCES = {
    path.relative_to(paths.ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((paths.ROOT / folder).rglob("*.py"))
}


def imported(text: str) -> set[str]:
    """The modules of ours that a source imports, anywhere in it; none is named relatively."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "fusedlib.relative" if node.level else node.module
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "fusedlib"}


def circles(sources: dict[str, str]) -> list[tuple[str, ...]]:
    """Modules of a room that import each other, at whatever depth and anywhere in their text."""
    names = {path: ".".join(Path(path).with_suffix("").parts) for path in sources}
    modules = {name.removesuffix(".__init__"): path for path, name in names.items()}
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = imported(sources[path])
        # `from package import name` imports a module of that name, or else the package.
        whole = {n if n in modules else n.rpartition(".")[0] for n in found}
        arrows[module] = {n for n in whole if n in modules} - {module}

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in arrows[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    beyond = {module: reached(module) for module in modules}
    return sorted(
        (m, *sorted(n for n in beyond[m] if m in beyond[n])) for m in modules if m in beyond[m]
    )


def test_the_library_imports_in_no_circle():
    sources = {path: text for path, text in SOURCES.items() if path.startswith("fusedlib/")}
    assert len(sources) > 80 and circles(sources) == []


def test_recordings_know_no_study():
    texts = [t for p, t in SOURCES.items() if p.startswith("notebooks/measure/recording/")]
    study = re.compile(r"^\s*(from|import) +measure(?!\.recording\b)", re.MULTILINE)
    assert len(texts) > 4 and not [text for text in texts if study.search(text)]


def test_sys_path_is_not_edited():
    edit = re.compile(r"sys\.path(\.(insert|append|extend|remove)\b|(\[.*\])? *\+?=[^=])")
    assert not [path for path, text in SOURCES.items() if edit.search(text)]


@pytest.mark.parametrize(
    ("module", "more"),
    [("fusedlib", "torch"), ("models.transformer", "typer"),
     ("fusedlib.bench.race", "pydantic"), ("press.cli", "torch")],
)  # fmt: skip
def test_import_brings_in_no_study_tool(module, more):
    tools = {*STUDY_TOOLS, more}
    code = f"import sys, {module}; print(*sorted({tools} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


# --- teeth ---------------------------------------------------------------------------------------


def test_a_circle_is_found():
    texts = {
        "k/a.py": "def f():\n    from fusedlib.k import b",
        "k/b.py": "from fusedlib.k.c.d import x",
        "k/c/__init__.py": "",
        "k/c/d.py": "import fusedlib.k.a",
    }
    found = circles({f"fusedlib/{path}": text for path, text in texts.items()})
    assert [c[0] for c in found] == ["fusedlib.k.a", "fusedlib.k.b", "fusedlib.k.c.d"]
    texts["k/c/d.py"] = ""
    assert circles({f"fusedlib/{path}": text for path, text in texts.items()}) == []
