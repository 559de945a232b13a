"""Runs notebooks by papermill, into copies under `report/build/notebooks`.

A copy is kept where nothing that it was made from is newer, as Make would: the notebook, the code,
the recorded rows. Sections of the paper show rows alone, and run several at once; notebooks
measure, and run one after the other.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import psutil
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import DeadKernelError
from papermill import execute_notebook
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

from fusedlib.bench import machine as machines
from press import knobs
from study import paths
from study.errors import SentenceError
from study.files import write_whole
from study.rows import REPLAY, folders

SECTIONS = paths.REPORT / "sections"
MADE_FROM = "fusedlib", "notebooks", "report/press", "report/claims", "report/published"
NOTED = "fusedlib"
"""Key of a copy's metadata under which stands how its run ended."""
OUTPUTS_S = 86_400
"""How long outputs may take to be read after their cell has ended."""

environment = partial(mock.patch.dict, os.environ)
"""These variables are set while a block runs."""


class ChoiceError(SentenceError):
    """A notebook, a knob or a value that there is not; the message says what there is."""


@dataclass(frozen=True)
class Part:
    """A notebook: one of the ten, or a section of the paper."""

    notebook: Path

    @property
    def name(self) -> str:
        """Of its file, such as "04_memory"."""
        return self.notebook.stem

    @property
    def only_shows(self) -> bool:
        """Whether it shows recorded rows and measures nothing: a section, or the claims' ledger."""
        return self.notebook.parent == SECTIONS

    @property
    def title(self) -> str:
        """Its first heading, up to a colon."""
        first = str(_read(self.notebook).cells[0].source).partition("\n")[0]
        return first.removeprefix("# ").partition(":")[0]

    @property
    def copy(self) -> Path:
        """Where its executed copy lies."""
        return copies() / f"{self.name}.ipynb"

    def knobs(self) -> dict[str, knobs.Knob]:
        """What its cell tagged `parameters` declares, by name."""
        cells = [c for c in _read(self.notebook).cells if knobs.TAG in c.metadata.get("tags", [])]
        return knobs.declared(cells[0].source) if cells else {}


def copies() -> Path:
    """The folder of executed copies."""
    return paths.build_dir() / "notebooks"


def guides() -> list[Part]:
    """The notebooks, in the order of their numbers."""
    return [Part(path) for path in sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))]


def sections() -> list[Part]:
    """The sections of the paper, in the order of their numbers, and its ledger of claims."""
    return [Part(path) for path in sorted(SECTIONS.glob("*.ipynb"))]


def select(only: str = "") -> list[Part]:
    """These notebooks and sections, named in full, by number or by a path; all where none is named.

    Raises:
        ChoiceError: an unknown one, with those that are known.
    """
    every = [*sections(), *guides()]
    chosen: list[Part] = []
    for name in only.replace(",", " ").split():
        alike = [p for p in every if name in (p.name, *p.name.split("_", 1))]
        if name.endswith(".ipynb") and Path(name).is_file():
            alike = [Part(Path(name).resolve())]
        if not alike:
            known = ", ".join(part.name for part in every)
            raise ChoiceError(f"notebook {name!r} is unknown; known: {known}, or a path")
        chosen += alike
    return list(dict.fromkeys(chosen)) or every


def settings(parts: Sequence[Part], given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Values of knobs by notebook, of `name=value` for all that have it, or `notebook.name=value`.

    Raises:
        ChoiceError: no notebook, or no knob of that name.
        SizesError: a value that the knob does not take.
    """
    own = {part.name: part.knobs() for part in parts}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in own}
    for setting in given:
        target, equals, text = setting.partition("=")
        notebook, _, key = target.strip().rpartition(".")
        named = [name for name in own if notebook in ("", name)]
        takers = [name for name in named if key in own[name]]
        if not equals or not takers:
            known = ", ".join(sorted({knob for name in named for knob in own[name]})) or "none"
            raise ChoiceError(
                f"{setting!r} sets no knob: write name=value or notebook.name=value; known: {known}"
            )
        for name in takers:
            chosen[name][key] = own[name][key].parsed(text, f"{name}: {key}")
    return chosen


def run(
    parts: Sequence[Part], values: Mapping[str, Mapping[str, Any]], *, fresh: bool = False
) -> bool:
    """Run notebooks; those whose copy is newer than all that it was made from are kept.

    Args:
        values: of knobs, by notebook.

    Returns:
        Whether one failed; its copy has what it showed before, and the error.
    """
    copies().mkdir(parents=True, exist_ok=True)

    def one(part: Part) -> bool:
        given = values.get(part.name, {})
        if not fresh and is_kept(part, given):
            print(f"{part.name}: unchanged, kept", flush=True)
            return False
        began = time.monotonic()
        error = execute(part, given)
        print(f"{part.name}: {error or 'ok'}, {time.monotonic() - began:.0f} s", flush=True)
        return bool(error)

    with environment(for_kernels()):
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                failed = [*pool.map(one, (part for part in parts if part.only_shows))]
            return any([*failed, *map(one, (part for part in parts if not part.only_shows))])
        except KeyboardInterrupt:
            _kill_children(psutil.Process())
            raise


def is_kept(part: Part, values: Mapping[str, Any]) -> bool:
    """Whether a copy ran to its end with these values, and is newer than what it was made from."""
    if error_of(part.copy) is not None:
        return False
    noted = _read(part.copy).metadata[NOTED]
    code = (path for folder in MADE_FROM for path in (paths.ROOT / folder).rglob("*.*"))
    code = (path for path in code if path.suffix in (".py", ".toml", ".csv"))
    rows = [path for folder in folders(here=False) for path in folder.glob("*.jsonl")]
    newest = max(path.stat().st_mtime for path in (part.notebook, *code, *rows))
    return bool(noted["values"] == dict(values) and noted["began"] > newest)


def execute(part: Part, values: Mapping[str, Any]) -> str | None:
    """Run one notebook into its copy, and give its error in a line, None where it has none."""
    logging.getLogger("papermill").setLevel(logging.ERROR)
    logging.getLogger("traitlets").setLevel(logging.CRITICAL)
    began, error = time.time(), None
    part.copy.unlink(missing_ok=True)
    sockets = tempfile.TemporaryDirectory(prefix="fusedlib-", dir="/tmp")  # paths of 100 characters
    kernel = AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=OwnKernelSpecs(), transport="ipc",
        connection_file=f"{sockets.name}/kernel.json",
    )  # fmt: skip
    try:
        execute_notebook(
            part.notebook, part.copy, dict(values), kernel_name="python3", language="python",
            progress_bar=False, start_timeout=120, iopub_timeout=OUTPUTS_S, coalesce_streams=True,
            km=kernel, resources={"metadata": {"path": str(part.notebook.parent)}},
        )  # fmt: skip
    except PapermillExecutionError as failure:
        said = (failure.evalue.strip().splitlines() or [""])[0][:300]
        error = f"cell {failure.cell_index + 1}: {failure.ename}: {said}"
    except DeadKernelError:
        error = "the kernel died: it was killed, ran out of memory or crashed"
    finally:
        # Rows are on the disk, and taking torch apart takes a second.
        if process := getattr(kernel.provisioner, "process", None):
            with contextlib.suppress(psutil.NoSuchProcess):
                _kill_children(psutil.Process(process.pid))
            process.kill()
            process.wait()
        sockets.cleanup()
    copy = remove_error_markers(_read(part.copy if part.copy.exists() else part.notebook))
    copy.metadata[NOTED] = {"began": began, "values": dict(values), "error": error}
    write_whole(part.copy, nbformat.writes(copy) + "\n")
    return error


def for_kernels() -> dict[str, str]:
    """What kernels' environment has: our packages importable, our folders as absolute paths.

    Threads of the CPU sleep while they wait for each other, unless told otherwise: a core on which
    something else runs cannot be waited for by spinning.
    """
    search = [*map(str, paths.PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(search),
        "FUSEDLIB_RESULTS": str(paths.results_dir().absolute()),
        "FUSEDLIB_BUILD": str(paths.build_dir().absolute()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


class OwnKernelSpecs(KernelSpecManager):
    """Knows one kernel: ipykernel in this very Python, whatever the user's home registers."""

    def _kernel_dirs_default(self) -> list[str]:
        return []


def _kill_children(parent: psutil.Process) -> None:
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def error_of(copy: Path) -> str | None:
    """What went wrong with a copy; a text too where there is none."""
    if not copy.exists():
        return f"not executed yet; `make report ONLY={copy.stem}` does it"
    error: str | None = _read(copy).metadata.get(NOTED, {}).get("error", "stopped before its end")
    return error


def _read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@contextlib.contextmanager
def recorded_rows() -> Iterator[None]:
    """The repository's rows alone are seen, from a machine that has none; nothing is measured."""
    try:
        with environment({REPLAY: "committed", machines.NAME: "nobody"}):
            machines.key.cache_clear()
            yield
    finally:
        machines.key.cache_clear()
