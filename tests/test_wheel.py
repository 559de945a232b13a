"""The wheel has the library and nothing else; notebooks find what lies beside them."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

import fusedlib
from fusedlib.bench import verdict
from page_checks import loads
from study import paths
from tools import docs

STEP = """
import sys
import fusedlib
assert "torch" not in sys.modules, "import fusedlib takes torch"
assert fusedlib.__file__.startswith(sys.prefix), fusedlib.__file__
import torch
from fusedlib.bench import timing
mlp = fusedlib.SwiGLUMLP(32, 64)
optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
x = torch.randn(4, 32)
mlp(x).square().mean().backward()
optimizer.step()
settings = {"device": "cpu", "warmup": 1, "repetitions": 3, "flush_l2": False}
times = timing.in_turns({"mlp": lambda: mlp(x)}, **settings)
assert times["mlp"].figures()["median_ms"] > 0
for name in ("pandas", "study", "claims", "press", "matplotlib"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} is here")
"""
COMPARE = """
import pkgutil
import torch
from fusedlib import bench
for module in pkgutil.iter_modules(bench.__path__):
    __import__(f"fusedlib.bench.{module.name}")
product = lambda x, w: x @ w
functions = {"right": lambda x, w: (w.mT @ x.mT).mT, "wrong": lambda x, w: w @ x}
inputs = {"x": torch.randn(5, 5), "w": torch.randn(5, 5)}
right, wrong = bench.compare(product, functions, inputs, rounds=2, backward=True).lines
assert right.status == "ok" and right.ms.value > 0, right
assert wrong.status == "wrong" and wrong.ms is None, wrong
"""


def closure(names: set[str]) -> set[str]:
    """Installed distributions that these need, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of another system, or of a CUDA that is not here
            continue
        found.add(name)
        needed = (Requirement(line) for line in lines)
        waiting += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def without_this_clone() -> dict[str, str]:
    """Variables of a process that does not find this clone, nor pip its metadata in it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def copied_source(folder: Path) -> Path:
    """A copy to build from: setuptools packs files that a build left in the folder long ago."""
    source = folder / "source"
    shutil.copytree(paths.ROOT / "fusedlib", source / "fusedlib")
    (source / "tests").mkdir()
    names = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    for name in (*names, "CITATION.cff", "tests/test_wheel.py"):
        shutil.copy(paths.ROOT / name, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = copied_source(folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel and, by links to what is installed here, what it asks for."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())["project"]
    for name in closure({Requirement(line).name for line in project["dependencies"]}):
        for top in {Path(file).parts[0] for file in metadata.files(name) or []} - {"..", "/"}:
            source = Path(str(metadata.distribution(name).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run(
        [*command, "--no-deps", "--no-index", str(wheel)], check=True, env=without_this_clone()
    )
    return python


@pytest.mark.slow
def test_the_wheel_has_the_library_typed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fusedlib"}
    wanted = {"py.typed", "bench/turns.py", "patch/apply.py", "patch/PATCHING.md"}
    assert {f"fusedlib/{name}" for name in wanted} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_layer_makes_a_step_where_only_the_wheel_is_installed(clean_python: Path) -> None:
    alone = without_this_clone()
    subprocess.run([str(clean_python), "-c", STEP], check=True, cwd=clean_python.parent, env=alone)


@pytest.mark.slow
def test_a_comparison_needs_the_wheel_and_torch_alone(clean_python: Path, tmp_path: Path) -> None:
    alone = without_this_clone()
    subprocess.run([str(clean_python), "-c", COMPARE], check=True, cwd=tmp_path, env=alone)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_missing_package_of_the_extra_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pandas .*fusedlib\[bench\]"):
        verdict({"time_ms": [1.0]})


@pytest.mark.slow
def test_the_api_reference_has_every_public_name_and_loads_nothing(tmp_path: Path) -> None:
    docs.write(tmp_path)
    page = (tmp_path / "fusedlib.html").read_text(encoding="utf-8")
    assert all(f'<section id="{name}"' in page for name in fusedlib.__all__)
    assert not any(loads(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html"))


@pytest.mark.slow
def test_a_notebook_in_any_folder_imports_study_and_press(tmp_path: Path) -> None:
    """By a kernel as JupyterLab starts it; `make` without an environment sets PYTHONPATH."""
    cell = nbformat.v4.new_code_cell("import study.mlp, study.models.transformer, press.say")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "n.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "notebook", "n.ipynb"]
    subprocess.run(command, check=True, cwd=tmp_path)
