"""What `display` and the plots' style emit, and what they refuse."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from press import display, formats, plots, style
from report_sample import curves, narrow, outputs_of, wide


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


def test_table_json_of_plain_frame() -> None:
    content = display.table_json(narrow())
    assert content["columns"] == [["Sum"], ["Published"], ["Measured"]]
    assert content["stub"] == 0
    assert content["align"] == ["left", "right", "right"]
    assert content["rows"] == [["fp32", "10.00", "10.00"], ["fp16", "9.953", "—"]]
    json.dumps(content)


def test_table_json_of_groups_names_a_row_group_once() -> None:
    content = display.table_json(wide(2, 5))
    assert content["columns"][:3] == [["", "Model"], ["", "Warm-up"], ["Forward, ms", "published"]]
    assert content["stub"] == 2
    assert [row[0] for row in content["rows"]] == ["small", "", "", "", "medium"]


def test_table_keeps_strings_and_escapes_html() -> None:
    frame = pd.DataFrame({"a<b": ['1 & "2"', "x\ny"]})
    (output,) = outputs_of(lambda: display.table(frame, caption="c < d", name="t"))
    assert output.data[display.TABLE_MIME]["rows"] == [['1 & "2"'], ["x y"]]
    assert "a&lt;b" in output.data["text/html"] and "c &lt; d" in output.data["text/html"]


@pytest.mark.parametrize("bad", ["", "Name", "a b", "a--b", "ä", "-a"])
def test_bad_names_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters, digits"):
        display.table(narrow(), caption="c", name=bad)


@pytest.mark.parametrize("caption,alt", [("", "a"), (" ", "a"), ("c", "")])
def test_figures_need_caption_and_alternative_text(caption: str, alt: str) -> None:
    with pytest.raises(ValueError, match="needs a text as"):
        display.figure(Figure(), caption=caption, alt=alt, name="f")


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="header levels"):
        columns = pd.MultiIndex.from_tuples([("a", "b", "c")])
        display.table(pd.DataFrame([[1]], columns=columns), caption="c", name="t")
    with pytest.raises(ValueError, match="must be a matplotlib Figure"):
        display.figure("no", caption="c", alt="a", name="f")  # type: ignore[arg-type]


def test_a_panel_without_data_says_so():
    fig, (full, bare) = style.new(ncols=2)
    style.line(full, [1, 2], [3, 4], "eager")
    style.reference_line(bare, x=1.0)
    display.figure(fig, caption="c", alt="a", name="f")
    assert [t.get_text() for t in bare.texts] == ["nothing measured"] and not full.texts


def test_axes_that_are_off_say_nothing():
    """Of three panels in a grid of two columns the fourth axes drew "nothing measured"."""
    points = pd.DataFrame({"x": [1, 2, 3], "y": [1.0] * 3, "by": "eager", "panel": list("abc")})
    picture = plots.lines(points, "x", "y", "by", panel="panel")
    display.figure(picture, caption="c", name="f")
    assert len(picture.figure.axes) == 4
    assert not picture.figure.axes[3].texts


def test_lines_that_begin_at_zero_are_all_in_view():
    """The first panel fixed the axis that all share, and a later panel's points were cut off."""
    points = pd.DataFrame({"x": 1, "y": [1.0, 9.0], "by": "eager", "panel": ["a", "b"]})
    for ax in plots.lines(points, "x", "y", "by", panel="panel", zero=True).figure.axes:
        low, high = ax.get_ylim()
        assert low == 0 and high > 9


def test_names_of_one_colour_differ_by_marker_and_dash(monkeypatch):
    """Points have no dash: of a colour that came again both were the same mark."""
    monkeypatch.setattr(style, "_slot", int)
    size = len(style.PALETTE)
    looks = [(style.colour(n), style.marker(n), str(style.dash(n))) for n in map(str, range(28))]
    for at, (colour, marker, dash) in enumerate(looks[size:], size):
        before = looks[at - size]
        assert colour == before[0] and marker != before[1] and dash != before[2]
    assert len({look[:2] for look in looks}) == len(looks)


def test_names_that_are_registered_together_have_colours_of_their_own():
    """fusedlib and "fusedlib, warmed up" stood in one figure, both blue."""
    arms = ["fused", "fusedlib, warmed up", "eager", "inductor", "liger"]
    assert len({style.colour(name) for name in arms}) == len(arms)


def test_one_output_with_its_meaning_each() -> None:
    outputs = outputs_of(
        lambda: display.prose("*p*"),
        lambda: display.claim("a", "b", "c", headline="Found", study="x", numbers={}, standings=[]),
        lambda: display.table(narrow(), caption="c", name="t"),
        lambda: display.figure(curves(), caption="c", alt="falls", name="f"),
    )
    assert [output.metadata["fusedlib"]["kind"] for output in outputs] == [
        "prose", "claim", "table", "figure",
    ]  # fmt: skip
    assert outputs[1].metadata["fusedlib"]["sentence"] == "a"
    assert outputs[-1].data["text/plain"] == "falls"


def test_outside_a_notebook_the_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    display.prose("It is so.")
    assert "It is so." in capsys.readouterr().out


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#fdfdfc", "#14171b"])
@pytest.mark.parametrize("colour", [*style.PALETTE, style.MUTED])
def test_colours_stand_out_on_both_pages(colour: str, page: str) -> None:
    """WCAG 2.2, 1.4.11: graphics need a contrast of 3:1."""
    light, dark = sorted([_luminance(colour), _luminance(page)], reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


def test_a_name_keeps_its_colour() -> None:
    style.register("test-series-a", "test-series-b", first=2)
    assert style.colour("test-series-a") == style.PALETTE[2]
    style.register("test-series-a", first=2)
    with pytest.raises(ValueError, match="already has slot 2"):
        style.register("test-series-a", first=3)
    assert style.colour("never registered") == style.colour("never registered")
    assert re.fullmatch(r"#[0-9A-F]{6}", style.colour("never registered"))


def test_a_reference_line_is_straight_or_a_curve() -> None:
    _, ax = style.new()
    style.reference_line(ax, x=1.0)
    style.reference_line(ax, x=[1, 2], y=[3, 4], label="growth")
    assert len(ax.lines) == 2


def test_error_bars_reach_from_low_to_high() -> None:
    frame = pd.DataFrame({"ms": [10.0, 20.0], "low": [9, 18], "high": [12, 21], "T": [1, 2]})
    shown = plots.bars(frame.assign(by="fused"), "ms", "T", "by", low="low", high="high")
    (bars,) = shown.figure.axes[0].containers[0].lines[2]
    assert [segment[:, 0].tolist() for segment in bars.get_segments()] == [[18, 21], [9, 12]]


def test_bars_have_an_axis_title_a_panel() -> None:
    frame = pd.DataFrame(
        {"value": [10.0, 1.3], "T": [1, 1], "by": "fused", "what": ["peak", "time"]}
    )
    titles = {"peak": "GiB", "time": "times as long"}
    shown = plots.bars(frame, "value", "T", "by", panel="what", xlabel=titles)
    assert [ax.get_xlabel() for ax in shown.figure.axes] == ["GiB", "times as long"]


def test_bars_show_a_mark_for_each_row_of_another_machine() -> None:
    """Also of a name, a row or a panel that the first machine lacks: a caption names its marks."""
    rows = [("H100", "bf16", "all", "peak"), ("here", "fp32", "all", "peak"),
            ("here", "fp32", "two", "peak"), ("here", "bf16", "all", "time")]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["machine", "by", "plan", "what"]).assign(value=1.0)
    frame["machine"] = pd.Categorical(frame["machine"], ["H100", "here"])
    shown = plots.bars(frame, "value", "plan", "by", panel="what", card="machine")
    marks = [line.get_xdata() for ax in shown.figure.axes for line in ax.lines]
    assert sum(map(len, marks)) == 3


def test_jupyterlab_s_table_centres_groups_and_keeps_a_figure_on_one_line():
    frame = pd.DataFrame([["1.02 (1.01–1.03)", "2"]], index=pd.Index(["a"], name="who"))
    frame.columns = pd.MultiIndex.from_tuples([("group", "x"), ("group", "y")])
    content = display.table_json(frame) | {"caption": "c", "note": None, "name": "n"}
    text = display.table_data(content)["text/html"]
    assert '<th scope="colgroup" colspan="2" class="group" style="text-align: center"' in text
    assert 'style="text-align: right; white-space: nowrap">1.02 (1.01–1.03)</td>' in text


def test_a_figure_s_caption_shows_in_jupyterlab_too():
    fig, ax = style.new()
    ax.plot([1, 2])
    with display.captured() as outputs:
        display.figure(fig, "Time, *late* steps ([table](#all-steps)).", "a line", "late-steps")
    page = outputs[0]["data"]["text/html"]
    assert "<figure id='late-steps'" in page and "<svg" in page
    link = "<a href='#all-steps'>table</a>"
    assert f"<figcaption>Time, <em>late</em> steps ({link}).</figcaption>" in page


def test_an_empty_table_says_so_in_its_own_words():
    [output] = outputs_of(
        lambda: display.table(pd.DataFrame(), "Cases without a time.", "lacking", empty="none")
    )
    assert output["data"]["text/html"].count("none") == 1
