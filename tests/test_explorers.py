"""What a reader may choose in JupyterLab: a choice without rows says so, in place of an error."""

import json
from functools import partial
from itertools import product

import pytest

from press import display, replay, style
from press.running import config
from report_sample import outputs_of

STUDIES = {study.name: study for study in config.load().studies}
MOST = 60  # of the combinations of one explorer


def analysed(notebook):
    with replay.recorded_rows():
        return replay.analysis_of(notebook)


def printed(analysis):
    shown = [o for cell in analysis.notebook.cells for o in cell.get("outputs", [])]
    return [o["data"]["text/markdown"] for o in shown if "text/markdown" in o["data"]]


@pytest.mark.parametrize("study", ["01_warmup", "04_memory", "08_profile"])
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


@pytest.mark.parametrize(
    ("widths", "words"),
    [("[7]", "heads 7 wide were not measured: figures show heads 64 wide"),
     ("[]", "no width is asked for: figures show heads 64 wide")],
)  # fmt: skip
def test_a_width_without_rows_is_named_and_another_shown(tmp_path, widths, words):
    notebook = json.loads(STUDIES["07_attention"].notebook.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            source = "".join(cell["source"])
            assert "widths: list[int] = [64, 16]" in source
            cell["source"] = source.replace("widths: list[int] = [64, 16]", f"widths = {widths}")
    changed = tmp_path / "07_attention.ipynb"
    changed.write_text(json.dumps(notebook), encoding="utf-8")
    assert any(words in text for text in printed(analysed(changed)))
