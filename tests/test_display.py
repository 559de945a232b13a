"""What `display` and the plots' style emit, and what they refuse."""

import numpy as np
import pandas as pd
import pytest

from press import display, formats, plots, show
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


def test_bars_show_a_mark_for_each_row_of_another_machine() -> None:
    """Also of a name, a row or a panel that the first machine lacks: a caption names its marks."""
    rows = [("H200", "bf16", "all", "peak"), ("H100", "fp32", "all", "peak"),
            ("H100", "fp32", "two", "peak"), ("H100", "bf16", "all", "time")]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["machine", "by", "plan", "what"]).assign(value=1.0)
    shown = show.bars(frame, "value", "plan", "by", panel="what")
    marks = [line.get_xdata() for ax in shown.figure.axes for line in ax.lines]
    assert sum(map(len, marks)) == 3


def test_lines_of_dots_reach_from_low_to_high() -> None:
    frame = pd.DataFrame({"ratio": [2.0, 3.0], "low": [1.8, 3], "high": [2.5, 3.5], "by": "fused",
                          "of": ["a", "b"], "machine": pd.Categorical(["H200"] * 2)})  # fmt: skip
    shown = plots.points(
        frame, "ratio", "of", "by", low="low", high="high", reference=1.0, spec="3×", logx=True,
        xlabel="times", card="machine", height=2.0,
    )  # fmt: skip
    (lines,) = shown.figure.axes[0].containers[0].lines[2]
    drawn = [segment[:, 0].tolist() for segment in lines.get_segments()]
    assert drawn == [pytest.approx([1.8, 2.5]), pytest.approx([3.0, 3.5])]
