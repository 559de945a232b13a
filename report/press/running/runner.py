"""Runs the study's notebooks with papermill and keeps the executed copies.

Everything that can be checked is checked before the first notebook starts. A notebook that fails
does not stop the others; its copy, as far as it came, is kept like any other.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

from measure.recording import paths, results
from measure.recording.files import write_whole
from measure.recording.progress import FILE as PROGRESS
from press import replay
from press.running import fingerprint, kernel, parameters
from press.running.config import FRAME, Study
from press.running.monitor import Monitor
from press.running.products import METADATA, check_writable, copy_path, read_metadata
from press.variables import environment

OUTPUTS_S = 86_400
"""How long outputs may take to be read after their cell has ended; none is lost on the way."""
_PYTHON = {"kernel_name": "python3", "language": "python"}


@dataclass(frozen=True)
class Job:
    """One notebook to run, checked."""

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    profile: str
    reads: set[str] | None  # studies whose rows it shows; None for all
    only_shows: bool = False  # it runs in this process: a kernel would import torch for seconds

    @property
    def cells(self) -> int:
        """Code cells that will run, with the one that papermill adds for the parameters."""
        cells = nbformat.read(self.notebook, as_version=4).cells
        return 1 + sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in cells)


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook: `ok`, `kept` (unchanged, not run) or `failed` with its error."""

    name: str
    status: str
    copy: Path
    seconds: float = 0.0
    error: str | None = None


def jobs(studies: Sequence[Study], settings: Sequence[str], profile: str) -> list[Job]:
    """The runs of these studies, with all their parameters checked."""
    values = parameters.choose(studies, settings, profile)
    return [
        Job(s.name, s.notebook, values[s.name], profile, s.reads, s.only_shows) for s in studies
    ]


def run(jobs: Sequence[Job], monitor: Monitor, *, fresh: bool = False) -> list[Outcome]:
    """Run notebooks one after another; those of which nothing changed are kept as they are.

    On ctrl-C the copy so far is written and the kernel gone.
    """
    check_writable(copy_path(FRAME).parent)
    check_writable(paths.results_dir())
    # A damaged file of rows would otherwise show after an hour, as an error in a cell.
    every = any(job.reads is None for job in jobs)
    read = None if every else {name for job in jobs for name in job.reads or ()}
    for torn in results.check(read):
        monitor.say(torn)
    outcomes = []
    for job in jobs:
        if fresh or not is_unchanged(job):
            outcomes.append(execute(job, monitor, fresh=fresh))
        else:
            monitor.skip(job.name, "unchanged, kept")
            outcomes.append(Outcome(job.name, "kept", copy_path(job.name)))
    return outcomes


def is_unchanged(job: Job) -> bool:
    """Whether all that a notebook's last run was made from is what it was, and it went well."""
    noted = read_metadata(copy_path(job.name))
    now = [fingerprint.before_run(job.notebook, job.parameters), fingerprint.rows(job.reads)]
    return noted.get("status") == "ok" and noted.get("fingerprint") == now


def execute(job: Job, monitor: Monitor, *, fresh: bool = False) -> Outcome:
    """Run one notebook and write its executed copy, whatever happens."""
    before = fingerprint.before_run(job.notebook, job.parameters)
    began = time.monotonic()
    with kernel.private_folder() as name:
        session = _Session(Path(name), monitor)
        with monitor.notebook(job.name, job.cells, session.progress_file):
            status, error, stop = _attempt(job, session, fresh)
    seconds = time.monotonic() - began
    outcome = Outcome(job.name, status, copy_path(job.name), seconds, error)
    with kernel.uninterrupted():
        _write_copy(job, session, outcome, [before, fingerprint.rows(job.reads)])
    summary = f"{outcome.status} after {outcome.seconds:.1f} s"
    monitor.say_of_notebook(f"{summary}: {outcome.error}" if outcome.error else summary)
    if stop is not None:
        raise stop
    return outcome


class _Session:
    """One run of one notebook while it goes on: its kernel, and which cell it is at."""

    def __init__(self, folder: Path, monitor: Monitor) -> None:
        self.folder = folder
        self.progress_file = folder / "progress.jsonl"
        self.manager = kernel.new_manager(folder)
        self.monitor = monitor
        self.notebook: Any = None
        self.cell_index: int | None = None

    def started(self, notebook: Any) -> None:
        self.notebook = notebook

    def started_cell(self, cell: Any, cell_index: int) -> None:
        self.cell_index = cell_index
        self.monitor.cell()

    def note_error(self, name: str, message: str) -> None:
        """Show in the cell that was running why it has no further output."""
        if self.notebook is not None and self.cell_index is not None:
            output = nbformat.v4.new_output(
                "error", ename=name, evalue=message, traceback=[f"{name}: {message}"]
            )
            self.notebook.cells[self.cell_index].outputs.append(output)


def _attempt(
    job: Job, session: _Session, fresh: bool
) -> tuple[str, str | None, KeyboardInterrupt | None]:
    """Status, error and interrupt of a run. Papermill's own record of these is not to be trusted:
    after a dead kernel it reads `completed`."""
    variables = {
        PROGRESS: str(session.progress_file),
        "FRESH": "1" if fresh else None,
        "IPYTHONDIR": str(session.folder / "ipython"),  # a profile of its own
    }
    # Papermill's warnings (an unknown parameter, say) are errors here, found before.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    finished = False
    try:
        notebook, values = nbformat.read(job.notebook, as_version=4), dict(job.parameters)
        if job.only_shows:
            prepared = execute_notebook(notebook, None, values, prepare_only=True, **_PYTHON)
            session.started(prepared)
            replay.fill(prepared, job.notebook, session.started_cell)
        else:
            with environment(kernel.variables() | variables):
                execute_notebook(
                    notebook, None, values, **_PYTHON, progress_bar=False, start_timeout=120,
                    km=session.manager, resources={"metadata": {"path": str(job.notebook.parent)}},
                    on_notebook_start=session.started, on_cell_execute=session.started_cell,
                    coalesce_streams=True, record_timing=False,
                    extra_arguments=[kernel.QUICK_EXIT, kernel.ALL_OUTPUTS],
                    iopub_timeout=OUTPUTS_S,
                )  # fmt: skip
        finished = True
    except KeyboardInterrupt as stop:
        session.note_error("Interrupted", "the run was stopped here")
        return "interrupted", "the run was stopped", stop
    except PapermillExecutionError as failure:
        return "failed", _described(failure.ename, failure.evalue, failure.cell_index), None
    except Exception as failure:
        kind, text = type(failure).__name__, str(failure)
        if isinstance(failure, DeadKernelError):
            text = "the kernel died: it was killed, ran out of memory or crashed"
        session.note_error(kind, text)
        return "failed", _described(kind, text, session.cell_index), None
    finally:
        kernel.end(session.manager, politely=finished)
    return "ok", None, None


def _described(kind: str, message: str, cell: int | None) -> str:
    first = (message.strip().splitlines() or [""])[0][:300]
    text = f"{kind}: {first}" if first else kind
    return text if cell is None else f"cell {cell + 1}: {text}"


def _write_copy(job: Job, session: _Session, outcome: Outcome, made_from: list[str]) -> None:
    notebook = session.notebook or nbformat.read(job.notebook, as_version=4)
    # Papermill marks a failure with cells of its own; ours is in the metadata.
    notebook = remove_error_markers(nbformat.from_dict(notebook))
    notebook.metadata[METADATA] = {
        "name": job.name,
        "status": outcome.status,
        "error": outcome.error,
        "profile": job.profile,
        "parameters": dict(job.parameters),
        "seconds": round(outcome.seconds, 1),
        "executed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": made_from,
    }
    write_whole(outcome.copy, nbformat.writes(notebook) + "\n")
