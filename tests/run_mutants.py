"""Puts faults into a copy of the project, one at a time, and looks whether its test fails.

    make test-mutants                     # all of tests/mutants.toml
    make test-mutants ARGS="--only check" # those whose text has "check" in it

Every test named there must pass before anything is changed. Status 1 where a mutant survives, hangs
or no longer applies.

A test runs in a fork of this process, which has imported what the list names as `preloaded`: other
packages, half of a test's time. The project's own modules are the copy's.
"""

import argparse
import ast
import importlib
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants.toml")
# Plugins of pytest that take a second to import and are of no use here.
UNUSED = ("cacheprovider", "xdist", "xdist.looponfail", "anyio", "randomly", "hypothesispytest")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
# Ids of tests in pytest's summary.
PASSED, FAILED = (
    re.compile(rf"^(?:{words}) (\S+?::\S.*?)(?: - |$)", re.MULTILINE)
    for words in ("PASSED", "FAILED|ERROR")
)
KILLED = "killed"
FORK = multiprocessing.get_context("fork")


class DoesNotApplyError(Exception):
    """What a mutant names is not there, or not there once."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the test that fails when it is there.

    Attributes:
        area: the table of the list that it stands in.
        where: `file.py:Class.method`, a function, class or assignment; or a file alone.
        old: text that stands there once.
        new: what is put in its place.
        killed_by: pytest's id of the test.
    """

    area: str
    where: str
    old: str
    new: str
    killed_by: str

    @property
    def file(self) -> str:
        """The file, below the project's root."""
        return self.where.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.area}: {self.where}: {_short(self.old)} -> {_short(self.new)}"

    def applied(self, root: Path) -> str:
        """The file's text with the fault in it.

        Raises:
            DoesNotApplyError: no such file or name, `old` is not there once, or what comes out is
                no Python.
        """
        path = root / self.file
        if not path.is_file():
            raise DoesNotApplyError(f"there is no {self.file}")
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        first, last = 0, len(lines)
        if name := self.where.partition(":")[2]:
            first, last = lines_of(text, name)
        part = "".join(lines[first:last])
        if (times := part.count(self.old)) != 1:
            raise DoesNotApplyError(f"{self.old!r} stands {times} times in {self.where}, not once")
        mutated = "".join([*lines[:first], part.replace(self.old, self.new), *lines[last:]])
        if mutated == text:
            raise DoesNotApplyError(f"{self.new!r} changes nothing in {self.where}")
        if path.suffix == ".py":
            try:
                ast.parse(mutated)
            except SyntaxError as error:
                raise DoesNotApplyError(f"{self.where} would be no Python: {error}") from None
        return mutated


def read(root: Path) -> tuple[list[str], list[Mutant]]:
    """What is to be imported beforehand, and all mutants of a project's list.

    Raises:
        TypeError: an entry lacks a key or has an unknown one.
    """
    areas = tomllib.loads((root / LIST).read_text(encoding="utf-8"))
    preloaded = areas.pop("preloaded", [])
    mutants = [Mutant(area, **entry) for area, entries in areas.items() for entry in entries]
    return preloaded, mutants


def lines_of(text: str, name: str) -> tuple[int, int]:
    """First line, counted from 0, and the line after the last of a qualified name's definition.

    Raises:
        DoesNotApplyError: nothing, or more than one thing, is defined under that name.
    """
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        named = [child for child in _definitions(node) if part in _names(child)]
        if len(named) != 1:
            raise DoesNotApplyError(f"{part!r} of {name} is defined {len(named)} times, not once")
        node = named[0]
    decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
    return min([node.lineno, *decorators]) - 1, node.end_lineno


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Those directly below, also behind `if` and `with`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            yield child
        elif not isinstance(child, ast.expr):
            yield from _definitions(child)


def _names(node: ast.AST) -> list[str]:
    if hasattr(node, "name"):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


class Copy:
    """A copy of a project's files in which one mutant at a time lives.

    Args:
        limit_s: after so many seconds a test is said to hang.
    """

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self._changes = itertools.count(1)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():  # a deleted file is listed too
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    def outcome(self, mutant: Mutant) -> str:
        """What became of a mutant; it begins with `KILLED` where its test saw it."""
        try:
            mutated = mutant.applied(self.folder)
        except DoesNotApplyError as error:
            return f"DOES NOT APPLY: {error}"
        path = self.folder / mutant.file
        before, seen = path.read_bytes(), path.stat()
        path.write_text(mutated, encoding="utf-8")
        # Python knows a changed file by its size and the second of its change.
        second = seen.st_mtime + 10 * next(self._changes)
        os.utime(path, (second, second))
        try:
            status, output = self.run([mutant.killed_by])
        finally:
            path.write_bytes(before)
            os.utime(path, (seen.st_atime, seen.st_mtime))
        if status == 0:
            return f"SURVIVED: {mutant.killed_by} passes"
        if status == 1 and (failed := FAILED.search(output)):
            return f"{KILLED} by {failed[1]}"
        return f"NOT TESTED: {self._end(status, output)}"

    def failing(self, tests: Sequence[str]) -> dict[str, str]:
        """Why tests, all or none of them interpreted, do not pass, by name."""
        status, output = self.run(tests)
        passed, failed = PASSED.findall(output), FAILED.findall(output)
        sound = [t for t in tests if _any_of(t, passed) and not _any_of(t, failed)]
        return {test: self._end(status, output) for test in tests if test not in sound}

    def run(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """pytest's status and its output; the status of what hangs is None."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            process = FORK.Process(target=self._run_pytest, args=(tests, output.fileno()))
            process.start()
            process.join(self.limit_s)
            status = process.exitcode
            with suppress(ProcessLookupError):  # and what the tests started
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            output.seek(0)
            return status, output.read()

    def _run_pytest(self, tests: Sequence[str], output: int) -> None:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(fd), "w") for fd in (1, 2))
        folders, options = [".", "notebooks", "report"], [f"-pno:{name}" for name in UNUSED]
        if is_interpreted(tests[0]):  # as tests/interpreter.py runs it
            os.environ["TRITON_INTERPRET"] = "1"
        options += [f"-opythonpath={' '.join(folders)}", "-otimeout=0", "-x" * (len(tests) == 1)]
        own = [str(self.folder / name) for name in folders]
        given = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([*own, *given])  # for processes of the tests
        os.chdir(self.folder)
        status = pytest.main(["-q", "-rA", *filter(None, options), *tests])
        sys.stdout.flush()
        os._exit(status)

    def _end(self, status: int | None, output: str) -> str:
        if status is None:
            return f"it hangs, for more than {self.limit_s:g} s"
        return f"pytest ended with status {status}\n{output[-3000:]}"


def is_interpreted(test: str) -> bool:
    """Whether a test runs in Triton's interpreter, by its device (`tests/conftest.py`)."""
    return "interpreter" in test.partition("[")[2]


def _any_of(test: str, ids: list[str]) -> bool:
    """Whether a test, or a case of it, is among some ids."""
    return any(one == test or one.startswith((f"{test}[", f"{test}::")) for one in ids)


def run(copy: Copy, mutants: Sequence[Mutant]) -> int:
    """Run tests without a mutant, then the mutants of those that pass; how many were killed."""
    failing: dict[str, str] = {}
    tests = sorted({mutant.killed_by for mutant in mutants}, key=is_interpreted)
    for _, alike in itertools.groupby(tests, is_interpreted):
        failing |= copy.failing([*alike])
    for test, why in failing.items():
        print(f"{test} does not pass without any mutant: {why}", flush=True)
    killed = 0
    for mutant in mutants:
        if mutant.killed_by not in failing:
            outcome = copy.outcome(mutant)
            killed += outcome.startswith(KILLED)
            print(f"{mutant}\n    {outcome}", flush=True)
    return killed


def main() -> int:
    """Run the mutants of a project; 0 where all die."""
    parser = argparse.ArgumentParser(description="Faults, each with the test that must see it.")
    parser.add_argument("--only", default="", help="only mutants whose text contains this")
    parser.add_argument("--workers", type=int, default=1, help="copies that work side by side")
    # Against hanging only: the slowest of the tests takes half a minute on two slow cores.
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of a test")
    options = parser.parse_args()
    preloaded, listed = read(ROOT)
    chosen = [m for m in listed if options.only in f"{m} {m.killed_by}"]
    if not chosen:
        print(f"no mutant has {options.only!r} in its text; there are {len(listed)} in {LIST}")
        return 1
    begin = time.monotonic()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are small: two threads would wait
    for name in preloaded:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Copy(ROOT, Path(folder, str(n)), options.limit) for n in range(options.workers)]
        # Mutants of one test go to one worker.
        chosen.sort(key=lambda mutant: mutant.killed_by)
        shares = [chosen[len(chosen) * n // len(copies) : len(chosen) * (n + 1) // len(copies)]
                  for n in range(len(copies))]  # fmt: skip
        with ProcessPoolExecutor(len(copies), FORK) as pool:
            killed = sum(pool.map(run, copies, shares))
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(chosen)} mutants, {killed} killed, {minutes:.1f} min")
    return 0 if killed == len(chosen) else 1


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
