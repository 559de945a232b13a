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

from measure.recording import paths
from measure.recording.files import WriteError, write_whole
from measure.recording.results import ResultsError
from measure.study import SizesError
from press.pages import ReportError
from press.running import config as configs
from press.running import products
from press.running.config import Config, ConfigError
from press.running.products import check_writable, copy_path

_EXPECTED = ConfigError, ReportError, ResultsError, SizesError, WriteError, PermissionError


class _Commands(TyperGroup):
    """Turns what is bound to go wrong in a command into one clear message."""

    def invoke(self, ctx: Any) -> Any:
        try:
            _check_docstrings()
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

Profile = Annotated[str, typer.Option(help="auto, quick or full")]
Only = Annotated[str, typer.Option(help="only these notebooks, separated by commas")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="name=value or notebook.name=value, over the study file's"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", envvar="FRESH", help="measure and run everything anew")
]
StudyFile = Annotated[
    Path | None, typer.Option("--config", help="study file; default notebooks/study.toml")
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


def _check_docstrings() -> None:
    """A claim's sentence is its rule's docstring, and how a rival is set the first line of its."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            "this Python leaves docstrings out, and with them the claims' sentences: it runs with "
            "-OO or PYTHONOPTIMIZE=2. Run it without (unset PYTHONOPTIMIZE)"
        )


def _give_home() -> None:
    """A user without HOME and without an entry in passwd gets a home among the products.

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
def list_(config: StudyFile = None) -> None:
    """The notebooks in their order, what they ask, and their parameters."""
    from measure.study import kind_in_words
    from press.running import parameters

    for study in configs.load(config).studies:
        state = products.read_metadata(copy_path(study.name))
        last = f"{state['status']}, {state['profile']}" if state else "not run yet"
        print(f"{study.name}  {study.title}  ({last})\n    {study.question}")
        for name, parameter in parameters.settable(study).items():
            values = {profile: study.profiles[profile] for profile in configs.PROFILES}
            given = [
                f"{profile} {repr(own[name]) if name in own else parameter.default}"
                for profile, own in values.items()
            ]
            kind = kind_in_words(parameter.kind)
            print(f"    {name}: {kind}  {', '.join(given)}  # {parameter.help}")


@app.command()
def run(
    profile: Profile = configs.AUTO, only: Only = "", settings: Settings = None,
    fresh: Fresh = False, config: StudyFile = None,
) -> None:  # fmt: skip
    """Run the notebooks; those of which nothing changed are kept."""
    raise typer.Exit(_run(configs.load(config), profile, only, settings, fresh, frame=False))


@app.command()
def report(
    profile: Profile = configs.AUTO, only: Only = "", settings: Settings = None,
    fresh: Fresh = False, config: StudyFile = None,
) -> None:  # fmt: skip
    """Run the notebooks, then render the report."""
    from press import render

    render.check_ready()
    failed = _run(configs.load(config), profile, only, settings, fresh, frame=True)
    render_(config)
    raise typer.Exit(failed)


@app.command()
def record(
    only: Only = "", config: StudyFile = None,
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

    loaded = configs.load(config)
    os.environ.setdefault(machines.NAME, machines.card())  # before anything asks for the name
    if not dry:
        recording.check_ready()
    folder = paths.results_dir() / machines.key()
    facts = machines.describe()
    called = recording.chosen_name(name, folder, facts)
    units = recording.left(recording.units(loaded, _names(only)), folder / called)
    chosen = recording.within(units, minutes)
    print(f"all that is left of the recording {called} on {machines.key()}:")
    print(recording.summary(units))
    print(f"within {minutes:g} minutes:\n{recording.summary(chosen)}", flush=True)
    if not dry:
        raise typer.Exit(recording.record(chosen, called, minutes, recording.measure, packed))


@app.command(hidden=True)
def measure(study: str, cases: Path, until: float) -> None:
    """Measure those cases of a study, at the profile `full`, whose ids stand in a file; from
    `until`, in seconds since 1970, none begins.
    """
    from measure import study as studies
    from measure.recording.results import Recorder
    from study import run as topics

    only = set(cases.read_text(encoding="utf-8").split())
    if study in topics.topics():
        topics.run(study, "full", until=until, only=only, device="cuda")
        return
    one = studies.load(study)
    recorder = Recorder(one.name, profile="full", only=only, until=until)
    one.measure(studies.full_sizes(one), recorder)


@app.command()
def pack(config: StudyFile = None) -> None:
    """Write the commit, the files' hashes and what is to be recorded into `code.json`."""
    from press import record as recording

    print(f"carry {recording.carry(configs.load(config))} beside the code")


@app.command("render")
def render_(config: StudyFile = None) -> None:
    """Render the report again from the executed notebooks."""
    from press import render

    began = time.monotonic()
    build = paths.build_dir()
    check_writable(build)
    sections = render.sections(configs.load(config), build)
    if sections[-1].notebook is None:
        raise ConfigError("the report's frame has not been executed yet; run `make report`")
    written = render.render(sections, build)
    print(f"rendered in {time.monotonic() - began:.1f} s")
    _print_links(written)
    print(f"  executed notebooks: {(build / 'notebooks').absolute()}")


@app.command()
def figures(only: Only = "", config: StudyFile = None) -> None:
    """Draw the paper's figures, with their data, into `figures/` from the recorded rows, and write
    the linked numbers in the notebooks' Markdown anew, but for chosen notebooks, whose text may
    link to others.
    """
    from press import headlines, render, words

    loaded = configs.load(config)
    with _executed_on_recordings(loaded, _names(only)) as folder:
        files = render.figures(folder)
        numbers = words.numbers_of(headlines.read_claims(folder))
    written = [write_whole(render.FIGURES / name, text) for name, text in files.items()]
    if not only:
        for gone in {*render.FIGURES.iterdir()} - {*written}:
            gone.unlink()
        for path, text in words.rewritten_all(loaded, numbers).items():
            written.append(write_whole(path, text))
    print("\n".join(str(path.relative_to(paths.ROOT)) for path in written))


@app.command("slides")
def slides_() -> None:
    """Make the slides, `slides.html` and `slides.pdf`, from the recorded rows."""
    from press import render

    check_writable(paths.build_dir())
    render.check_ready()
    with _executed_on_recordings(configs.load()) as folder:
        written = render.slides(folder, paths.build_dir())
    _print_links(written)


@app.command("readme")
def readme_(
    write: Annotated[bool, typer.Option("--write", help="put the block into README.md")] = False,
) -> None:
    """Print the README's block of claims, from the recorded rows."""
    from press import headlines

    with _executed_on_recordings(configs.load()) as folder:
        block = headlines.readme_block_of(folder)
    path = paths.ROOT / "README.md"
    if write:
        write_whole(path, headlines.updated_readme(path.read_text(encoding="utf-8"), block))
    else:
        print(block)


@contextlib.contextmanager
def _executed_on_recordings(config: Config, only: Sequence[str] = ()) -> Iterator[Path]:
    """A folder of products with the notebooks as they execute on the repository's rows alone."""
    # Before torch is there: what a notebook trains is tiny, and two threads wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from press import replay

    with tempfile.TemporaryDirectory(prefix="fusedlib-executed-") as name:
        replay.executed(config, Path(name), only)
        yield Path(name)


@app.command()
def machine() -> None:
    """What a row says about this machine, as JSON."""
    from fusedlib.bench import machine as machines
    from measure.recording import provenance

    commit, dirty = provenance.commit()
    facts = dataclasses.asdict(machines.describe()) | {"commit": commit, "dirty": dirty}
    print(json.dumps(facts, indent=2, ensure_ascii=False))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lab(context: typer.Context) -> None:
    """Open JupyterLab on the first notebook, with this Python as the kernel of all."""
    from press.running import kernel

    _trust(paths.build_dir() / "notebooks")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={paths.ROOT}"]
    command += [f"--ServerApp.kernel_spec_manager_class={kernel.__name__}.OwnKernelSpecs"]
    loaded = configs.load()
    first = (*loaded.guides, *loaded.studies)[0].notebook.relative_to(paths.ROOT)
    rights = ["--allow-root"] if os.geteuid() == 0 else []  # as in a container
    command += [f"--LabApp.default_url=/lab/tree/{first}", *rights, *context.args]
    os.execve(sys.executable, command, {**os.environ, **kernel.variables()})


def _trust(folder: Path) -> None:
    """Sign the executed copies in a folder: JupyterLab shows SVG of trusted notebooks only.

    A notebook that lies there besides, of which our runner noted nothing, stays as it is.
    """
    import nbformat
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for copy in filter(products.read_metadata, folder.glob("*.ipynb")):
        notary.sign(nbformat.read(copy, as_version=4))
    notary.store.close()


def _run(
    config: Config, profile: str, only: str, settings: list[str] | None,
    fresh: bool, *, frame: bool,
) -> bool:  # fmt: skip
    """Run what was asked for; whether anything failed."""
    from press.running import runner
    from press.running.monitor import Monitor

    selected = config.with_details(config.select(_names(only)))
    parts = [*selected, *([config.frame] if frame else [])]
    chosen, why = configs.choose_profile(profile)
    jobs = runner.jobs(parts, settings or [], chosen)
    print(f"profile {chosen}: {why}", flush=True)
    began = time.monotonic()
    outcomes = runner.run(jobs, Monitor(len(jobs)), fresh=fresh)
    width = max(len(outcome.name) for outcome in outcomes)
    for outcome in outcomes:
        took = f"{outcome.seconds:.1f} s" if outcome.status != "kept" else "unchanged"
        print(f"{outcome.name:{width}}  {outcome.status:6}  {took:>10}  {outcome.copy}")
        if outcome.error:
            print(f"{'':{width}}  {outcome.error}")
    print(f"notebooks: {time.monotonic() - began:.0f} s", flush=True)
    return any(outcome.status == "failed" for outcome in outcomes)


def _names(only: str) -> list[str]:
    return only.replace(",", " ").split()


def _print_links(written: Sequence[Path]) -> None:
    print("\n".join(f"  {path.absolute()}\n  {path.absolute().as_uri()}" for path in written))
