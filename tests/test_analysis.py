"""What studies share: ratios, and the energy of a token beside that of a product's FLOPs."""

import pandas as pd
import pytest

from press.analysis import energy, ratios


def rows():
    shared = {"machine": "card", "dtype": "bfloat16", "flops": 1e12, "tokens": 500.0}
    load = {**shared, "experiment": "sustained", "provider": "fused"}
    plain = {**shared, "experiment": "product", "provider": None, "tokens": None}
    return pd.DataFrame([
        {**load, "recording": "a", "joules": 2.0},
        {**load, "recording": "b", "joules": 3.0},
        {**load, "recording": "a", "joules": 40.0, "dtype": "float32"},
        {**load, "recording": "a", "joules": None},
        {**load, "recording": "a", "joules": 9.0, "experiment": "step"},
        {**plain, "recording": "a", "joules": 8.0, "flops": 8e12},
        {**plain, "recording": "b", "joules": 24.0, "flops": 8e12},
    ])  # fmt: skip


def test_a_token_s_energy_stands_beside_its_flops_in_a_product_of_that_recording_and_dtype():
    loaded = energy(rows())
    assert loaded["token_mj"].tolist() == pytest.approx([4.0, 6.0, 80.0])
    assert loaded["roof_mj"].tolist()[:2] == pytest.approx([2.0, 6.0])
    assert loaded["roof_mj"].isna().tolist() == [False, False, True], "no fp32 product was measured"


def test_nothing_measured_is_an_empty_frame_with_its_columns():
    for nothing in (rows().iloc[:0], rows().drop(columns="joules"), rows().iloc[3:5]):
        loaded = energy(nothing)
        assert loaded.empty and {"token_mj", "roof_mj", "power_w", "sm_mhz"} <= set(loaded)


def raced(provider: str, recording: str, session: str, *samples: float, **fields):
    """A row of one side of a race; times in ms."""
    median_ms = sorted(samples)[len(samples) // 2]
    return {
        "machine": "card", "provider": provider, "recording": recording, "session": session,
        "median_ms": median_ms, "samples_ms": list(samples), **fields,
    }  # fmt: skip


def test_both_sides_of_a_ratio_are_of_one_session_of_one_recording():
    """A session's name may come again in another recording."""
    lines = [
        raced(provider, recording, "s", ms)
        for recording, times in (("a", (6.0, 2.0)), ("b", (6.0, 3.0)))
        for provider, ms in zip(("eager", "fused"), times, strict=True)
    ]
    alone = [raced("fused", "c", "s", 1.0), raced("fused", "a", "t", 1.0)]
    compared = ratios(pd.DataFrame([*reversed(lines), *alone]), "eager")
    assert compared.set_index("recording")["ratio"].to_dict() == {"a": 3.0, "b": 2.0}
    assert (compared["provider"] == "fused").all()


def test_a_ratio_of_turns_is_the_median_over_its_pairs():
    """Drift between rounds cancels; samples that were not taken in turns are no pairs."""
    eager, fused = (1.0, 4.0, 10.0), (1.0, 8.0, 5.0)
    for fields, ratio in (({}, 1.0), ({"in_turns": False}, 4.0 / 5.0)):
        lines = [raced("eager", "a", "s", *eager), raced("fused", "a", "s", *fused, **fields)]
        assert ratios(pd.DataFrame(lines), "eager")["ratio"].tolist() == [ratio]
    uneven = [raced("eager", "a", "s", *eager), raced("fused", "a", "s", 2.0)]
    assert ratios(pd.DataFrame(uneven), "eager")["ratio"].tolist() == [2.0]
    assert ratios(pd.DataFrame(uneven[:1]), "eager").empty
