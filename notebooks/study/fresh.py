"""Calling a function in a fresh process, so that nothing in it is warm.

Arguments go in as one JSON line on stdin, which then stays open: when the parent dies, however it
dies, the child reads the end of it and goes too. The answer comes back as one JSON line.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

Process = subprocess.Popen[bytes]


class FreshProcessError(RuntimeError):
    """The function failed in its process; the message holds what it said."""


def run(target: str, arguments: dict[str, Any], *, timeout_s: float) -> Any:
    """Call `"module:function"` with keyword arguments in a fresh process and return its value.

    What it raised is raised here: memory that ran out as MemoryError, `Refused` as itself, anything
    else, and that the time was up, as FreshProcessError.
    """
    return run_together(target, [arguments], timeout_s=timeout_s)[0]


def run_together(target: str, each: Sequence[dict[str, Any]], *, timeout_s: float) -> list[Any]:
    """`run` for each of these arguments at the same time, in processes that may need one another:
    all live until the last has answered, and the first one that fails ends all.
    """
    deadline = time.monotonic() + timeout_s
    values: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(_child(target, arguments)) for arguments in each]
        waiting: dict[Any, int] = {child.stdout: at for at, (child, _) in enumerate(started)}
        while waiting:
            readable, _, _ = select.select([*waiting], [], [], max(deadline - time.monotonic(), 0))
            if not readable:
                raise FreshProcessError(
                    f"{target} did not end within {timeout_s:g} s; its process is gone"
                )
            for stdout in readable:
                at = waiting.pop(stdout)
                values[at] = _answer(target, *started[at])
    return [values[at] for at in range(len(started))]


@contextlib.contextmanager
def _child(target: str, arguments: dict[str, Any]) -> Iterator[tuple[Process, IO[bytes]]]:
    """A process that is called, and what it prints; it ends with this block at the latest."""
    call = {"target": target, "arguments": arguments}
    environment = {**os.environ, "PYTHONPATH": _search_path()}
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "study.fresh"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
        )  # fmt: skip
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(call).encode() + b"\n")
                child.stdin.flush()
            yield child, errors
        finally:
            child.kill()
            child.wait()


def _answer(target: str, child: Process, errors: IO[bytes]) -> Any:
    assert child.stdout is not None
    if answer := child.stdout.readline().strip():
        return _value(json.loads(answer))
    if (status := child.wait()) == -signal.SIGKILL:
        raise MemoryError(f"the system killed the process of {target}: most likely out of memory")
    errors.seek(0)
    last_lines = errors.read().decode(errors="replace").strip().splitlines()[-5:]
    raise FreshProcessError(
        f"the process of {target} ended with status {status}: "
        f"{' | '.join(last_lines) or 'no message'}"
    )


def _value(reply: dict[str, Any]) -> Any:
    from fusedlib.bench.attempt import Unavailable, Wrong
    from study.fits import TooLarge

    status, reason = reply["status"], reply["reason"]
    if status == "ok":
        return reply["value"]
    for kind in (Unavailable, Wrong, TooLarge):
        if status == kind.status:
            raise kind(reason, reply["figures"])
    raise MemoryError(reason) if status == "oom" else FreshProcessError(reason)


def _search_path() -> str:
    """What this process can import, the function can too."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([*filter(None, [given]), *sys.path])


def _follow_parent(stdin: IO[bytes]) -> None:
    stdin.read()
    os._exit(1)


def _serve() -> None:
    # Whatever libraries print must not end up in the answer: fd 1 becomes fd 2.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    call = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_follow_parent, args=(sys.stdin.buffer,), daemon=True).start()
    from fusedlib.bench.attempt import Attempt

    tried = Attempt.at(lambda: _target(call["target"])(**call["arguments"]))
    reply = {"status": tried.status, "reason": tried.reason, "value": tried.value}
    out.write(json.dumps(reply | {"figures": tried.figures}) + "\n")
    out.flush()
    # Others may need this process, whose end is the parent's: no teardown, nothing is left to save.
    threading.Event().wait()


def _target(name: str) -> Any:
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    _serve()
