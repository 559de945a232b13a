"""One run at a time measures on a machine: two would disturb each other's times."""

import contextlib
import fcntl
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO

from fusedlib.bench import machine as machines
from study.files import lock, writing

HELD = "FUSEDLIB_MEASURING"
"""The turn that this process, or one that started it, has: none waits for itself."""
LOOK_AGAIN_S = 0.2
LOCK = ".measuring"


@contextlib.contextmanager
def turn_on(
    machine: Path, topic: str, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:  # fmt: skip
    """The turn of a topic on the machine of this folder, which is made where there is none.

    Raises:
        ResultsError: the folder cannot be written.
    """
    with writing(machine):
        _make(machine)
    with turn(machine / LOCK, topic, is_over):
        yield


def _make(machine: Path) -> None:
    """Make a machine's folder. That of one that nobody named gets a `.gitignore` with it: it is a
    visitor's, and no part of the repository.
    """
    if machine.exists():
        return
    machine.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=machine.parent) as unfinished:
        made = Path(unfinished) / machine.name
        made.mkdir()
        if not os.environ.get(machines.NAME):
            (made / ".gitignore").write_text("*\n")
        try:
            made.rename(machine)
        except OSError:
            if not machine.exists():  # else another run was first
                raise


@contextlib.contextmanager
def turn(path: Path, study: str, is_over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Run the block while no other run is in its turn with this file; who waits says for whom.

    The turn ends with the process, however that ends. It is not waited for longer than until
    `is_over`, nor where the file system has no locks, which is said.

    Raises:
        ResultsError: the file cannot be opened.
    """
    name = str(path.resolve())
    if os.environ.get(HELD) == name:
        yield
        return
    with writing(path):
        opened = path.open("a+b", buffering=0)
    with opened as file:
        if not _locked(file, study, is_over):
            yield
            return
        now = datetime.now(UTC).isoformat(timespec="seconds")
        _note(file, f"process {os.getpid()} on {platform.node()}, at {study} since {now}")
        os.environ[HELD] = name
        try:
            yield
        finally:
            os.environ.pop(HELD, None)
            _note(file, "")


def _locked(file: IO[bytes], study: str, is_over: Callable[[], bool]) -> bool:
    """Wait for the lock; whether it was had."""
    told = None
    while True:
        try:
            had = lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another run"
            if holder != told:
                print(
                    f"{study}: waits for {holder}: two at once would disturb each other's times",
                    flush=True,
                )
            told = holder
            if is_over():
                return False
            time.sleep(LOOK_AGAIN_S)
        else:
            if not had:
                _tell_unlocked(study, str(file.name))
            return had


@cache
def _tell_unlocked(study: str, path: str) -> None:
    print(
        f"{study}: {path} cannot be locked on this file system, so that nobody will wait; "
        "let no other run measure on this machine meanwhile"
    )


def _note(file: IO[bytes], text: str) -> None:
    """Say in the file whose turn it is, for those who wait; on a full disk it stays unsaid."""
    with contextlib.suppress(OSError):
        file.truncate(0)
        file.write(text.encode())
