"""What `display` and the plots' style emit, and what they refuse."""

import numpy as np
import pandas as pd
import pytest

from press import display, formats, plots
from report_sample import outputs_of


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


def test_lines_that_begin_at_zero_are_all_in_view():
    """The first panel fixed the axis that all share, and a later panel's points were cut off."""
    points = pd.DataFrame({"x": 1, "y": [1.0, 9.0], "by": "eager", "panel": ["a", "b"]})
    for ax in plots.lines(points, "x", "y", "by", panel="panel", zero=True).figure.axes:
        low, high = ax.get_ylim()
        assert low == 0 and high > 9


def test_error_bars_reach_from_low_to_high() -> None:
    frame = pd.DataFrame({"ms": [10.0, 20.0], "low": [9, 18], "high": [12, 21], "T": [1, 2]})
    shown = plots.bars(frame.assign(by="fused"), "ms", "T", "by", low="low", high="high")
    (bars,) = shown.figure.axes[0].containers[0].lines[2]
    assert [segment[:, 0].tolist() for segment in bars.get_segments()] == [[18, 21], [9, 12]]


def test_bars_show_a_mark_for_each_row_of_another_machine() -> None:
    """Also of a name, a row or a panel that the first machine lacks: a caption names its marks."""
    rows = [("H100", "bf16", "all", "peak"), ("here", "fp32", "all", "peak"),
            ("here", "fp32", "two", "peak"), ("here", "bf16", "all", "time")]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["machine", "by", "plan", "what"]).assign(value=1.0)
    frame["machine"] = pd.Categorical(frame["machine"], ["H100", "here"])
    shown = plots.bars(frame, "value", "plan", "by", panel="what", card="machine")
    marks = [line.get_xdata() for ax in shown.figure.axes for line in ax.lines]
    assert sum(map(len, marks)) == 3
