"""Every mutant of `tests/mutants.toml` applies, and the runner tells what became of each."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import run_mutants
from measure.recording import paths
from run_mutants import DoesNotApplyError

_, MUTANTS = run_mutants.read(paths.ROOT)


def test_every_mutant_applies_and_its_test_is_there():
    wrong = {}
    for mutant in MUTANTS:
        file, *names = mutant.killed_by.partition("[")[0].split("::")
        try:
            mutant.applied(paths.ROOT)
            text = (paths.ROOT / file).read_text(encoding="utf-8")
            if names:
                run_mutants.lines_of(text, ".".join(names))
        except (DoesNotApplyError, FileNotFoundError) as error:
            wrong[str(mutant)] = str(error)
    assert wrong == {}


def test_no_mutant_is_listed_twice():
    assert len({(m.where, m.old, m.new) for m in MUTANTS}) == len(MUTANTS) >= 100


# --- the runner, on a project of one module ------------------------------------------------------

MODULE = '''"""Doubles."""

FACTOR = 2


class Doubler:
    """A factor."""

    def double(self, x):
        return FACTOR * x


def double(x):
    return Doubler().double(x)


def unused(x):
    return x + 1 + 1
'''
TESTS = """import time

import pytest

import double


def test_double():
    assert double.double(2) == 4


def test_slow():
    while double.FACTOR != 2:
        time.sleep(0.01)


@pytest.mark.skip
def test_skipped():
    pass


def test_wrong():
    assert False
"""


def by(name: str) -> str:
    return f"tests/test_double.py::{name}"


def listed(*mutants: tuple[str, str, str], killed_by: str = "test_double") -> str:
    """Mutants in TOML, whose strings are JSON's."""
    names = "where", "old", "new", "killed_by"
    entries = [zip(names, (*mutant, by(killed_by)), strict=True) for mutant in mutants]
    return "".join(
        "\n".join(["[[math]]", *(f"{name} = {json.dumps(text)}" for name, text in entry), ""])
        for entry in entries
    )


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "double.py").write_text(MODULE)
    (tmp_path / "tests" / "test_double.py").write_text(TESTS)
    shutil.copy(run_mutants.__file__, tmp_path / "tests")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.fixture
def run(project):
    """Run the mutants that a text lists; the runner's status and its output."""

    def run_listed(text: str, *arguments: str) -> tuple[int, str]:
        (project / run_mutants.LIST).write_text(text)
        command = [sys.executable, "-B", "tests/run_mutants.py", *arguments]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode, done.stdout

    return run_listed


def test_all_mutants_that_die_are_status_0_and_the_project_stays_as_it_was(run, project):
    mutants = listed(
        ("double.py:double", "double(x)\n", "double(x) + 1\n"),
        ("double.py:Doubler.double", "FACTOR * x", "FACTOR"),
        ("double.py:FACTOR", "2", "3"),
        ("double.py", "return FACTOR * x", "raise ValueError"),
    )
    status, output = run(mutants, "--workers", "2")
    assert status == 0, output
    assert "4 mutants, 4 killed, " in output
    assert "math: double.py:FACTOR: 2 -> 3\n    killed by tests/test_double.py::test" in output
    assert (project / "double.py").read_text() == MODULE
    assert not [*project.rglob("__pycache__")]


WRONG = {
    ("none.py", "x", "y"): "there is no none.py",
    ("double.py:gone", "x", "y"): "'gone' of gone is defined 0 times, not once",
    ("double.py:Doubler.gone", "x", "y"): "'gone' of Doubler.gone is defined 0 times, not once",
    ("double.py:unused", "x * 1", "y"): "'x * 1' stands 0 times in double.py:unused, not once",
    ("double.py:unused", "+ 1", "+ 2"): "'+ 1' stands 2 times in double.py:unused, not once",
    ("double.py:FACTOR", "2", "2"): "'2' changes nothing in double.py:FACTOR",
    ("double.py:double", "return", "return ("): "double.py:double would be no Python",
}


def test_what_survives_does_not_apply_or_does_not_run_is_status_1_and_named(run):
    odd = ("double.py:unused", "x + 1 + 1", "x + 3"), ("double.py:FACTOR", "2", "no_such_name")
    status, output = run(listed(("double.py:FACTOR", "2", "3"), *odd, *WRONG))
    assert status == 1
    assert f"{3 + len(WRONG)} mutants, 1 killed" in output
    assert "double.py:unused: x + 1 + 1 -> x + 3\n    SURVIVED: tests/test_double" in output
    assert "2 -> no_such_name\n    NOT TESTED: pytest ended with status " in output
    for (where, _, _), why in WRONG.items():
        assert f"math: {where}: " in output and f"    DOES NOT APPLY: {why}" in output


def test_a_part_can_be_chosen_and_a_choice_of_nothing_is_status_1(run):
    mutants = listed(("double.py:unused", "x + 1 + 1", "x + 3"), ("double.py:FACTOR", "2", "3"))
    status, output = run(mutants, "--only", "FACTOR")
    assert status == 0 and "1 mutants, 1 killed" in output
    status, output = run(mutants, "--only", "subtraction")
    assert status == 1
    assert output == "no mutant has 'subtraction' in its text; there are 2 in tests/mutants.toml\n"


def test_a_test_that_does_not_pass_without_a_mutant_kills_none(run):
    names = "test_skipped", "test_wrong"
    mutants = [listed(("double.py:FACTOR", "2", "3"), killed_by=name) for name in names]
    status, output = run("".join([*mutants, listed(("double.py:FACTOR", "2", "4"))]))
    assert status == 1 and "3 mutants, 1 killed" in output
    for name in names:
        assert f"{by(name)} does not pass without any mutant: pytest ended" in output


def test_a_mutant_that_makes_its_test_hang_is_not_killed(project):
    """Without the run before, which on a slow machine would take longer than so short a limit."""
    copy = run_mutants.Copy(project, project / "copy", limit_s=1)
    for name in ("double.py", "tests/test_double.py"):
        assert (copy.folder / name).read_text() == (project / name).read_text()
    mutant = run_mutants.Mutant("math", "double.py:FACTOR", "2", "3", by("test_slow"))
    assert copy.outcome(mutant) == "NOT TESTED: it hangs, for more than 1 s"
    assert (copy.folder / "double.py").read_text() == MODULE
