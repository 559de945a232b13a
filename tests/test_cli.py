"""The command line on machines that lack something, and JupyterLab with this Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbconvert
import nbformat
import pytest
import typst
from nbformat import v4
from nbformat.sign import NotebookNotary
from traitlets.utils.importstring import import_item

import limits
import tiny_notebooks
from press import run
from press.pages import exporters
from press_called import called
from study import paths

PACKAGES = os.pathsep.join(map(str, paths.PACKAGES))


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))


@pytest.mark.parametrize("lacking", ["base", "typst"])
def test_what_a_report_needs_is_checked_before_anything_runs(monkeypatch, tmp_path, lacking):
    def refuse(*given, **options):
        raise OSError("it is not here")

    if lacking == "typst":
        monkeypatch.setattr(typst, "compile", refuse)
    else:
        monkeypatch.setattr(exporters.PressExporter, "get_template_names", refuse)
    done = called("report", "--only", "kernels")
    assert done.status == 2
    assert "it is not here" in done.stderr and "make study" in done.stderr
    assert not (tmp_path / "build").exists()


def test_lab_uses_this_python_and_none_of_the_home_s_kernels(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "other"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text('{"argv": ["false"], "display_name": "x"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    ran = []
    monkeypatch.setattr(os, "execve", lambda *given: ran.append(given))
    assert called("lab", "--no-browser").status == 0
    [(program, command, _)] = ran
    assert program == sys.executable
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert command[-1] == "--no-browser"
    assert ("--allow-root" in command) == (os.geteuid() == 0), "root needs leave to start it"
    assert any(part.endswith("=/lab/tree/notebooks/00_tour.ipynb") for part in command)
    [name] = [part.rpartition("=")[2] for part in command if "kernel_spec_manager_class" in part]
    kernels = import_item(name)()
    assert {*kernels.find_kernel_specs()} == {"python3"}
    assert kernels.get_kernel_spec("python3").argv[0] == sys.executable


def test_copies_that_we_ran_are_trusted(tmp_path, monkeypatch):
    """JupyterLab shows SVG of trusted notebooks only."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setattr(os, "execve", lambda *given: None)
    drawn = v4.new_output("display_data", {"image/svg+xml": "<svg/>", "text/plain": "a figure"})
    copy = run.select("00")[0].copy
    copy.parent.mkdir(parents=True)
    nbformat.write(v4.new_notebook(cells=[v4.new_code_cell("1", outputs=[drawn])]), copy)
    assert called("lab").status == 0
    ours = nbformat.read(copy, 4)
    assert NotebookNotary().check_signature(ours)
    ours.cells[0].outputs[0].data["image/svg+xml"] = "<svg onload='x'/>"
    assert not NotebookNotary().check_signature(ours), "what was changed since is not trusted"


@pytest.mark.slow
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs the Python below an environment")
def test_a_python_that_finds_its_packages_by_pythonpath_alone(tmp_path):
    """As on a cluster node, where the missing packages lie in a folder of `pip --target`."""
    [works] = tiny_notebooks.made(tmp_path / "made", "works")
    packages = str(Path(pytest.__file__).parent.parent)
    done = subprocess.run(
        [sys._base_executable, "-m", "press", "run", "--only", str(works)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([PACKAGES, packages]), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    copy = tmp_path / "build" / "notebooks" / "works.ipynb"
    assert f"python {Path(sys._base_executable)}" in copy.read_text()


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs the Python below an environment")
@pytest.mark.parametrize("where", ["an environment's packages", "a folder of pip --target"])
def test_pages_are_made_where_pythonpath_alone_has_the_packages(tmp_path, where):
    """nbconvert's templates lie outside of its package, and not where this Python looks."""
    packages = Path(nbconvert.__file__).parents[1]
    folder = packages
    if where == "a folder of pip --target":
        folder = tmp_path / "target"
        folder.mkdir()
        for part in packages.iterdir():
            if part.name != "nbconvert":
                (folder / part.name).symlink_to(part)
        shutil.copytree(packages / "nbconvert", folder / "nbconvert")
        own = Path("share", "jupyter", "nbconvert")
        shutil.copytree(Path(sys.prefix) / own, folder / own)
    env = {k: v for k, v in os.environ.items() if not k.startswith("JUPYTER")}
    done = subprocess.run(
        [sys._base_executable, "-c", "from press import render; render.check_ready()"],
        env={**env, "PYTHONPATH": os.pathsep.join([PACKAGES, str(folder)]), "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
