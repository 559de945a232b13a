"""The process that a notebook runs in: this Python's own kernel, ended with all its children."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_core.utils import ensure_event_loop

from measure.recording import paths

# Time a kernel gets to end by itself, and after that to end on SIGTERM.
SHUTDOWN_S = 5.0
TERMINATE_S = 2.0
QUICK_EXIT = "--IPKernelApp.exec_lines=__import__('atexit').register(__import__('os')._exit, 0)"
"""Argument of a kernel that ends after what Python runs at exit: taking modules such as torch apart
afterwards takes a second. What is registered first runs last."""
ALL_OUTPUTS = (
    "--IPKernelApp.exec_lines=(lambda shell, iopub: shell.events.register('pre_run_cell', "
    "lambda info: iopub.schedule(lambda: iopub.socket.setsockopt(__import__('zmq').SNDHWM, 0))"
    "))(get_ipython(), get_ipython().kernel.iopub_thread)"
)
"""Argument of a kernel that keeps outputs until they are read; of more than a thousand that wait
ZeroMQ drops what comes next. Set before each cell: it holds for the readers that are connected."""
# Unix domain sockets take paths of about a hundred characters.
_LONGEST_FOLDER = 70


class OwnKernelSpecs(KernelSpecManager):
    """Knows one kernel: ipykernel in this very Python, whatever the user's home registers."""

    def _kernel_dirs_default(self) -> list[str]:
        return []


def variables() -> dict[str, str]:
    """What a kernel's environment has: our packages importable, our folders as absolute paths.

    Threads of the CPU sleep while they wait for each other, unless told otherwise: small products
    wait most of the time, and a core on which something else runs cannot be waited for by spinning.
    """
    search = [*map(str, paths.PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(search),
        "FUSEDLIB_RESULTS": str(paths.results_dir().absolute()),
        "FUSEDLIB_BUILD": str(paths.build_dir().absolute()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def private_folder() -> "tempfile.TemporaryDirectory[str]":
    """A temporary folder with a path short enough for sockets."""
    parent = None if len(tempfile.gettempdir()) <= _LONGEST_FOLDER else "/tmp"
    return tempfile.TemporaryDirectory(prefix="fusedlib-", dir=parent, ignore_cleanup_errors=True)


def new_manager(folder: Path) -> AsyncKernelManager:
    """Manager of a kernel not started yet, which talks through sockets in `folder`."""
    return AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=OwnKernelSpecs(),
        transport="ipc",
        connection_file=str(folder / "kernel.json"),
    )


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(manager: AsyncKernelManager, *, politely: bool) -> None:
    """End a kernel and every process that it started; nothing of them is left afterwards.

    Politely: the kernel is asked to shut down first, as after a notebook that ran to its end.
    """
    process = getattr(manager.provisioner, "process", None)
    if process is None:
        return
    with uninterrupted():
        family = _family(process.pid)
        if politely and process.poll() is None:
            with contextlib.suppress(Exception):
                ended = asyncio.wait_for(manager.shutdown_kernel(), SHUTDOWN_S)
                ensure_event_loop().run_until_complete(ended)
        _signal(process.pid, family, signal.SIGTERM)
        psutil.wait_procs(family, timeout=TERMINATE_S)
        # The kernel leads its own process group, which outlives it while a child is in it.
        _signal(process.pid, {*family, *_family(process.pid)}, signal.SIGKILL)
        with contextlib.suppress(Exception):
            process.wait(timeout=SHUTDOWN_S)
        _forget_tasks()


def _family(pid: int) -> set[psutil.Process]:
    """A process, its children and theirs, also those of another group."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    return set()


def _signal(group: int, processes: set[psutil.Process], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def _forget_tasks() -> None:
    """Cancel what an interrupt left in the event loop, or Python complains about it at exit."""
    loop = ensure_event_loop()
    if tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        gathered = asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait_for(gathered, 2.0))
