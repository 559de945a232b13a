"""Puts faults into a copy of the project, one at a time, and looks whether its test fails.

    make test-mutants                     # all of tests/mutants.toml
    make test-mutants ARGS="--only check" # those whose text has "check" in it

Every test named there must pass before anything is changed. Status 1 where a mutant survives, hangs
or no longer applies.
"""

import argparse
import ast
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
LIST = Path("tests/mutants.toml")
# Against hanging only: the slowest of these tests takes half a minute on two slow cores.
LIMIT_S = 900
# Plugins of pytest that take a second to import and are of no use here.
UNUSED = ("cacheprovider", "xdist", "xdist.looponfail", "anyio", "randomly", "hypothesispytest")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
# Ids of tests in pytest's summary.
PASSED, FAILED, NOT_PASSED = (
    re.compile(rf"^(?:{words}) (\S.*?)(?: - |$)", re.MULTILINE)
    for words in ("PASSED", "FAILED", "FAILED|ERROR")
)
KILLED = "killed"
Result = TypeVar("Result")


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


def read(root: Path) -> list[Mutant]:
    """All mutants of a project's list.

    Raises:
        TypeError: an entry lacks a key or has an unknown one.
    """
    areas = tomllib.loads((root / LIST).read_text(encoding="utf-8"))
    return [Mutant(area, **entry) for area, entries in areas.items() for entry in entries]


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
    """A copy of a project's files in which one mutant at a time lives."""

    _changes = itertools.count(1)

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
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
        begin = time.monotonic()
        try:
            status, output = self.run([mutant.killed_by])
        finally:
            path.write_bytes(before)
            os.utime(path, (seen.st_atime, seen.st_mtime))
        if status == 0:
            return f"SURVIVED: {mutant.killed_by} passes"
        if status == 1 and FAILED.search(output):
            return f"{KILLED} in {time.monotonic() - begin:.0f} s by {mutant.killed_by}"
        return f"NOT TESTED: {_end(status, output)}"

    def passing(self, tests: list[str]) -> dict[str, str]:
        """By test: "" for one that passes, else what pytest says. All are of one kind."""
        status, output = self.run(tests)
        passed, failed = PASSED.findall(output), NOT_PASSED.findall(output)
        sound = [t for t in tests if _any_of(t, passed) and not _any_of(t, failed)]
        return {test: "" if test in sound else _end(status, output) for test in tests}

    def run(self, tests: list[str]) -> tuple[int | None, str]:
        """pytest's status and its output; the status of what hangs is None."""
        folders, options = [".", "notebooks", "report"], [f"-pno:{name}" for name in UNUSED]
        # Tensors are small: two threads would wait for each other.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if needs_interpreter(tests[0]):  # as tests/interpreter.py runs it
            folders += ["tests", "tests/interpreted"]
            options += ["-p", "quicker_interpreter", "-p", "bf16"]
            environment["TRITON_INTERPRET"] = "1"
        search = [*(str(self.folder / name) for name in folders), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, search))
        if len(tests) == 1:
            options.append("-x")
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-rA", "-o", "timeout=0", *options, *tests],
            cwd=self.folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):  # and what the tests started
                os.killpg(process.pid, signal.SIGKILL)


def needs_interpreter(test: str) -> bool:
    """Whether a test stands in a file that pytest does not collect by itself."""
    return not Path(test.partition("::")[0]).name.startswith("test_")


def _any_of(test: str, ids: list[str]) -> bool:
    """Whether a test, or a case of it, is among some ids."""
    return any(one == test or one.startswith((f"{test}[", f"{test}::")) for one in ids)


def _end(status: int | None, output: str) -> str:
    if status is None:
        return f"it hangs, for more than {LIMIT_S} s"
    return f"pytest ended with status {status}\n{output[-3000:]}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the mutants of a project; 0 where all die."""
    parser = argparse.ArgumentParser(description="Faults, each with the test that must see it.")
    parser.add_argument("--only", default="", help="only mutants whose text contains this")
    parser.add_argument("--workers", type=int, default=1, help="copies that work side by side")
    options = parser.parse_args(arguments)
    listed = read(root)
    chosen = [m for m in listed if options.only in f"{m} {m.killed_by}"]
    if not chosen:
        print(f"no mutant has {options.only!r} in its text; there are {len(listed)} in {LIST}")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(max(1, options.workers)):
            copies.put(Copy(root, Path(folder, str(number))))
        return _report(chosen, copies)


def _report(mutants: list[Mutant], copies: "queue.Queue[Copy]") -> int:
    """Run the tests without a mutant, then the mutants of those that pass; a line a mutant."""
    begin = time.monotonic()

    def with_copy(work: Callable[[Copy], Result]) -> Result:
        copy = copies.get()
        try:
            return work(copy)
        finally:
            copies.put(copy)

    tests = sorted({mutant.killed_by for mutant in mutants}, key=needs_interpreter)
    kinds = [[*kind] for _, kind in itertools.groupby(tests, needs_interpreter)]
    killed = 0
    with ThreadPoolExecutor(copies.qsize()) as pool:
        unsound: dict[str, str] = {}
        for passing in pool.map(lambda kind: with_copy(lambda copy: copy.passing(kind)), kinds):
            unsound |= {test: why for test, why in passing.items() if why}
        for test, why in unsound.items():
            print(f"{test} does not pass without any mutant: {why}", flush=True)
        sound = [mutant for mutant in mutants if mutant.killed_by not in unsound]
        tried = pool.map(lambda mutant: with_copy(lambda copy: copy.outcome(mutant)), sound)
        for mutant, outcome in zip(sound, tried, strict=True):
            killed += outcome.startswith(KILLED)
            print(f"{mutant}\n    {outcome}", flush=True)
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(mutants)} mutants, {killed} killed, {len(tests)} tests, {minutes:.1f} min")
    return 0 if killed == len(mutants) else 1


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
