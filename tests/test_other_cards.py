"""A card that somebody else recorded stands beside ours, and is judged by nothing of theirs."""

import json
from collections.abc import Iterator

import pandas as pd
import pytest

from press import display, factors, run, say
from report_sample import outputs_of
from study import end_to_end, rows

SECTIONS = [part for part in run.sections() if "figure(" in part.notebook.read_text("utf-8")]
PLAIN = ("eager", "huggingface")


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The H200's rows once more, as an L4's: five times as long, but for plain PyTorch."""
    real = rows.load

    def load(topic: str, **how: bool) -> pd.DataFrame:
        frame = real(topic, **how)
        own = frame[frame["machine"] == "H200"]
        times = [name for name in own if name.endswith("_ms") and own[name].dtype.kind == "f"]
        slow = own[times].mul((~own["provider"].isin(PLAIN)).map({True: 5.0, False: 1.0}), axis=0)
        samples = {name: None for name in own if "samples" in name}
        own = own.assign(machine="L4", **samples, **slow)
        return pd.concat([frame, own], ignore_index=True).copy()

    with run.recorded_rows():
        for module in (rows, factors):
            monkeypatch.setattr(module, "load", load)
        yield


@pytest.mark.usefixtures("stranger")
@pytest.mark.parametrize("section", SECTIONS, ids=[part.name for part in SECTIONS])
def test_each_figure_has_its_tab(section, monkeypatch):
    monkeypatch.setattr(say, "say", lambda *names: None)
    cells = json.loads(section.notebook.read_text("utf-8"))["cells"]
    source = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    outputs = outputs_of(lambda: exec(compile(source, section.name, "exec"), {}))
    figures = [o.metadata.fusedlib for o in outputs if o.metadata.fusedlib.kind == "figure"]
    assert figures
    for figure in figures:
        assert [tab["name"] for tab in figure.tabs] == ["H200", "H100", "L4"], figure.name
        assert "nothing" not in figure.tabs[-1]["alt"].lower()
    tables = [o.data[display.TABLE_MIME] for o in outputs if display.TABLE_MIME in o.data]
    assert all(table["rows"] for table in tables)


@pytest.mark.usefixtures("stranger")
def test_a_verdict_is_over_the_columns_that_are_shown():
    found = factors.factors()
    assert factors.cards(found) == ["H200", "H100", "L4"]
    compared = found[found["verdict"].isin(factors.VERDICTS[:4])]
    for one in compared.to_dict("records"):
        shown = [one[card] for card in factors.cards(found) if not isinstance(one[card], float)]
        ends = pd.Series([end for pair in shown for end in pair])
        assert factors.verdict(one["published"], ends, "") == one["verdict"], one["what"]
    varies = compared[compared["verdict"] == "varies"]
    assert len(compared) > 10 and varies["L4"].notna().all() and len(varies) > 6
    assert " on the L4. " in factors.counted(found)


def test_a_card_without_a_data_sheet_here_is_judged_by_none():
    """An H100 on PCIe has 51 TFLOP/s in fp32, where one on SXM has 67."""
    with run.recorded_rows():
        claim = say.evaluate("kernels/fp32-rates")
        [*_, (_, of_set, part)] = claim.sets()
        models = rows.load("end_to_end").query("machine == 'H100'")
    assert claim.answer(of_set, part).holds
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL",
                 "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):  # fmt: skip
        assert claim.answer(of_set, part.assign(device_name=name)).holds is None, name
        derived = end_to_end.derive(models.assign(device_name=name))
        assert models["mfu"].notna().any() and not derived["mfu"].eq(models["mfu"]).any()
