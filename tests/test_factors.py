"""Page one's picture: published factors and what they are when measured again."""

import pandas as pd
import pytest

from press import factors


@pytest.fixture(scope="module")
def table():
    return factors.factors()


def test_published_factors_are_those_of_the_tables(table):
    stated = table[table["by"] == "published"].set_index("comparison")["value"]
    expected = {
        "fused over Liger, all work done (SwiGLU kernel, L4)": 28.86 / 9.22,
        "torch.compile in fp32, xl (course report, RTX PRO 6000)": 161.069 / 132.873,
        "mean time without warm-up, small (warm-up notebook)": 71.293851 / 38.934001,
        "Liger over Hugging Face, memory (Liger study, RTX 4090)": 18382989824 / 3596532224,
        "torch.compile, a token (Lit-GPT, A100)": 89.5 / 46.7,
        "torch.compile, training (Lit-GPT, A100)": 24.6 / 20.3,
        "torch.compile, two GPUs (Lit-GPT, A100)": 27.7 / 23.2,
    }
    assert stated[list(expected)].to_dict() == pytest.approx(expected)
    assert stated.index.is_unique and len(stated) == 13


def test_every_published_factor_was_measured_by_a_gpu(table):
    ours = table[table["by"] == "measured"]
    assert {*ours["comparison"]} == {*table["comparison"]}
    assert not ours.duplicated(["comparison", "machine"]).any() and ours["value"].gt(0).all()


def test_survival_counts_near_ones_and_those_that_change_sides():
    pairs = [(3.0, 2.8), (3.0, 1.5), (3.0, 0.5), (0.5, 2.0), (1.02, 0.95), (1.5, 1.0)]
    rows = []
    for at, (published, measured) in enumerate(pairs):
        rows += [(at, "published", "published", published), (at, "measured", "gpu", measured)]
    table = pd.DataFrame(rows, columns=["comparison", "by", "machine", "value"])
    assert factors.survival(table, "gpu") == {"all": 6, "near": 2, "turned": 2}
    assert factors.survival(table, "another") == {"all": 0, "near": 0, "turned": 0}
