"""The command line: run notebooks, render the report, look after rows. `make help` lists the uses.

Exit status: 0 all well, 1 a notebook failed, 2 something asked for is wrong or cannot be written,
130 ctrl-C, 143 SIGTERM.
"""

import argparse
import dataclasses
import inspect
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fusedlib.bench import machine as machines
from press import run
from press.pages import ReportError
from study import paths, provenance
from study.errors import SentenceError
from study.files import ResultsError, WriteError, write_whole
from study.run import topics

FRESH = os.environ.get("FRESH", "0") not in ("", "0")
OPTIONS: dict[str, dict[str, Any]] = {
    "only": {"default": "", "help": "only these: names, numbers or paths, separated by commas"},
    "set": {"default": [], "action": "append",
            "help": "a knob: name=value, or notebook.name=value for one notebook"},
    "fresh": {"default": FRESH, "action": "store_true", "help": "measure and run everything anew"},
    "name": {"default": "", "help": "of the recording; default: this code's"},
    "minutes": {"default": 25.0, "type": float, "help": "how long, quickly decided claims first"},
    "dry": {"action": "store_true", "help": "only say what it will take"},
    "packed": {"type": Path, "help": "folder that gets the recording as one file"},
    "write": {"action": "store_true", "help": "put the blocks into README.md"},
}  # fmt: skip
"""Of the commands: each has those that its function takes."""


def main() -> None:
    """Run the command line."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _on_signal)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a folder's name may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(command(sys.argv[1:]))


def _on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """asyncio lets nothing but a KeyboardInterrupt out of a running cell, of SIGTERM too."""
    # Once is enough: tidying up is short and must not be cut off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def command(arguments: Sequence[str]) -> int:
    """Do what the arguments say; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m press", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for do in (list_, run_, report, record, pack, render_, figures, readme_, machine, lab):
        named = commands.add_parser(do.__name__.rstrip("_"), help=(do.__doc__ or "").split("\n")[0])
        named.set_defaults(do=do)
        for option in OPTIONS.keys() & inspect.signature(do).parameters:
            named.add_argument(f"--{option}", **OPTIONS[option])
    given, more = parser.parse_known_args(arguments)
    if given.do is lab:
        given.more = more
    elif more:
        parser.error(f"unknown arguments: {' '.join(more)}")
    try:
        return int(given.do(**{n: one for n, one in vars(given).items() if n != "do"}) or 0)
    except KeyboardInterrupt as stop:
        _complain("stopped; rows measured so far are kept, the next run goes on from there")
        return 128 + next(iter(stop.args), signal.SIGINT)
    except (ReportError, ResultsError, SentenceError, WriteError, PermissionError) as error:
        _complain(str(error))
        return 2


def _complain(text: str) -> None:
    print(f"fusedlib: {text}", file=sys.stderr)


def list_() -> None:
    """The notebooks in their order, their knobs, and the topics."""
    for part in run.guides():
        print(f"{part.name}  {part.title}  ({run.error_of(part.copy) or 'ran'})")
        for name, knob in part.knobs().items():
            print(f"    {name}: {knob.words}, {knob.default}  # {knob.help}")
    print(f"topics, measured by `python -m study NAME`: {', '.join(topics())}")


def run_(only: str, set: Sequence[str], fresh: bool) -> bool:
    """Run the notebooks; those of which nothing changed are kept."""
    return _run(run.select(only), set, fresh)


def report(only: str, set: Sequence[str], fresh: bool) -> bool:
    """Run the notebooks and the paper's sections, then render the report."""
    from press import render

    render.check_ready()
    failed = _run(list(dict.fromkeys([*run.select(only), *run.sections()])), set, fresh)
    render_()
    return failed


def _run(parts: Sequence[Any], settings: Sequence[str], fresh: bool) -> bool:
    values, began = run.settings(parts, settings), time.monotonic()
    with run.environment({"FRESH": str(int(fresh))}):
        failed = run.run(parts, values, fresh=fresh)
    print(f"notebooks: {time.monotonic() - began:.0f} s", flush=True)
    return failed


def record(only: str, name: str, minutes: float, dry: bool, packed: Path | None) -> bool:
    """Measure the full profile as one recording: its name is the card's, its commit this one's."""
    from press import record as recording

    os.environ.setdefault(machines.NAME, machines.card())  # before anything asks for the name
    if not dry:
        recording.check_ready()
    folder = paths.results_dir() / machines.key()
    called = recording.chosen_name(name, folder, machines.describe())
    races = recording.left(recording.races(only.replace(",", " ").split()), called)
    chosen = recording.within(races, minutes)
    print(f"all that is left of the recording {called} on {machines.key()}:")
    print(recording.summary(races))
    print(f"within {minutes:g} minutes:\n{recording.summary(chosen)}", flush=True)
    return not dry and recording.record(chosen, called, minutes, recording.measure, packed)


def pack() -> None:
    """Write the commit, the files' hashes and what is to be recorded into `code.json`."""
    from press import record as recording

    print(f"carry {recording.carry()} beside the code")


def render_() -> None:
    """Render the report again from the executed notebooks."""
    from press import render

    began = time.monotonic()
    if not any(part.copy.exists() for part in run.sections()):
        raise SentenceError("no section of the paper has been executed yet; run `make report`")
    written = render.render(render.sections(), paths.build_dir())
    print(f"rendered in {time.monotonic() - began:.1f} s")
    for path in written:
        print(f"  {path.absolute()}\n  {path.absolute().as_uri()}")
    print(f"  executed notebooks: {run.copies().absolute()}")


def figures() -> None:
    """Draw the paper's figures, with their data, into `figures/` from the recorded rows."""
    from press import render

    with (
        tempfile.TemporaryDirectory(prefix="fusedlib-executed-") as folder, run.recorded_rows(),
        run.environment({"FUSEDLIB_BUILD": folder}),
    ):  # fmt: skip
        if run.run(run.sections(), {}):
            raise ReportError("a section cannot be shown from the recorded rows; see above")
        files = render.figures(run.copies())
    written = [write_whole(render.FIGURES / name, text) for name, text in files.items()]
    for gone in {*render.FIGURES.iterdir()} - {*written}:
        gone.unlink()
    print("\n".join(str(path.relative_to(paths.ROOT)) for path in written))


def readme_(write: bool) -> None:
    """Print the README with its blocks of numbers from the recorded rows."""
    from press import readme

    path = paths.ROOT / "README.md"
    with run.recorded_rows():
        text = readme.updated(path.read_text(encoding="utf-8"))
    if write:
        write_whole(path, text)
    else:
        print(text)


def machine() -> None:
    """What a row says about this machine, as JSON."""
    commit, dirty = provenance.commit()
    facts = dataclasses.asdict(machines.describe()) | {"commit": commit, "dirty": dirty}
    print(json.dumps(facts, indent=2, ensure_ascii=False))


def lab(more: Sequence[str]) -> None:
    """Open JupyterLab on the first notebook, with this Python as the kernel of all."""
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for copy in (part.copy for part in run.select() if part.copy.exists()):
        notary.sign(nbformat.read(copy, as_version=4))  # Lab shows SVG of trusted notebooks only
    notary.store.close()
    words = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={paths.ROOT}"]
    words += [f"--ServerApp.kernel_spec_manager_class={run.__name__}.OwnKernelSpecs"]
    first = run.guides()[0].notebook.relative_to(paths.ROOT)
    rights = ["--allow-root"] if os.geteuid() == 0 else []  # as in a container
    words += [f"--LabApp.default_url=/lab/tree/{first}", *rights, *more]
    os.execve(sys.executable, words, {**os.environ, **run.for_kernels()})
