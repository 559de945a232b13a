"""What `display` and the plots' style emit, and what they refuse."""

import numpy as np
import pandas as pd
import pytest

from press import display, formats, origin, show
from press.plots import Picture
from report_sample import outputs_of
from study import provenance


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (1.2345, "3 ms", "1.23 ms"), (1.9, "2×", "1.9×"), (12345.6, "3 ms", "12,346 ms"),
        (999.96, "4 ms", "1,000 ms"), (0.231, "2%", "23 %"), (1.2e-7, "2", "1.2 × 10⁻⁷"),
        (-3.0e12, "2 FLOP", "−3.0 × 10¹² FLOP"), (0, "3 ms", "0 ms"), (16384, ",d", "16,384"),
        (None, "3 ms", "—"), (float("nan"), "3 ms", "—"), (float("inf"), "3 ms", "∞ ms"),
        (np.float32(2.5), "2 ms", "2.5 ms"), ((1.028, 1.083), "3×", "1.03–1.08×"),
    ],
)  # fmt: skip
def test_a_value_by_its_spec(value, spec: str, text: str) -> None:
    assert formats.formatted(value, spec) == text


def test_table_keeps_strings_and_escapes_html() -> None:
    frame = pd.DataFrame({"a<b": ['1 & "2"', "x\ny"]})
    (output,) = outputs_of(lambda: display.table(frame, caption="c < d", name="t"))
    assert output.data[display.TABLE_MIME]["rows"] == [['1 & "2"'], ["x y"]]
    assert "a&lt;b" in output.data["text/html"] and "c &lt; d" in output.data["text/html"]


def drawn(machine: str, began: str) -> Picture:
    frame = pd.DataFrame({"machine": [machine], "provider": "fused", "model": "a", "ratio": 2.0,
                          "began": began, "commit": "abcdef01"})  # fmt: skip
    return show.bars(frame, "ratio", "model")


def test_a_figure_has_its_tabs_its_data_and_the_days_of_older_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"began": "2026-11-29T01:00", "commit": "abcdef01", "files": provenance.files()}
    monkeypatch.setattr(origin, "recordings", lambda: pd.DataFrame([now]))
    both = {"H200": drawn("H200", "2026-11-23T01:00"), "H100": drawn("H100", now["began"])}
    (output,) = outputs_of(lambda: display.figure(both, "Two.", name="two", topic="kernels"))
    shown = output.metadata.fusedlib
    assert [tab["name"] for tab in shown.tabs] == ["H200", "H100"]
    assert output.data["image/svg+xml"] == shown.tabs[0]["svg"] != shown.tabs[1]["svg"]
    assert shown.caption == "Two. *Older rows: H200 23 Nov, abcdef0.*"
    assert shown.data.splitlines()[0].endswith(",tab") and len(shown.data.splitlines()) == 3
    assert all(tab["alt"] for tab in shown.tabs) and "<script" not in output.data["text/html"]
    (alone,) = outputs_of(lambda: display.figure(drawn("H200", now["began"]), "One.", name="one"))
    assert "tabs" not in alone.metadata.fusedlib and alone.metadata.fusedlib.caption == "One."
