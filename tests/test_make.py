"""The Makefile and the set-up of the environment, with stand-ins for Python that take no time."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import limits
from study import paths

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
        for name, package in (("notebooks", "study"), ("report", "press")):
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


def test_the_environment_is_made_once_with_everything_pinned(clone):
    first = clone.make("setup")
    assert first.returncode == 0, first.stderr
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
    assert again.returncode == 0
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
    assert not (clone.folder / ".venv" / "leftover").exists()


def test_a_folder_that_make_did_not_make_is_left_alone(clone):
    kept = clone.folder / "mine" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("years of work")
    refused = clone.make("setup", "VENV=mine")
    assert refused.returncode == 2
    assert "mine exists" in refused.stderr
    assert kept.read_text() == "years of work"


def test_without_an_environment_the_python_given_is_used_as_it_is(clone):
    done = clone.make("machine", "VENV=", "MACHINE=Ünïcode / box", python=sys.executable)
    assert done.returncode == 0, done.stderr
    assert '"key": "n-code-box"' in done.stdout
    assert not (clone.folder / ".venv").exists()


def test_without_an_environment_missing_packages_are_listed_and_none_is_installed(clone, tmp_path):
    bare = script(tmp_path / "bare", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    refused = clone.make("report", "VENV=", python=bare)
    assert refused.returncode == 2 and "  torch>=" in refused.stderr
    assert clone.installs() == 0


@pytest.mark.parametrize(
    ("given", "ran"),
    [
        (["study", "ONLY=it's $$(pwd)", "FRESH=1", "SET=steps=5 sizes=['a',\"b\"]"],
         "run --only it's $(pwd) --set steps=5 --set sizes=['a',\"b\"] --fresh"),
        (["report", "FRESH=0"], "report"),
        (["record", "MINUTES=7.5", "NAME=second day", "PACKED=my out", "ONLY=kernels", "DRY=1"],
         "record --minutes 7.5 --only kernels --name second day --packed my out --dry"),
        (["record"], "record --minutes 25"),
    ],
)  # fmt: skip
def test_what_stands_on_make_s_command_line_reaches_the_program_and_no_variable_of_others(
    clone, given, ran
):
    clone.make("setup")
    theirs = dict.fromkeys(("ONLY", "SET", "NAME", "PACKED", "ARGS"), "theirs")
    assert clone.make(*given, **theirs).stdout == f"ran: -m press {ran}\n"


@pytest.mark.parametrize("venv", ["VENV=", "VENV=.venv"])
@pytest.mark.parametrize("name", ["a $HOME b", '"quoted" it\'s $(pwd) `pwd` \\'])
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
