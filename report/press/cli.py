"""The command line: run notebooks, render the report, look after rows. `make help` lists the uses.

Exit status: 0 all well, 1 a notebook failed, 2 something asked for is wrong or cannot be written,
130 ctrl-C, 143 SIGTERM.
"""

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from press.pages import ReportError
from study import paths
from study.errors import SentenceError
from study.files import ResultsError, WriteError, write_whole

_EXPECTED = ReportError, ResultsError, SentenceError, WriteError, PermissionError


class _Commands(TyperGroup):
    """Turns what is bound to go wrong in a command into one clear message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            _give_home()
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            _complain("stopped; rows measured so far are kept, the next run goes on from there")
            raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None
        except _EXPECTED as error:
            _complain(str(error))
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="Measure, execute the notebooks, render the report.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Only = Annotated[str, typer.Option(help="only these: names, numbers or paths, separated by commas")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="a knob: name=value, or notebook.name=value for one notebook"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", envvar="FRESH", help="measure and run everything anew")
]


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _on_signal)
    signal.signal(signal.SIGINT, _on_signal)
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: a folder's name may be any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    app()


class _Terminated(KeyboardInterrupt):
    """SIGTERM. asyncio lets nothing but a KeyboardInterrupt out of a running cell."""


def _on_signal(number: int, frame: FrameType | None) -> NoReturn:
    # Once is enough: tidying up is short and must not be cut off.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _give_home() -> None:
    """A user without HOME and without an entry in passwd, as in a container, gets one here.

    Jupyter's packages cannot be imported where there is none.
    """
    try:
        Path.home()
    except RuntimeError:
        home = paths.build_dir().absolute() / "home"
        os.environ["HOME"] = str(home)
        _complain(f"HOME is not set and this user has no home; it is {home} for this run")


def _complain(text: str) -> None:
    print(f"fusedlib: {text}", file=sys.stderr)


@app.command("list")
def list_() -> None:
    """The notebooks in their order, their knobs, and the topics."""
    from press import run
    from press.knobs import in_words
    from study.run import topics

    for part in run.guides():
        print(f"{part.name}  {part.title}  ({_last(part)})")
        for name, knob in part.knobs().items():
            print(f"    {name}: {in_words(knob.kind)}, {knob.default}  # {knob.help}")
    print(f"topics, measured by `python -m study NAME`: {', '.join(topics())}")


def _last(part: Any) -> str:
    from press import run

    return run.error_of(part.copy) or "ran"


@app.command("run")
def run_(only: Only = "", settings: Settings = None, fresh: Fresh = False) -> None:
    """Run the notebooks; those of which nothing changed are kept."""
    from press import run

    raise typer.Exit(_run(run.select(only), settings, fresh))


@app.command()
def report(only: Only = "", settings: Settings = None, fresh: Fresh = False) -> None:
    """Run the notebooks and the paper's sections, then render the report."""
    from press import render, run

    render.check_ready()
    failed = _run(list(dict.fromkeys([*run.select(only), *run.sections()])), settings, fresh)
    render_()
    raise typer.Exit(failed)


def _run(parts: Sequence[Any], settings: Sequence[str] | None, fresh: bool) -> bool:
    from press import run

    values = run.settings(parts, settings or [])
    began = time.monotonic()
    with run.environment({"FRESH": "1" if fresh else None}):
        failed = run.run(parts, values, fresh=fresh)
    print(f"notebooks: {time.monotonic() - began:.0f} s", flush=True)
    return failed


@app.command()
def record(
    only: Only = "",
    name: Annotated[str, typer.Option(help="of the recording; default: this code's")] = "",
    minutes: Annotated[float, typer.Option(help="how long, the claims of least time first")] = 25.0,
    dry: Annotated[bool, typer.Option("--dry", help="only say what it will take")] = False,
    packed: Annotated[
        Path | None, typer.Option(help="folder that gets the recording as one file")
    ] = None,
) -> None:  # fmt: skip
    """Measure the full profile as one recording: its name is the card's, its commit this one's."""
    from fusedlib.bench import machine as machines
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
    if not dry:
        raise typer.Exit(recording.record(chosen, called, minutes, recording.measure, packed))


@app.command()
def pack() -> None:
    """Write the commit, the files' hashes and what is to be recorded into `code.json`."""
    from press import record as recording

    print(f"carry {recording.carry()} beside the code")


@app.command("render")
def render_() -> None:
    """Render the report again from the executed notebooks."""
    from press import render, run

    began = time.monotonic()
    if not any(part.copy.exists() for part in run.sections()):
        raise SentenceError("no section of the paper has been executed yet; run `make report`")
    written = render.render(render.sections(), paths.build_dir())
    print(f"rendered in {time.monotonic() - began:.1f} s")
    _print_links(written)
    print(f"  executed notebooks: {run.copies().absolute()}")


@app.command()
def figures() -> None:
    """Draw the paper's figures, with their data, into `figures/` from the recorded rows."""
    from press import render, run

    with _executed_on_recordings():
        files = render.figures(run.copies())
        written = [write_whole(render.FIGURES / name, text) for name, text in files.items()]
        for gone in {*render.FIGURES.iterdir()} - {*written}:
            gone.unlink()
    print("\n".join(str(path.relative_to(paths.ROOT)) for path in written))


@app.command("readme")
def readme_(
    write: Annotated[bool, typer.Option("--write", help="put the blocks into README.md")] = False,
) -> None:
    """Print the README with its blocks of numbers from the recorded rows."""
    from press import readme, run

    path = paths.ROOT / "README.md"
    with run.recorded_rows():
        text = readme.updated(path.read_text(encoding="utf-8"))
    if write:
        write_whole(path, text)
    else:
        print(text)


@contextlib.contextmanager
def _executed_on_recordings() -> Iterator[None]:
    """The sections as they execute on the repository's rows alone, in a folder of their own.

    Raises:
        ReportError: one of them fails.
    """
    from press import run

    with (
        tempfile.TemporaryDirectory(prefix="fusedlib-executed-") as folder,
        run.recorded_rows(),
        run.environment({"FUSEDLIB_BUILD": folder}),
    ):
        if run.run(run.sections(), {}):
            raise ReportError("a section cannot be shown from the recorded rows; see above")
        yield


@app.command()
def machine() -> None:
    """What a row says about this machine, as JSON."""
    from fusedlib.bench import machine as machines
    from study import provenance

    commit, dirty = provenance.commit()
    facts = dataclasses.asdict(machines.describe()) | {"commit": commit, "dirty": dirty}
    print(json.dumps(facts, indent=2, ensure_ascii=False))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Open JupyterLab on the first notebook, with this Python as the kernel of all."""
    from press import run

    _trust(run.copies())
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={paths.ROOT}"]
    command += [f"--ServerApp.kernel_spec_manager_class={run.__name__}.OwnKernelSpecs"]
    first = run.guides()[0].notebook.relative_to(paths.ROOT)
    rights = ["--allow-root"] if os.geteuid() == 0 else []  # as in a container
    command += [f"--LabApp.default_url=/lab/tree/{first}", *rights, *context.args]
    os.execve(sys.executable, command, {**os.environ, **run.for_kernels()})


def _trust(folder: Path) -> None:
    """Sign the executed copies in a folder: JupyterLab shows SVG of trusted notebooks only.

    A notebook that lies there besides, which we did not run, stays as it is.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    from press.run import NOTED

    notary = NotebookNotary()
    for copy in folder.glob("*.ipynb"):
        notebook = nbformat.read(copy, as_version=4)
        if NOTED in notebook.metadata:
            notary.sign(notebook)
    notary.store.close()


def _print_links(written: Sequence[Path]) -> None:
    print("\n".join(f"  {path.absolute()}\n  {path.absolute().as_uri()}" for path in written))
