"""Functions that the tests call in fresh processes."""

import os
import signal
import sys
import time
from pathlib import Path

import limits


def fail():
    raise RuntimeError("broken on purpose\nsecond line")


def out_of_memory():
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def unavailable():
    from fusedlib.bench.attempt import Unavailable

    raise Unavailable("no such card")


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


def sleep(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(limits.TEST_S)  # longer than anybody waits for its end


def sleep_or_fail(path, wrong):
    from fusedlib.bench.attempt import Wrong

    if wrong is None:
        sleep(path)
    while not (Path(path).exists() and Path(path).read_text()):
        time.sleep(0.01)
    raise Wrong("of one", wrong)


def lengths_of_a_wrong_rival(**arguments):
    from dataclasses import replace

    from study import lengths, rivals

    @rivals.rival("swiglu", "deaf")
    def deaf(inputs):
        """Twice y."""
        work = rivals.get("swiglu", "eager").build(inputs)
        return replace(work, forward=lambda: 2 * work.forward())

    return lengths.in_one_process(**arguments)
