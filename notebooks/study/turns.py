"""One run at a time measures on a machine: two would disturb each other's times."""

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
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
    """Run the block while no other run is in its turn on the machine of this folder, which is made
    where there is none; who waits says for whom.

    The turn ends with the process, however that ends. It is not waited for longer than until
    `is_over`, nor where the file system has no locks.
    """
    path = machine / LOCK
    with writing(machine):
        if not machine.exists():
            machine.mkdir(parents=True, exist_ok=True)
            if not os.environ.get(machines.NAME):  # a visitor's, and no part of the repository
                (machine / ".gitignore").write_text("*\n")
        opened = path.open("a+b", buffering=0)
    name = str(path.resolve())
    with opened as file:
        if os.environ.get(HELD) == name or not _locked(file, topic, is_over):
            yield
            return
        os.environ[HELD] = name
        try:
            yield
        finally:
            os.environ.pop(HELD, None)


def _locked(file: IO[bytes], topic: str, is_over: Callable[[], bool]) -> bool:
    """Wait for the lock; whether it was had."""
    is_told = False
    while True:
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another run"
            if not is_told:
                print(
                    f"{topic}: waits for {holder}: two at once would disturb each other's times",
                    flush=True,
                )
            is_told = True
            if is_over():
                return False
            time.sleep(LOOK_AGAIN_S)
        else:
            with contextlib.suppress(OSError):  # on a full disk it stays unsaid
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}, at {topic}".encode())
            return True
