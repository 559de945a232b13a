"""The house's plan as code: arrows run one way, importing stays light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusedlib import paths

# From the ground up; a room may use those below it and itself.
ROOMS = (
    "arguments",
    "kernels",
    "functional",
    "norms",
    "rotary",
    "loss",
    "packed",
    "modules",
    "recomputed",
    "apply",
    "models",
    "bench",
    "study",
)
# Imported by whoever needs a folder's place or the version.
OPEN = ("paths", "__init__")
STUDY_TOOLS = ("papermill", "nbconvert", "nbclient", "matplotlib", "pandas", "jupyter_core")
FOLDERS = ("fusedlib", "tests", "tools")
SOURCES = {
    path.relative_to(paths.ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((paths.ROOT / folder).rglob("*.py"))
}


def room(module: str) -> str:
    """`fusedlib.bench.timing` -> `bench`; `fusedlib` itself -> `__init__`."""
    return [*module.split("."), "__init__"][1]


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


def violations(sources: dict[str, str]) -> list[str]:
    """Every import of ours that runs against the arrows, as a sentence."""
    found = []
    for path, text in sources.items():
        if not path.startswith("fusedlib/"):
            continue
        own = room(".".join(Path(path).with_suffix("").parts))
        for target in sorted(imported(text)):
            used = room(target)
            if own == "reference":
                found.append(f"{path}: reference imports {target}")
            elif used == "reference":
                if own != "bench":
                    found.append(f"{path}: only bench and the tests import reference")
            elif used in ROOMS and (own not in ROOMS or ROOMS.index(used) > ROOMS.index(own)):
                found.append(f"{path}: {own} imports {target}")
            elif used not in (*ROOMS, *OPEN):
                found.append(f"{path}: {target} lies in no known room")
    return found


def test_arrows_run_one_way():
    assert {room(".".join(Path(p).parts)) for p in SOURCES} >= {"models", "bench", "study"}
    assert violations(SOURCES) == []


def test_sys_path_is_not_edited():
    edit = re.compile(r"sys\.path(\.(insert|append|extend|remove)\b|(\[.*\])? *\+?=[^=])")
    assert not [path for path, text in SOURCES.items() if edit.search(text)]


@pytest.mark.parametrize(
    ("module", "more"),
    [("fusedlib", "torch"), ("fusedlib.models.transformer", "typer"),
     ("fusedlib.study.cli", "torch")],
)  # fmt: skip
def test_import_brings_in_no_study_tool(module, more):
    tools = {*STUDY_TOOLS, more}
    code = f"import sys, {module}; print(*sorted({tools} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


# --- teeth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("fusedlib/bench/a.py", "from fusedlib.study import display"),
        ("fusedlib/bench/a.py", "def f():\n    import fusedlib.study.display"),
        ("fusedlib/bench/deep/a.py", "from ..timing import measure"),
        ("fusedlib/models/a.py", "from fusedlib import bench"),
        ("fusedlib/models/a.py", "from fusedlib.bench.timing import measure"),
        ("fusedlib/kernels/a.py", "from fusedlib.modules import SwiGLUMLP"),
        ("fusedlib/kernels/a.py", "from fusedlib.functional import swiglu_mlp"),
        ("fusedlib/functional.py", "from fusedlib.modules import SwiGLUMLP"),
        ("fusedlib/functional.py", "from fusedlib import reference"),
        ("fusedlib/__init__.py", "from fusedlib import study"),
        ("fusedlib/paths.py", "from fusedlib.bench import results"),
        ("fusedlib/reference.py", "from fusedlib import paths"),
        ("fusedlib/study/a.py", "from fusedlib import reference"),
        ("fusedlib/models/a.py", "from fusedlib.reference import swiglu"),
        ("fusedlib/study/a.py", "from fusedlib import cellar"),
    ],
)
def test_arrows_reject(path, text):
    assert len(violations({path: text})) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("fusedlib/study/warmup/a.py", "from fusedlib.study.display import table"),
        ("fusedlib/study/a.py", "from fusedlib.bench import results\nimport pandas"),
        ("fusedlib/bench/a.py", "from fusedlib import paths, reference"),
        ("fusedlib/bench/a.py", "from fusedlib.kernels.accumulate import accumulate_fwd"),
        ("fusedlib/modules.py", "from fusedlib.functional import swiglu_mlp"),
        ("tests/test_a.py", "from fusedlib import reference, study"),
    ],
)
def test_arrows_accept(path, text):
    assert violations({path: text}) == []
