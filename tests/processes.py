"""Real processes: waiting for something to happen, and whether one still runs."""

import time
from collections.abc import Callable
from pathlib import Path

import limits


def wait_for(condition: Callable[[], object], seconds: float = limits.PROCESS_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
