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
MOST = 30  # of the combinations of one explorer
MACHINES = "nvidia-h200", "nvidia-h100"


def recorded_on(study: str) -> str:
    """The first of the machines that has rows of a study."""
    return next(m for m in MACHINES if any((paths.RECORDED / m).glob(f"*/{study}.jsonl")))


@pytest.mark.parametrize("study", STUDIES)
def test_every_choice_and_this_machine_s_own_rows_are_drawn(monkeypatch, study):
    """On a machine that measured all of the full profile, as recorded machines did.

    A rival that was not measured at a shape gave an IndexError of pandas, and the cell "This
    machine" merged rows of several directions, which a small profile did not have.
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
            monkeypatch.setattr(machines, "key", lambda: recorded_on(study))
            analysis = replay.analysis_of(path)
    assert chosen
    [own] = [cell for cell in analysis.notebook.cells if 'shown="this machine"' in cell.source]
    assert own.outputs
