"""What a reader may choose in JupyterLab: a choice without rows says so, in place of an error."""

import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import nbformat
import pytest

from fusedlib.bench import machine as machines
from measure.recording import paths
from press import display, replay, style
from press.running import config
from report_sample import outputs_of

STUDIES = {study.name: study for study in config.load().studies}
MOST = 60  # of the combinations of one explorer


def analysed(notebook):
    with replay.recorded_rows():
        return replay.analysis_of(notebook)


@pytest.mark.parametrize("study", ["04_memory", "08_profile"])
def test_every_choice_shows_something(monkeypatch, study):
    """A rival that was not measured at a shape gave an IndexError of pandas."""
    silent, chosen = [], []

    def all_choices(show, **choices):
        every = list(product(*choices.values()))
        for values in every[:: -(-len(every) // MOST)]:
            given = dict(zip(choices, values, strict=True))
            chosen.append(given)
            if not outputs_of(partial(show, **given)):
                silent.append(given)

    monkeypatch.setattr(style, "svg", lambda fig: "<svg></svg>")
    monkeypatch.setattr(display, "explore", all_choices)
    analysed(STUDIES[study].notebook)
    assert chosen and not silent


ON_VERBS = [n for n, s in STUDIES.items() if "press.rows import" in s.notebook.read_text("utf-8")]
MEASURED = [
    (name, machine) for name in ON_VERBS for machine in ("nvidia-h200", "nvidia-h100")
    if any((paths.RECORDED / machine).glob(f"*/{name}.jsonl"))
]  # fmt: skip


@pytest.mark.parametrize(("study", "machine"), MEASURED)
def test_every_choice_and_this_machine_s_own_rows_are_drawn(monkeypatch, study, machine):
    """On a machine that measured all of the full profile, as recorded machines did.

    The cell "This machine" merged rows of several directions, which a small profile did not have.
    """
    chosen = []

    def all_choices(show, **choices):
        every = list(product(*choices.values()))
        for values in every[:: -(-len(every) // MOST)]:
            chosen.append(values)
            assert outputs_of(partial(show, **dict(zip(choices, values, strict=True))))

    monkeypatch.setattr(style, "svg", lambda fig: "<svg></svg>")
    monkeypatch.setattr(display, "explore", all_choices)
    monkeypatch.setattr(replay, "LIVE", "not left out")
    notebook = nbformat.read(STUDIES[study].notebook, as_version=4)
    notebook.cells = [
        cell for cell in notebook.cells
        if "live" not in cell.metadata.get("tags", []) or "this machine" in cell.source
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"{study}.ipynb"
        nbformat.write(notebook, path)
        with replay.recorded_rows():
            monkeypatch.setattr(machines, "key", lambda: machine)
            analysis = replay.analysis_of(path)
    assert chosen
    [own] = [cell for cell in analysis.notebook.cells if 'shown="this machine"' in cell.source]
    assert own.outputs
