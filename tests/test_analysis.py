"""What studies share: the energy of a token beside that of a plain product's FLOPs."""

import pandas as pd
import pytest

from press.analysis import energy


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
