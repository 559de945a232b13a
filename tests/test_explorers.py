"""What a reader may choose: each documented value of a knob, other choices, this machine's rows."""

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, get_args, get_origin

import nbformat
import pytest

from fusedlib.bench import machine as machines
from measure.recording import paths
from press import replay, style
from press.analysis import NoRowsError
from press.claims import Claim
from press.rows import Rows
from press.running import config, parameters
from report_sample import outputs_of

LOADED = config.load()
STUDIES = {study.name: study for study in LOADED.studies if study.measure}
MOST = 8  # of the combinations that a cell may explore
MACHINES = "nvidia-h200", "nvidia-h100"


@pytest.fixture(autouse=True)
def nothing_but_what_is_drawn(monkeypatch):
    """Claims are evaluated by `tests/test_report_paper.py`; none reads a knob."""
    monkeypatch.setattr(style, "svg", lambda fig: "<svg></svg>")
    monkeypatch.setattr(Claim, "evaluate_all", lambda claim: None)


def recorded_on(study: str) -> str:
    """The first of the machines that has rows of a study."""
    return next(m for m in MACHINES if any((paths.RECORDED / m).glob(f"*/{study}.jsonl")))


def replayed(name: str, notebook) -> replay.Analysis:
    """A changed notebook, over the repository's rows."""
    with tempfile.TemporaryDirectory() as folder, replay.recorded_rows():
        path = Path(folder) / f"{name}.ipynb"
        nbformat.write(notebook, path)
        return replay.analysis_of(path)


class Every:
    """In place of the first choice some of all, each of which is drawn or has no rows."""

    def __init__(self, rows: Rows, *menus: str) -> None:
        every = list(product(*(rows[name].dropna().unique() for name in menus)))
        self._chosen = [dict(zip(menus, values, strict=True)) for values in every]
        self._rows, self.drawn = rows, 0

    def __getattr__(self, verb: str):
        def draw(*args, **options):
            for chosen in self._chosen[:: -(-len(self._chosen) // MOST)]:
                try:
                    rows = self._rows.of(**chosen)
                    assert outputs_of(partial(getattr(rows, verb), *args, **options))
                    self.drawn += 1
                except NoRowsError:  # not every combination was measured
                    continue
            assert self.drawn

        return draw


@pytest.mark.parametrize("study", STUDIES)
def test_every_choice_and_this_machine_s_own_rows_are_drawn(monkeypatch, study):
    """On a machine that measured all of the full profile, as recorded machines did.

    A rival that was not measured at a shape gave an IndexError of pandas, and the cell "This
    machine" merged rows of several directions, which a small profile did not have.
    """
    monkeypatch.setattr(Rows, "explore", lambda rows, *menus: Every(rows, *menus))
    monkeypatch.setattr(replay, "LIVE", "not left out")
    notebook = nbformat.read(STUDIES[study].notebook, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells
        if "live" not in cell.metadata.get("tags", []) or "this machine" in cell.source
    ]  # fmt: skip
    monkeypatch.setattr(machines, "key", lambda: recorded_on(study))
    analysis = replayed(study, notebook)
    [own] = [cell for cell in analysis.notebook.cells if 'shown="this machine"' in cell.source]
    assert own.outputs


@pytest.mark.parametrize("part", (*STUDIES.values(), *LOADED.guides), ids=lambda part: part.name)
def test_every_documented_value_of_a_knob_is_drawn(part):
    """All knobs at their second values, then at their third, and so on.

    `direction="backward"` in 03 drew QuACK alone and then raised a KeyError.
    """
    choices = {
        name: [value for value in get_args(knob.kind) if repr(value) != knob.default]
        for name, knob in parameters.knobs(part).items() if get_origin(knob.kind) is Literal
    }  # fmt: skip
    for at in range(max(map(len, choices.values()), default=0)):
        chosen = {name: values[min(at, len(values) - 1)] for name, values in choices.items()}
        notebook = nbformat.read(part.notebook, as_version=4)
        [cell] = [c for c in notebook.cells if parameters.TAG in c.metadata.get("tags", [])]
        cell.source += "".join(f"\n{name} = {value!r}" for name, value in chosen.items())
        try:
            replayed(part.name, notebook)
        except NoRowsError as error:  # each was measured, and not all together
            assert sum(str(value) in str(error) for value in chosen.values()) > 1
