"""The Makefile and the set-up of the environment, with stand-ins for Python that take no time."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import limits
from measure.recording import paths

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# A Python whose `-m venv` makes an environment in which pip does what the test says.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *"-m venv"*)
        for folder in "$@"; do :; done
        mkdir -p "$folder/bin"
        cp "$FAKE_PIP" "$folder/bin/python"
        ;;
    *) exec "{python}" "$@" ;;
esac
"""
FAKE_PIP = """#!/bin/sh
case "$*" in
    *"-m pip install"*) echo "$@" >> "$FAKE_LOG"; {then} ;;
    "-c "*) ;;
    *) echo "ran: $*" ;;
esac
"""


VARIABLES = ("PYTHON", "VENV", "PROFILE", "ONLY", "SET", "FRESH", "MACHINE")
RECORD = ("MINUTES", "NAME", "PACKED", "DRY")
OTHERS = ("ALSO", "ARGS", "WORKERS")


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Clone:
    """The files that set-up needs, in a folder of their own."""

    def __init__(self, folder: Path, name: str = "clone with space") -> None:
        self.folder = folder / name
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(paths.ROOT / name, self.folder)
        shutil.copytree(paths.ROOT / "tools", self.folder / "tools")
        (self.folder / "fusedlib").symlink_to(paths.ROOT / "fusedlib")
        for name, package in (("notebooks", "measure"), ("report", "press")):
            (self.folder / name).mkdir()
            shutil.copy(paths.ROOT / name / "pyproject.toml", self.folder / name)
            (self.folder / name / package).symlink_to(paths.ROOT / name / package)
        self.python = script(folder / "python", FAKE_PYTHON.format(python=sys.executable))
        self.pip = folder / "pip"
        self.log = folder / "installs"
        self.log.touch()
        self.pip_does("exit 0")

    def pip_does(self, then: str) -> None:
        script(self.pip, FAKE_PIP.format(then=then))

    def installs(self) -> int:
        return len(self.log.read_text().splitlines())

    def make(
        self, *arguments: str, python: Path | str | None = None, named: bool = True,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run make; `variables` are added to its environment."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "FUSEDLIB", "PIP"))}
        env.pop("FRESH", None)
        env |= {"FAKE_PIP": str(self.pip), "FAKE_LOG": str(self.log), **variables}
        if named:
            arguments = (*arguments, f"PYTHON={python or self.python}")
        return subprocess.run(
            ["make", "--no-print-directory", *arguments], cwd=self.folder, env=env,
            capture_output=True, text=True, check=False, timeout=limits.PROCESS_S,
        )  # fmt: skip


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


def test_help_is_the_default_and_lists_every_target(clone):
    text = (paths.ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)[1].split()
    shown = clone.make(named=False)
    assert shown.returncode == 0
    assert shown.stdout == clone.make("help").stdout
    for target in targets:
        assert re.search(rf"^  make {target} +\S", shown.stdout, re.MULTILINE), target
    for variable in (*VARIABLES, *RECORD):
        assert re.search(rf"[ ]{variable}=", shown.stdout), variable


def test_the_environment_is_made_once_with_everything_pinned(clone):
    first = clone.make("setup")
    assert first.returncode == 0, first.stderr
    assert "making the environment .venv with Python 3." in first.stderr
    assert "environment ready after" in first.stderr
    [line] = clone.log.read_text().splitlines()
    assert "-c constraints.txt -e .[dev] -e notebooks -e report" in line
    second = clone.make("setup")
    assert (second.returncode, second.stderr) == (0, "")
    assert clone.installs() == 1


@pytest.mark.parametrize("name", ["pyproject.toml", "report/pyproject.toml", "constraints.txt"])
def test_a_change_of_what_is_needed_installs_again(clone, name):
    clone.make("setup")
    path = clone.folder / name
    path.write_text(path.read_text() + "# changed\n")
    again = clone.make("setup")
    assert "changed, refreshing .venv" in again.stderr
    assert clone.installs() == 2


def test_a_finished_environment_stays_when_no_python_is_named(clone):
    clone.make("setup")
    stamp = clone.folder / ".venv" / ".fusedlib-installed"
    stamp.write_text("3.99.0 " + stamp.read_text().partition(" ")[2])
    assert clone.make("setup", named=False).returncode == 0
    assert clone.installs() == 1
    # Another Python asked for by name makes the environment anew.
    assert "making the environment" in clone.make("setup").stderr
    assert clone.installs() == 2


def test_an_install_that_broke_off_does_not_count(clone):
    clone.pip_does("echo half > ../half 2>/dev/null; kill -INT $$; sleep 1; exit 1")
    broken = clone.make("setup")
    assert broken.returncode != 0
    assert not (clone.folder / ".venv" / ".fusedlib-installed").exists()
    (clone.folder / ".venv" / "leftover").touch()
    clone.pip_does("exit 0")
    again = clone.make("setup")
    assert again.returncode == 0, again.stderr
    assert "making the environment" in again.stderr
    assert not (clone.folder / ".venv" / "leftover").exists()


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("No matching distribution found for torch", "is a package index reachable from here?"),
        ("No matching distribution found for torch", "make VENV= PYTHON="),
        ("it does not compile", ".venv/install.log"),
    ],
)
def test_a_failure_of_pip_is_shown_with_what_to_do(clone, error, advice):
    clone.pip_does(f'echo "ERROR: {error}"; exit 1')
    failed = clone.make("setup")
    assert failed.returncode == 2
    assert error in failed.stderr and advice in failed.stderr


def test_a_folder_that_make_did_not_make_is_left_alone(clone):
    kept = clone.folder / "mine" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("years of work")
    refused = clone.make("setup", "VENV=mine")
    assert refused.returncode == 2
    assert "mine exists and was not made by make" in refused.stderr
    assert kept.read_text() == "years of work"


def test_an_old_python_is_refused_with_the_way_out(clone, tmp_path):
    old = script(
        tmp_path / "old",
        '#!/bin/sh\ncase "$*" in *"[:3]"*) echo 3.9.18 ;; *) exit 1 ;; esac\n',
    )
    for venv in ("VENV=.venv", "VENV="):
        refused = clone.make("report", venv, python=old)
        assert refused.returncode == 2
        assert "is Python 3.9.18; 3.11 or newer is needed" in refused.stderr


def test_a_python_that_is_not_there_is_said(clone):
    refused = clone.make("report", python="python-of-nowhere")
    assert refused.returncode == 2
    assert "there is no Python called 'python-of-nowhere'" in refused.stderr


def test_debians_missing_module_is_said(clone, tmp_path):
    bare = script(
        tmp_path / "bare",
        f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1 ;; *) exec "{sys.executable}" "$@" ;; esac\n',
    )
    refused = clone.make("setup", python=bare)
    assert refused.returncode == 2
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt install python{minor}-venv" in refused.stderr


@pytest.mark.parametrize("target", ["report", "study", "test", "lint", "lab"])
def test_without_an_environment_missing_packages_are_listed(clone, tmp_path, target):
    bare = script(tmp_path / "bare", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    refused = clone.make(target, "VENV=", python=bare)
    assert refused.returncode == 2
    missing = {"lint": "ruff>=", "lab": "jupyterlab>=", "test": "pytest>="}.get(target, "torch>=")
    assert f"  {missing}" in refused.stderr
    assert "not installed" in refused.stderr
    assert clone.installs() == 0


def test_without_an_environment_the_python_given_is_used_as_it_is(clone):
    done = clone.make("machine", "VENV=", "MACHINE=Ünïcode / box", python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert '"key": "n-code-box"' in done.stdout
    assert not (clone.folder / ".venv").exists()


def test_the_variables_reach_the_command_line(clone):
    clone.make("setup")
    done = clone.make(
        "study", "PROFILE=full", "ONLY=05_warmup,12_precision", "FRESH=1",
        'SET=steps=5 sizes=["a","b"]',
    )  # fmt: skip
    assert done.stdout == (
        "ran: -m press run --profile full --only 05_warmup,12_precision "
        '--set steps=5 --set sizes=["a","b"] --fresh\n'
    )
    assert clone.make("report").stdout == "ran: -m press report --profile auto\n"
    assert "--fresh" not in clone.make("report", "FRESH=0").stdout


def test_what_a_recording_is_asked_for_reaches_the_command_line(clone):
    clone.make("setup")
    plain = clone.make("record")
    assert plain.stdout == "ran: -m press record --minutes 25\n"
    done = clone.make(
        "record", "MINUTES=7.5", "NAME=second day", "PACKED=my out", "ONLY=03_kernels,02_anatomy",
        "DRY=1",
    )  # fmt: skip
    assert done.stdout == (
        "ran: -m press record --minutes 7.5 --only 03_kernels,02_anatomy "
        "--name second day --packed my out --dry\n"
    )
    assert "--dry" not in clone.make("record", "DRY=0").stdout
    assert "--profile" not in done.stdout, "a recording is of the profile full"
    assert clone.make("pack").stdout == "ran: -m press pack\n"


def test_variables_of_the_environment_are_not_make_s(clone):
    """NAME, ARGS or SET may be anybody's; only what stands on make's command line counts."""
    clone.make("setup")
    names = {*VARIABLES, *RECORD, *OTHERS} - {"FRESH"}
    theirs = dict.fromkeys(names, "theirs") | {"VENV": "", "PYTHON": "/nowhere/python"}
    for target in ("report", "record", "test", "lab", "figures"):
        actual = clone.make(target, named=False, **theirs)
        assert actual.returncode == 0, actual.stderr
        assert actual.stdout == clone.make(target).stdout
    actual = clone.make("machine", "VENV=", python=sys.executable, MACHINE="theirs")
    assert '"key": "theirs"' not in actual.stdout and actual.returncode == 0


def test_fresh_and_the_machine_s_name_may_stand_in_the_environment(clone):
    clone.make("setup")
    assert clone.make("report", FRESH="1").stdout.endswith("--fresh\n")
    done = clone.make("machine", "VENV=", python=sys.executable, FUSEDLIB_MACHINE="mine")
    assert '"key": "mine"' in done.stdout


@pytest.mark.parametrize("venv", ["VENV=", "VENV=.venv"])
@pytest.mark.parametrize("name", ["a $HOME b", "it's `pwd`", '"quoted" $(pwd) \\'])
def test_a_clone_in_any_folder_runs_its_own_code(tmp_path, name, venv):
    clone = Clone(tmp_path, name)
    where = clone.folder / ".venv" / "bin" / "python"
    where.parent.mkdir(parents=True)
    script(where, '#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH"\n')
    (clone.folder / "tools" / "setup.sh").write_text("")
    done = clone.make("machine", venv, "PYTHON=.venv/bin/python", named=False, PYTHONPATH="/theirs")
    folder = clone.folder
    expected = [f"{folder}", f"{folder}/notebooks", f"{folder}/report", "/theirs"]
    assert done.stdout.strip().split(":") == expected, done.stderr


def test_a_clone_in_a_folder_with_a_colon_is_refused(tmp_path):
    """PYTHONPATH is parted at colons: another clone's code could run."""
    clone = Clone(tmp_path, "a:b")
    for venv in ("VENV=", "VENV=.venv"):
        refused = clone.make("machine", venv, python=sys.executable)
        assert refused.returncode == 2
        assert f"{clone.folder} has a ':' in its name" in refused.stderr
        assert refused.stdout == ""


def test_set_up_stays_in_its_clone_where_the_shell_looks_for_folders_elsewhere(clone, tmp_path):
    (tmp_path / "elsewhere" / "tools").mkdir(parents=True)
    done = clone.make("setup", CDPATH=str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
    assert (clone.folder / ".venv").exists()


def test_quotes_in_a_setting_reach_the_command_line(clone):
    clone.make("setup")
    done = clone.make("study", "SET=sizes=['a','b'] dtype=\"x\"", "ONLY=it's $$(pwd)")
    assert done.stdout == (
        "ran: -m press run --profile auto --only it's $(pwd) "
        "--set sizes=['a','b'] --set dtype=\"x\"\n"
    )


def test_make_passes_a_failure_on(clone):
    script(clone.pip, '#!/bin/sh\ncase "$*" in *pip*|*-c*) exit 0 ;; *) exit 1 ;; esac\n')
    assert clone.make("setup").returncode == 0
    assert clone.make("report").returncode != 0


@pytest.mark.parametrize("hooks", ["exit 0", "echo core.hooksPath is set; exit 1"])
def test_hooks_are_installed_where_there_is_git_and_nothing_waits_for_them(clone, hooks):
    then = f'exit 0 ;;\n    "-m pre_commit install") echo "$@" >> "$FAKE_LOG"; {hooks}'
    clone.pip_does(then)
    assert clone.make("setup").returncode == 0 and clone.installs() == 1, "a copy without git"
    (clone.folder / ".git").mkdir()
    (clone.folder / "pyproject.toml").open("a").write("# changed\n")
    done = clone.make("setup")
    assert done.returncode == 0 and "environment ready" in done.stderr
    assert clone.log.read_text().splitlines()[-1] == "-m pre_commit install"
    assert ("no hooks before commits (core.hooksPath is set)" in done.stderr) == ("exit 1" in hooks)


def test_clean_keeps_rows_and_environment(clone):
    clone.make("setup")
    built, rows = clone.folder / "report" / "build", clone.folder / "report" / "results"
    for folder in (built, rows):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    assert clone.make("clean").returncode == 0
    assert not built.exists()
    assert (rows / "file").exists()
    assert clone.make("setup").stderr == ""


def test_ci_runs_lint_and_the_tests_of_the_readme():
    text = (paths.ROOT / ".ci" / "run").read_text()
    assert "make lint\nmake test\n" in text
    assert "|| true" not in text
    assert os.access(paths.ROOT / ".ci" / "run", os.X_OK)
