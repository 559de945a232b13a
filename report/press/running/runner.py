"""Runs the study's notebooks with papermill and keeps the executed copies.

Everything that can be checked is checked before the first notebook starts. A notebook that fails
does not stop the others; its copy, as far as it came, is kept like any other.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import DeadKernelError
from papermill import execute_notebook
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, papermill_engines
from papermill.exceptions import PapermillExecutionError

from fusedlib.bench import paths, results
from fusedlib.bench.progress import FILE as PROGRESS
from press import recording
from press.running import config as configs
from press.running import fingerprint, kernel, parameters
from press.running.config import FRAME, STATIC, Study
from press.running.monitor import Monitor
from press.running.products import METADATA, check_writable, copy_path, read_metadata, write_whole


@dataclass(frozen=True)
class Job:
    """One notebook to run, checked.

    Attributes:
        name: of the notebook and its executed copy.
        notebook: its path.
        parameters: what it is run with.
        profile: whose parameters they are.
        reads: studies whose rows it shows; None for all.
        cells: code cells that will run.
    """

    name: str
    notebook: Path
    parameters: Mapping[str, Any]
    profile: str
    reads: tuple[str, ...] | None
    cells: int


@dataclass(frozen=True)
class Outcome:
    """What became of a notebook: `ok`, `kept` (unchanged, not run) or `failed` with its error."""

    name: str
    status: str
    copy: Path
    seconds: float = 0.0
    error: str | None = None


def plan(studies: Sequence[Study], settings: Sequence[str], profile: str) -> list[Job]:
    """The runs of these studies, with all their parameters checked.

    Args:
        studies: what to run, in this order; the report's frame, which reads all rows, may be one.
        settings: `name=value` or `notebook.name=value`, over the study file's values.
        profile: `"quick"` or `"full"`.

    Raises:
        ParameterError: a notebook without its parameters cell, an unknown parameter, a wrong value.
    """
    declared = {study.name: parameters.read(study.notebook) for study in studies}
    overrides = parameters.assign_overrides(settings, declared)
    jobs = []
    for study in studies:
        values = parameters.values(
            study.name, declared[study.name], study.profiles[profile],
            overrides[study.name], profile,
        )  # fmt: skip
        cells = _count_cells(study.notebook)
        reads = None if study.name == FRAME else (study.name, *study.reads)
        jobs.append(Job(study.name, study.notebook, values, profile, reads, cells))
    return jobs


def run(jobs: Sequence[Job], monitor: Monitor, *, fresh: bool = False) -> list[Outcome]:
    """Run notebooks one after another; those of which nothing changed are kept as they are.

    Raises:
        WriteError: a copy cannot be written.
        ResultsError: a file of rows is damaged; nothing has run then.
        KeyboardInterrupt: ctrl-C; the copy so far is written and the kernel gone.
    """
    check_writable(copy_path(FRAME).parent)
    check_writable(paths.results_dir())
    for dropped in _check_rows(jobs):
        monitor.say(dropped)
    outcomes = []
    for job in jobs:
        why = ["FRESH"] if fresh else changes(job)
        if not why:
            monitor.skip(job.name, "unchanged, kept")
            outcomes.append(Outcome(job.name, "kept", copy_path(job.name)))
        else:
            outcomes.append(execute(job, monitor, fresh=fresh))
    return outcomes


def _check_rows(jobs: Sequence[Job]) -> list[str]:
    """Read all rows that these notebooks will read, and say which lines were torn.

    A damaged file would otherwise show after an hour, as an error in a cell.
    """
    every = any(job.reads is None for job in jobs)
    return results.check(None if every else {name for job in jobs for name in job.reads or ()})


def changes(job: Job) -> list[str]:
    """Why a notebook must run: what changed since its last good run; empty when nothing did."""
    metadata = read_metadata(copy_path(job.name))
    if metadata.get("status") != "ok":
        return ["no good run yet"]
    now = {**fingerprint.before_run(job.notebook, job.parameters), **fingerprint.rows(job.reads)}
    return fingerprint.changed(metadata.get("fingerprint"), now)


def execute(job: Job, monitor: Monitor, *, fresh: bool = False) -> Outcome:
    """Run one notebook and write its executed copy, whatever happens in it.

    Raises:
        WriteError: the copy cannot be written.
        KeyboardInterrupt: ctrl-C; the copy so far is written and the kernel gone.
    """
    before = fingerprint.before_run(job.notebook, job.parameters)
    began = time.monotonic()
    with kernel.private_folder() as folder:
        session = _Session(folder, job.notebook.parent, fresh, monitor.cell)
        with monitor.notebook(job.name, job.cells, session.progress_file):
            status, error, stop = _attempt(job, session)
    outcome = Outcome(job.name, status, copy_path(job.name), time.monotonic() - began, error)
    if status == "ok":
        outcome = _beside(job, session, outcome)
    with kernel.uninterrupted():
        _write_copy(job, session, outcome, {**before, **fingerprint.rows(job.reads)})
    summary = f"{outcome.status} after {outcome.seconds:.1f} s"
    monitor.ended(f"{summary}: {outcome.error}" if outcome.error else summary)
    if stop is not None:
        raise stop
    return outcome


def _beside(job: Job, session: "_Session", outcome: Outcome) -> Outcome:
    """Put what other recorded machines show beside what the leading one does."""
    studies = [job.name] if job.reads is not None else [s.name for s in configs.load().studies]
    try:
        recording.show_others(session.notebook, job.notebook, studies)
    except Exception as failure:
        error = f"on another machine's rows: {type(failure).__name__}: {failure}"
        return replace(outcome, status="failed", error=error)
    return outcome


def _attempt(job: Job, session: "_Session") -> tuple[str, str | None, KeyboardInterrupt | None]:
    """Status, error and interrupt of a run. Papermill's own record of these is not to be trusted:
    after a dead kernel it reads `completed`."""
    finished = False
    try:
        _papermill(job, session)
        finished = True
    except KeyboardInterrupt as stop:
        session.note_error("Interrupted", "the run was stopped here")
        return "interrupted", "the run was stopped", stop
    except PapermillExecutionError as failure:
        return "failed", _described(failure.ename, failure.evalue, failure.cell_index), None
    except DeadKernelError:
        text = "the kernel died: it was killed, ran out of memory or crashed"
        session.note_error("DeadKernelError", text)
        return "failed", _described("DeadKernelError", text, session.cell_index), None
    except Exception as failure:
        session.note_error(type(failure).__name__, str(failure))
        return "failed", _described(type(failure).__name__, str(failure), None), None
    finally:
        kernel.end(session.manager, politely=finished)
    return "ok", None, None


def _described(kind: str, message: str, cell: int | None) -> str:
    first = (message.strip().splitlines() or [""])[0][:300]
    text = f"{kind}: {first}" if first else kind
    return text if cell is None else f"cell {cell + 1}: {text}"


@dataclass
class _Session:
    """What belongs to one run of one notebook while it goes on."""

    folder: Path
    cwd: Path
    fresh: bool
    on_cell: Callable[[], None]
    notebook: nbformat.NotebookNode | None = None
    cell_index: int | None = None
    manager: Any = field(init=False)

    def __post_init__(self) -> None:
        self.manager = kernel.new_manager(self.folder)

    @property
    def progress_file(self) -> Path:
        return self.folder / "progress.jsonl"

    def environment(self) -> dict[str, str]:
        """The kernel's: where to tell the case, whether to measure anew, a profile of its own."""
        return kernel.environment(
            {
                STATIC: "1",
                PROGRESS: str(self.progress_file),
                "FRESH": "1" if self.fresh else None,
                "IPYTHONDIR": str(self.folder / "ipython"),
            }
        )

    def started_cell(self, cell: nbformat.NotebookNode, cell_index: int) -> None:
        self.cell_index = cell_index
        self.on_cell()

    def note_error(self, name: str, message: str) -> None:
        """Show in the cell that was running why it has no further output."""
        if self.notebook is not None and self.cell_index is not None:
            output = nbformat.v4.new_output(
                "error", ename=name, evalue=message, traceback=[f"{name}: {message}"]
            )
            self.notebook.cells[self.cell_index].outputs.append(output)


class _Engine(NBClientEngine):
    """papermill's engine with our own kernel; the session gets hold of the notebook."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, session: _Session, **options: Any
    ) -> None:
        session.notebook = nb_man.nb
        client = PapermillNotebookClient(
            nb_man, km=session.manager, kernel_name=kernel_name,
            startup_timeout=options.get("start_timeout", 60), timeout=None,
            on_cell_execute=session.started_cell, coalesce_streams=True, record_timing=False,
        )  # fmt: skip
        client.execute(env=session.environment(), cwd=str(session.cwd))


papermill_engines.register("fusedlib", _Engine)


def _papermill(job: Job, session: _Session) -> None:
    # Its warnings (an unknown parameter, say) are errors here, found before.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    execute_notebook(
        nbformat.read(job.notebook, as_version=4), None, dict(job.parameters),
        engine_name="fusedlib", kernel_name="python3", language="python", progress_bar=False,
        start_timeout=120, session=session,
    )  # fmt: skip


def _write_copy(
    job: Job, session: _Session, outcome: Outcome, prints: fingerprint.Fingerprint
) -> None:
    notebook = session.notebook or nbformat.read(job.notebook, as_version=4)
    notebook = nbformat.from_dict(notebook)
    # papermill marks a failure with cells and times of its own; ours are below.
    notebook.cells = [
        c for c in notebook.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])
    ]
    for holder in (notebook, *notebook.cells):
        holder.metadata.pop("papermill", None)
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell["id"] = "injected-parameters"
    notebook.metadata[METADATA] = {
        "name": job.name,
        "status": outcome.status,
        "error": outcome.error,
        "profile": job.profile,
        "parameters": dict(job.parameters),
        "seconds": round(outcome.seconds, 1),
        "executed_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": prints,
    }
    write_whole(outcome.copy, nbformat.writes(notebook) + "\n")


def _count_cells(notebook: Path) -> int:
    """Code cells that will run, with the one that papermill adds for the parameters."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return 1 + sum(c["cell_type"] == "code" and bool("".join(c["source"]).strip()) for c in cells)
