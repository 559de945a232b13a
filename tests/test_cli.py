"""The command line: exit statuses, and one clear message for what goes wrong."""

import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import nbconvert
import pytest
import typst
from traitlets.utils.importstring import import_item
from typer.testing import CliRunner

import limits
import tiny_study
from fusedlib.bench import machine
from measure.recording import paths, provenance
from measure.recording.files import WriteError
from press import cli, record
from press import render as renderer
from press.pages import exporters
from press.pages.paper import Section
from press.running import products, runner

NOTEBOOKS = tiny_study.folder()
STUDY_FILE = NOTEBOOKS / "run_study.toml"
PACKAGES = os.pathsep.join(map(str, paths.PACKAGES))


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path / "build"))
    monkeypatch.setenv("FUSEDLIB_RESULTS", str(tmp_path / "rows"))


def call(*arguments: object, config: Path | None = STUDY_FILE):
    given = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli.app, [*given, *(["--config", str(config)] if config else [])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "fast"], "'fast' is unknown"),
        (["--only", " run_ok run_x,"], "'run_x' is unknown"),
        (["--set", "count=9.5"], "9.5"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_status_2(arguments, message, tmp_path):
    done = call("run", "--profile", "quick", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("fusedlib: ")
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "build").exists()


def test_a_failing_notebook_gives_status_1_and_the_summary_says_which():
    done = call("run", "--profile", "quick", "--only", "run_fails,run_ok")
    assert done.exit_code == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["run_fails", "failed"] in [line[:2] for line in lines]
    assert ["run_ok", "ok"] in [line[:2] for line in lines]
    assert "ValueError: it broke here" in done.stdout


@pytest.mark.parametrize(("value", "fresh"), [("1", True), ("0", False)])
def test_fresh_in_the_environment_counts_as_the_option(monkeypatch, value, fresh):
    given = []
    monkeypatch.setattr(runner, "run", lambda jobs, shown, fresh: given.append(fresh) or [])
    monkeypatch.setenv("FRESH", value)
    call("run", "--profile", "quick", "--only", "run_ok")
    assert given == [fresh]


def test_a_python_that_drops_docstrings_is_refused_before_anything_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "press", "run", "--config", str(STUDY_FILE)],
        env={**os.environ, "PYTHONPATH": PACKAGES, "PYTHONOPTIMIZE": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "PYTHONOPTIMIZE" in done.stderr
    assert not (tmp_path / "build").exists()


def test_a_user_without_a_home_gets_one_among_the_products(monkeypatch, tmp_path):
    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("HOME")
    done = call("list")
    assert done.exit_code == 0
    home = tmp_path / "build" / "home"
    assert Path.home() == home and str(home) in done.stderr


@pytest.mark.parametrize("variable", ["FUSEDLIB_BUILD", "FUSEDLIB_RESULTS"])
def test_an_unwritable_folder_is_one_line_and_status_2_before_anything_runs(monkeypatch, variable):
    monkeypatch.setenv(variable, "/dev/null/x")
    done = call("run", "--profile", "quick", "--only", "run_ok")
    assert done.exit_code == 2
    assert "/dev/null/x" in done.stderr
    assert not products.copy_path("run_ok").exists()


# --- record and pack -----------------------------------------------------------------------------


CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def recorder(monkeypatch):
    """Two units to record, on a GPU and a commit; what `record.record` is called with."""
    facts = machine._gpu_facts()
    remembered = (machine.key, machine.describe, machine._device_name)
    for function in remembered:
        function.cache_clear()
    monkeypatch.setenv(machine.NAME, "x")
    monkeypatch.delenv(machine.NAME)  # the command sets it for its process
    monkeypatch.setattr(machine, "_gpu_facts", lambda: facts)
    monkeypatch.setattr(machine, "device_type", lambda: "cuda")
    monkeypatch.setattr(machine, "_device_name", lambda: CARD)
    monkeypatch.setattr(machine, "others_on_card", lambda most: "")
    monkeypatch.setattr(record.provenance, "commit", lambda: ("c" * 40, False))
    units = [record.Unit("run_ok", ("a", "b"), 2, 90.0), record.Unit("run_fails", ("c",), 0, 600.0)]
    monkeypatch.setattr(
        record, "units", lambda config, only: [u for u in units if not only or u.study in only]
    )
    given: list[tuple] = []
    monkeypatch.setattr(record, "record", lambda *arguments: given.append(arguments) or False)
    yield given
    monkeypatch.undo()
    for function in remembered:
        function.cache_clear()


def test_record_measures_what_is_asked_and_goes_on_with_the_recording_of_this_card(
    recorder, tmp_path
):
    folder = tmp_path / "rows" / "nvidia-h100" / "earlier"
    folder.mkdir(parents=True)
    run = {"commit": "c" * 40, "device_name": CARD, "began": "2026-11-25T08:00:00+00:00"}
    content = {"schema": 2, "profile": "full", "runs": [run], "files": provenance.files()}
    (folder / "machine.json").write_text(json.dumps(content))
    (folder / "run_ok.jsonl").write_text('{"case": "a", "status": "ok"}\n')
    packed = tmp_path / "out"
    done = call("record", "--only", "run_fails", "--packed", packed)
    assert done.exit_code == 0, done.stderr
    assert "all that is left of the recording earlier on nvidia-h100:" in done.stdout
    [(chosen, name, minutes, _, target)] = recorder
    assert [unit.study for unit in chosen] == ["run_fails"]
    assert (name, minutes, target) == ("earlier", 25.0, packed)
    assert machine.key() == "nvidia-h100", "where the rows are packed from"


@pytest.fixture
def rendered(monkeypatch):
    """What the report's renderer is given, which renders nothing."""
    given: list[Section] = []

    def render(sections, out_dir):
        if (out_dir / "full").exists():
            raise WriteError(28, "No space left on device", "report.html")
        given.extend(sections)
        return [out_dir / "report.html", out_dir / "report.pdf"]

    monkeypatch.setattr(renderer, "render", render)
    monkeypatch.setattr(renderer, "check_ready", lambda: None)
    return given


def test_report_renders_what_failed_too_and_says_where(rendered, tmp_path):
    done = call("report", "--profile", "quick", "--only", "run_fails")
    assert done.exit_code == 1
    by_name = {section.name: section for section in rendered}
    assert list(by_name) == ["run_fails", "run_ok", "run_dies", "run_cases", "report"]
    assert "ValueError: it broke here" in by_name["run_fails"].error
    assert by_name["run_fails"].notebook == products.copy_path("run_fails")
    assert by_name["run_fails"].question == "Does it?"
    assert by_name["run_ok"].notebook is None
    assert "not executed yet; `make report ONLY=run_ok` does it" in by_name["run_ok"].error
    assert by_name["report"].error is None
    html = tmp_path / "build" / "report.html"
    assert html.as_uri() in done.stdout


def test_a_study_left_out_keeps_its_last_copy_and_a_report_that_cannot_be_written_is_said(
    rendered, tmp_path
):
    assert call("run", "--profile", "quick", "--only", "run_ok").exit_code == 0
    assert call("report", "--profile", "quick", "--only", "run_cases").exit_code == 0
    [section] = [section for section in rendered if section.name == "run_ok"]
    assert section.notebook == products.copy_path("run_ok")
    assert section.error is None
    (tmp_path / "build" / "full").touch()
    done = call("render")
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("lacking", ["base", "typst"])
def test_what_a_report_needs_is_checked_before_anything_runs(monkeypatch, tmp_path, lacking):
    def refuse(*given, **options):
        raise OSError("it is not here")

    if lacking == "typst":
        monkeypatch.setattr(typst, "compile", refuse)
    else:
        monkeypatch.setattr(exporters.PressExporter, "get_template_names", refuse)
    done = call("report", "--profile", "quick", "--only", "run_ok")
    assert done.exit_code == 2
    assert "it is not here" in done.stderr and "make study" in done.stderr
    assert not products.copy_path("run_ok").exists()


def test_lab_uses_this_python_and_none_of_the_homes_kernels(monkeypatch, tmp_path):
    folder = tmp_path / "kernels" / "other"
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text('{"argv": ["false"], "display_name": "x"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    called = []
    monkeypatch.setattr(os, "execve", lambda *given: called.append(given))
    assert call("lab", "--no-browser", config=None).exit_code == 0
    [(program, command, _)] = called
    assert program == sys.executable
    assert command[:3] == [sys.executable, "-m", "jupyterlab"]
    assert command[-1] == "--no-browser"
    assert ("--allow-root" in command) == (os.geteuid() == 0), "root needs leave to start it"
    assert any(part.endswith("=/lab/tree/notebooks/00_tour.ipynb") for part in command)
    [name] = [part.rpartition("=")[2] for part in command if "kernel_spec_manager_class" in part]
    kernels = import_item(name)()
    assert {*kernels.find_kernel_specs()} == {"python3"}
    assert kernels.get_kernel_spec("python3").argv[0] == sys.executable


@pytest.mark.slow
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="needs the Python below an environment")
def test_a_python_that_finds_its_packages_by_pythonpath_alone(tmp_path):
    """As on a cluster node, where the missing packages lie in a folder of `pip --target`."""
    packages = str(Path(pytest.__file__).parent.parent)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([PACKAGES, packages]),
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys._base_executable, "-m", "press", "run", "--profile", "quick",
         "--only", "run_ok", "--config", str(STUDY_FILE)],
        env=env, capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = products.copy_path("run_ok").read_text()
    assert f"python {Path(sys._base_executable)}" in printed


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
