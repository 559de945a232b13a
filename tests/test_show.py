"""Pictures and tables of rows: laws that hold whatever they look like."""

import importlib
import re
import tomllib
from io import StringIO
from itertools import combinations

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from press import display, formats, published, show, style
from press.columns import Column, columns, looks, read
from report_sample import outputs_of
from study import kernels, paths, rivals
from study.rows import load, ratio

REGISTERING = (
    "study.mlp", "study.causal", "study.calls", "study.compiled_llama",
    "study.end_to_end", "study.patched", "study.llama.operations", "study.mnist",
)  # fmt: skip
HOMES = ("study.",)
FIELDS = {"machine": "H200", "direction": "forward", "status": "ok", "profile": "full"}


def rows(*cases: dict, **same) -> pd.DataFrame:
    """A row a case: time, provider and model, with what all share."""
    return pd.DataFrame([{**FIELDS, **same, **case} for case in cases])


def timed(times: dict[tuple[str, str], float], **same) -> pd.DataFrame:
    return rows(
        *({"provider": p, "model": m, "median_ms": t} for (p, m), t in times.items()), **same
    )


TIMES = {("fused", "TinyLlama"): 1.0, ("eager", "TinyLlama"): 2.0,
         ("fused", "Qwen3-8B"): 3.0, ("eager", "Qwen3-8B"): 5.0}  # fmt: skip
ONE = timed(TIMES)
BOTH = pd.concat([ONE, timed({k: 2 * t for k, t in TIMES.items()}, machine="H100")])


@pytest.fixture(scope="module")
def recorded() -> pd.DataFrame:
    return load("kernels")


def values_drawn(picture) -> list[float]:
    """Where matplotlib drew marks along x."""
    found = []
    for ax in picture.figure.axes:
        found += [x for line in ax.lines if line.get_linestyle() == "None"
                  for x in map(float, line.get_xdata())]  # fmt: skip
    return sorted(found)


def test_the_values_drawn_are_the_frame_s() -> None:
    picture = show.dots(ONE, "median_ms", "model")
    assert values_drawn(picture) == pytest.approx(sorted(ONE["median_ms"]))
    keys = ["machine", "provider", "model", "median_ms"]
    drawn = picture.data[keys].sort_values(keys).values.tolist()
    assert drawn == ONE[keys].sort_values(keys).values.tolist()


def test_machines_share_a_picture_where_a_panel_or_colour_tells_them_apart() -> None:
    for chosen in ({"panel": "machine"}, {"by": "machine", "panel": "provider"}):
        assert len(show.dots(BOTH, "median_ms", "model", **chosen).data) == len(BOTH)
    for draw in (show.dots, show.bars):
        with pytest.raises(ValueError, match=r"differ in machine.*panel=\"machine\""):
            draw(BOTH, "median_ms", "model")


def test_bars_have_the_frame_s_lengths() -> None:
    for stacked in (False, True):
        picture = show.bars(ONE, "median_ms", "model", stacked=stacked)
        lengths = [bar.get_width() for bar in picture.figure.axes[0].patches]
        assert sorted(lengths) == pytest.approx(sorted(TIMES.values()))
        assert picture.figure.axes[0].get_xlim()[0] == 0


def test_lines_pass_through_the_frame_s_points() -> None:
    frame = ONE.assign(hidden_size=ONE["model"].map({"TinyLlama": 64, "Qwen3-8B": 4096}))
    picture = show.lines(frame, "hidden_size", "median_ms")
    points = {
        (float(x), float(y)) for line in picture.figure.axes[0].lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }  # fmt: skip
    assert points == set(zip(frame["hidden_size"], frame["median_ms"], strict=True))
    with pytest.raises(ValueError, match="model"):
        show.lines(ONE, "model", "median_ms")


def test_pictures_of_recorded_rows_have_all_their_figures(recorded) -> None:
    chosen = recorded.query(
        "group == 'models' and direction == 'forward' and launch == 'python' and "
        "provider in ['fused', 'liger', 'eager', 'products']"
    )
    faster = ratio(chosen, over="products")
    drawn = show.dots(faster, "ratio", "model", panel="machine").data
    assert sorted(drawn["ratio"]) == sorted(faster["ratio"])
    loaded = recorded.query("launch == 'sustained' and provider == 'fused' and group == 'tuned'")
    loaded = loaded[loaded["direction"] == "forward"]  # two rounds of each: repetitions
    medians = loaded.groupby(["machine", "model"])["median_ms"].median()
    drawn = show.dots(loaded, "median_ms", "model", panel="machine").data
    assert sorted(drawn["median_ms"]) == sorted(medians)


@pytest.mark.parametrize("differing", ["direction", "provider", "session", "never_declared"])
def test_rows_that_are_unlike_share_no_mark(differing) -> None:
    fused = ONE[ONE["provider"] == "fused"]
    twice = pd.concat([fused.assign(**{differing: "a"}), fused.assign(**{differing: "b"})])
    twice = twice.assign(series="one")
    by = "series" if differing == "provider" else "provider"
    for draw in (show.dots, show.bars):
        with pytest.raises(ValueError, match=differing):
            draw(twice, "median_ms", "model", by)
    with pytest.raises(ValueError, match=differing):
        show.table(twice, "model", by)
    assert len(show.dots(twice, "median_ms", "model", by, panel=differing).data) == 4
    assert len(show.dots(twice, "median_ms", "model", differing, panel=by).data) == 4


def test_rounds_of_one_case_are_one_mark() -> None:
    rounds = pd.concat([ONE.assign(round=1), ONE.assign(round=2, median_ms=ONE["median_ms"] + 2)])
    assert sorted(show.dots(rounds, "median_ms", "model").data["median_ms"]) == [2, 3, 4, 6]
    with pytest.raises(ValueError, match="direction"):
        show.dots(rounds.assign(direction=rounds["round"].map(str)), "median_ms", "model")


def test_rows_that_failed_have_no_mark() -> None:
    for status in ("wrong", "unavailable", "oom", "failed"):
        picture = show.dots(ONE.assign(status=["ok", status, "ok", "ok"]), "median_ms", "model")
        assert 2.0 not in set(picture.data["median_ms"]) and len(picture.data) == 3
        cells = show.table(ONE.assign(status=["ok", status, "ok", "ok"]), "model", "provider").data
        assert cells.isna().sum().sum() == 1
        empty = show.dots(ONE.assign(status=status), "median_ms", "model")
        assert empty.data.empty and read("status", status) in empty.alt
    assert show.dots(ONE.iloc[:0], "median_ms", "model").alt
    assert show.lines(pd.DataFrame(), "hidden_size", "ratio").alt


def test_a_row_without_a_name_is_no_series() -> None:
    frame = ONE.assign(provider=["fused", None, "fused", float("nan")])
    assert set(show.dots(frame, "median_ms", "model").data["provider"]) == {"fused"}
    assert "nan" not in show.table(frame, "model", "provider").data.columns


def test_more_series_than_can_be_told_apart_are_refused() -> None:
    many = pd.concat([ONE.assign(provider=f"{n}") for n in range(5)]).drop_duplicates(
        ["provider", "model"]
    )
    with pytest.raises(ValueError, match="most=5"):
        show.dots(many, "median_ms", "model")
    assert len(show.dots(many, "median_ms", "model", most=5).data) == len(many)


def test_no_two_implementations_of_a_picture_look_alike(recorded) -> None:
    everyone = [*columns()["provider"].slots, *recorded["provider"].dropna().unique()]
    for pair in combinations(dict.fromkeys(everyone), 2):
        assert len({slot % len(style.PALETTE) for slot in looks("provider", pair).values()}) == 2
    there = list(recorded["provider"].dropna().unique())
    for size in range(1, len(there) + 1):
        for start in range(len(there)):
            slots = looks("provider", (there + there)[start : start + size])
            colours = {slot % len(style.PALETTE) for slot in slots.values()}
            assert len(colours) == min(size, len(style.PALETTE))
            assert len(set(slots.values())) == size and max(slots.values()) < style.SLOTS
    assert looks("provider", ["fused", "eager"]) == {"fused": 0, "eager": 1}


def test_ways_of_attention_that_are_shown_together_have_one_colour_in_all_pictures() -> None:
    held = ["plain", "inductor", "math", "efficient", "flex", "flash-4", "flash"]
    faster = ["inductor", "efficient", "flex", "cudnn", "flash-4", "flash"]
    short = ["plain", "efficient", "flash-4", "flash", "sdpa"]
    for together in (held, faster, short):
        alone = {name: looks("provider", [name])[name] for name in together}
        assert looks("provider", together) == {n: alone[n] for n in looks("provider", together)}


def test_areas_are_stacked_parts_and_say_where_most_is_held() -> None:
    held = pd.DataFrame(
        {"weights": [1.0, 1, 1, 1], "gradients": [0.0, 0, 2, 2], "activations": [1.0, 3, 0, 0],
         "other": [9.0, 9, 9, 9]}, index=[0, 0.9, 1.5, 2],
    )  # fmt: skip
    picture = show.areas({"AdamW": held, "none": held * 0 + 1}, ["forward", "backward"])
    first = picture.figure.axes[0]
    assert [tick.get_text() for tick in first.get_xticklabels()] == ["forward", "backward"]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in first.collections]
    assert tops == [1, 4, 4], "weights, activations, gradients"
    assert "AdamW: at most 4 MiB, in forward" in picture.alt and "other" not in picture.alt
    assert len(picture.data) == 2 * len(held)


def test_marks_of_a_picture_have_the_colours_of_looks() -> None:
    frame = pd.concat([ONE.assign(provider=name) for name in ("quack", "fused-inductor", "plain")])
    frame = frame.drop_duplicates(["provider", "model"])
    picture = show.dots(frame, "median_ms", "model")
    lines = [line for line in picture.figure.axes[0].lines if len(line.get_xdata())]
    assert len({line.get_color() for line in lines if line.get_marker() != "None"}) == 3


@pytest.mark.parametrize(("factor", "log"), [(20, False), (31, True)])
def test_an_axis_is_logarithmic_from_a_factor_30_on(factor, log) -> None:
    frame = ONE.assign(power_w=[1.0, 1.0, 1.0, factor])
    scale = show.dots(frame, "power_w", "model").figure.axes[0].get_xscale()
    assert (scale == "log") == log


def test_a_table_has_the_frame_s_values() -> None:
    one = show.table(ONE, "model", "provider")
    assert sorted(one.data.to_numpy().ravel()) == sorted(TIMES.values())
    assert show.table(BOTH, "model", "provider").data.shape == (2, 4)
    listed = show.table(BOTH, ["model", "provider"], values=["median_ms", "status"])
    assert listed.data.shape == (8, 2)
    assert formats.formatted(5.0, columns()["median_ms"].format) in one.to_html()
    [output] = outputs_of(lambda: display.table(one, caption="Times.", name="times"))
    cells = output["data"][display.TABLE_MIME]["rows"]
    assert cells == [["TinyLlama", "1.00 ms", "2.00 ms"], ["Qwen3-8B", "3.00 ms", "5.00 ms"]]


def test_a_picture_goes_where_those_of_plots_go() -> None:
    picture = show.dots(ONE, "median_ms", "model", title="Times")
    data, _ = picture._repr_mimebundle_()
    assert "<svg" in data["image/svg+xml"] and data["text/plain"] == picture.alt
    [output] = outputs_of(lambda: display.figure(picture, caption="Times.", name="times"))
    written = pd.read_csv(StringIO(output["metadata"]["fusedlib"]["data"]))
    assert sorted(written["median_ms"]) == sorted(TIMES.values())
    assert set(written["provider"]) == {"fused", "eager"} and plt.get_fignums() == []


def test_every_column_is_well_said() -> None:
    said = columns()
    assert all(one.label and formats.formatted(1.5, one.format) for one in said.values())
    for name, one in said.items():
        assert re.fullmatch(r"(,d|\d ?[^\d\s,].*|\d?)", one.format), name
        assert len(set(one.names.values())) == len(one.names), name
        assert not one.order or not one.names or set(one.order) <= set(one.names), name
    numbers = [one.label for one in said.values() if not one.field]
    assert len(set(numbers)) == len(numbers)
    assert read("some_thing", None) == "none" and show.dots(
        ONE.assign(some_thing=ONE["median_ms"]), "some_thing", "model"
    ).figure.axes[0].get_xlabel().startswith("some thing")
    models = [*kernels.MODELS.values()]
    assert [*said["model"].order][: len(models)] == models
    assert isinstance(said["provider"], Column)


def test_all_values_that_kernels_have_recorded_are_named(recorded) -> None:
    for name, one in columns().items():
        if one.names and name in recorded:
            there = {str(v) for v in recorded[name].dropna().unique()}
            assert there - {"int8"} <= set(one.names), name


def test_every_registered_rival_has_a_name_and_a_colour() -> None:
    for module in REGISTERING:
        importlib.import_module(module)
    said = columns()["provider"]
    ours = {one.name for one in rivals.RIVALS.values()
            if str(getattr(one.build, "__module__", "")).startswith(HOMES)}  # fmt: skip
    assert len(ours) > 35 and ours <= {*said.names} & {*said.slots}


def test_published_figures_have_their_sources() -> None:
    known = tomllib.loads((paths.PUBLISHED / "sources.toml").read_text(encoding="utf-8"))
    for path in paths.PUBLISHED.glob("*.csv"):
        assert {*published.load(path.stem).filter(["source"]).stack()} <= {*known}, path.name
