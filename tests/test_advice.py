"""The tour's table: each factor against the rows, each line on each card, links, the traced row."""

from collections import defaultdict
from functools import cache

import numpy as np
import pandas as pd
import pytest

from press import advice
from press.formats import MISSING
from press.origin import older
from study.rows import load, ratio
from study.run import races

CARDS = ["H200", "H100"]
IDS = [f"{one.task}: {one.have}" for one in advice.SETTINGS]
each_setting = pytest.mark.parametrize("one", advice.SETTINGS, ids=IDS)


def given(one: advice.Setting, who: str = "this setting") -> pd.DataFrame:
    """What the table has of a setting, by card."""
    lines = advice.factors().query("have == @one.have and task == @one.task and who == @who")
    return lines.set_index("machine")


@cache
def rows_of(one: advice.Setting) -> pd.DataFrame:
    """The rows of a setting that are ok: the newest, or all where sides are of several sets."""
    return read(one.topic, one.by != "provider").query(one.where).query("status == 'ok'")


@cache
def read(topic: str, sessions: bool) -> pd.DataFrame:
    return load(topic, sessions=sessions)


@cache
def quotients(one: advice.Setting) -> dict[tuple[str, str], list[float]]:
    """By card and provider how many times as fast or small, counted from the rows one by one."""
    by_race = defaultdict(dict)
    for row in rows_of(one).to_dict("records"):
        session = row["session"] if isinstance(row["session"], str) else None
        place = row["machine"], row["set"], row["race"], session
        by_race[place].setdefault(row["provider"], row)
    found, bases = defaultdict(list), defaultdict(list)
    if one.topic == "compilers":  # a session and a baseline for each: beside the median of all
        for (machine, *_), race in by_race.items():
            base = race.get(one.over, {})
            bases[machine, base.get("work")].append(base.get("call_ms"))
    for (machine, *_), race in by_race.items():
        theirs = race.pop(one.over, None)
        for name, ours in race.items() if theirs else ():
            if one.topic == "compilers":
                base = np.median(bases[machine, ours["work"]])
                found[machine, name].append(base / ours["call_ms"])
                continue
            samples = one.value.replace("median_ms", "samples_ms")
            pairs = [side.get(samples) if samples != one.value else None for side in (theirs, ours)]
            turns = ours.get("in_turns") is not False and isinstance(ours.get("session"), str)
            if turns and all(isinstance(p, list) for p in pairs) and len({*map(len, pairs)}) == 1:
                found[machine, name].append(float(np.median(np.divide(*pairs))))
            elif pd.notna(theirs[one.value]) and pd.notna(ours[one.value]):
                less = theirs[one.value] / ours[one.value]
                found[machine, name].append(1 / less if one.value == "largest" else less)
    return found


def apart(one: advice.Setting) -> dict[tuple[str, str], list[float]]:
    """The same of two values of another column, in the newest set that has both of a size."""
    rows = rows_of(one).dropna(subset=[one.value])
    places = [name for name in ("machine", *one.sizes, "shape") if name in rows]
    found = defaultdict(list)
    for place, same in rows.groupby(places):
        newest, value = "", None
        for _, own in same.groupby("set"):
            sides = [own[own[one.by] == name] for name in (one.over, one.of)]
            if all(len(side) for side in sides) and sides[1]["measured_at"].max() > newest:
                newest = sides[1]["measured_at"].max()
                value = sides[0][one.value].median() / sides[1][one.value].median()
        if value is not None:
            found[place[0], one.of].append(value)
    return found


@each_setting
def test_a_factor_is_what_the_rows_give(one):
    counted = quotients(one) if one.by == "provider" else apart(one)
    lines = given(one)
    assert list(lines.index) == CARDS and any(name == one.of for _, name in counted)
    for card in CARDS:
        line, values = lines.loc[card], counted.get((card, one.of), [])
        assert line["cases"] == len(values), "a row of the table lacks some, or has too many"
        if values:
            ends = min(values), np.median(values), max(values)
            assert (line["low"], line["factor"], line["high"]) == pytest.approx(ends)


@each_setting
@pytest.mark.parametrize("who", advice.WHO[1:])
def test_none_of_all_the_sizes_is_better_than_the_one_that_is_named(one, who):
    own, named = given(one), given(one, who)
    if one.by != "provider":
        assert named.empty
        return
    for card in CARDS:
        best = 0.0
        for (machine, name), values in quotients(one).items():
            if who == "compiled too":
                counts = name.startswith("fused-inductor")
            else:
                ours = name.startswith("fused-") or (name == "fused" and one.of.startswith("fused"))
                counts = not ours and name not in advice.UNRIVALLED
            if machine == card and counts and name != one.of and len(values) == own["cases"][card]:
                best = max(best, np.median(values))
        assert named["factor"].get(card, 0.0) == pytest.approx(best)


def test_a_line_that_a_card_lacks_has_a_dash():
    text = advice.table(advice.chosen()).data
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    body = [line for line in lines if line[0] != "| you have" and ":--" not in line[0]]
    assert len(body) == len(advice.SETTINGS) == len({line[0] + line[4] for line in body})
    for one, line in zip(advice.SETTINGS, body, strict=True):
        for card, cell in zip(CARDS, line[2:4], strict=True):
            assert (cell == MISSING) == bool(pd.isna(given(one)["factor"][card]))
        rows = advice.compared(one).query("provider == @one.of")
        for card, cell in zip(CARDS, line[2:4], strict=True):
            assert "older rows" in cell or not older(rows[rows["machine"] == card])


def test_times_and_counts_of_single_cases_and_older_code_are_the_rows_own():
    cells = advice.factors().set_index(["have", "machine", "who"])
    token = load("compilers").query("work == 'inference'")
    searched = token.query("provider == 'inductor-graphs-searched'")["call_ms"].item()
    one = cells.loc[("a Llama, one token at a time", "H200", "this setting")]
    assert one["absolute"] == f"{searched:.2f} ms" and one["old"]
    assert one["factor"] < 5.5, "not beside the slowest of the baselines"
    fit = load("llama").query("experiment == 'limit' and grows == 'batch' and machine == 'H100'")
    fit = fit.set_index("provider")["largest"]
    one = cells.loc[("no memory for another sequence", "H100", "this setting")]
    assert one["absolute"] == f"{fit['fused']:.0f} fit" and one["old"]
    assert one["factor"] == fit["fused"] / fit["huggingface"]


def test_what_the_lines_say_of_turns_memory_and_checkpoints_is_so():
    apart = {one.have for one in advice.SETTINGS if one.by != "provider"}
    assert apart == {"AdamW's update",
                     "a large model, and bf16 will do", "large MLPs, and TF32 will do"}  # fmt: skip
    two = load("compilers").query("work.str.contains('fsdp2') and processes == 2")
    began = pd.to_datetime(two["began"]).groupby(two["provider"]).unique().map(lambda day: day[0])
    assert began["fused"] - began["huggingface"] > pd.Timedelta(hours=3)
    assert began["fused"] == began["inductor-layers"]
    times = ratio(load("model_memory").query(advice.CHECKPOINT), over="none 0")
    times = 1 / times.query("provider == 'segments 1'")["ratio"]
    assert len(times) == 2 and times.between(1.28, 1.36).all(), "a third more time"
    weights = load("end_to_end").query("experiment == 'optimizer' and model == '2.7b'")
    assert weights["weights_mib"].between(12_990, 13_000).all(), "fp32"


def test_what_the_lines_say_of_who_is_missing_is_so():
    attention = load("attention", sessions=True)
    assert not attention["provider"].str.fullmatch("flash-?3").any()
    searched = load("kernels", sessions=True).query("provider == 'quack-searched'")
    assert len(searched), "with its search QuACK is another provider"
    tokens = load("compilers").query("experiment == 'generation' and provider == 'huggingface'")
    assert tokens["call_ms"].max() > 1.25 * tokens["call_ms"].median(), "a slow host in a session"


@each_setting
def test_a_line_leads_to_a_heading(one):
    assert "#" in advice._link(*one.shown), f"no heading of {one.shown[0]} has these words"


def test_knobs_choose_lines_and_none_is_said():
    some = advice.chosen("H100", "fp32", "long context")
    assert {*some["machine"]} == {"H100"} and {*some["have"]} == {"attention in fp32"}
    assert "H200" not in advice.table(some).data
    assert "No line" in advice.table(advice.chosen("H100", "fp32", "inference")).data


def test_the_traced_case_is_measured_again_by_the_command_that_is_shown():
    one = advice.setting("a SwiGLU MLP, many tokens", "training")
    for row in advice.compared(one).query("provider == 'fused'").to_dict("records"):
        again = races(one.topic, models=[row["shape"]], device="cuda")
        assert row["race"] in again
        assert {case["provider"] for case in again[row["race"]]} >= {one.of, one.over}
