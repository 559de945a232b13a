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
        "fused over Liger (L4)": 28.86 / 9.22,
        "torch.compile, xl (RTX PRO 6000)": 161.069 / 132.873,
        "autocast over fp32, small (RTX PRO 6000)": 24.2399 / 27.7978,
        "mean without warm-up, small (a notebook)": 71.293851 / 38.934001,
        "Liger over Hugging Face, memory (RTX 4090)": 18382989824 / 3596532224,
        "torch.compile with CUDA graphs, a token (A100)": 89.5 / 46.7,
        "torch.compile, training (A100)": 24.6 / 20.3,
        "torch.compile, two GPUs (A100)": 27.7 / 23.2,
    }
    assert stated[list(expected)].to_dict() == pytest.approx(expected)
    assert stated.index.is_unique and len(stated) == 25


def test_measured_factors_are_of_the_published_settings(table):
    """Another setting turned round: DeepSpeed's defaults, Hugging Face's mask, no CUDA graphs, a
    step on a CPU among a GPU's."""
    ours = table[table["machine"] == "nvidia-h200"].set_index("comparison")["value"]
    expected = {
        "Liger over Hugging Face, time (RTX 4090)": 925.076 / 929.313,
        "autocast over fp32, small (RTX PRO 6000)": 38.592 / 40.409,
        "torch.compile, training (A100)": 236.499 / 185.864,
        "torch.compile with CUDA graphs, a token (A100)": 438.910 / 102.128,
    }
    assert ours[list(expected)].to_dict() == pytest.approx(expected, rel=0.01)


def test_the_abstract_says_what_the_recorded_factors_are(table):
    """About half are near, and the largest of a layer repeats."""
    survival = factors.survival(table, "nvidia-h200")
    assert 0.4 < survival["near"] / survival["all"] < 0.6
    largest = table[table["comparison"] == "fused over Liger (L4)"].set_index("machine")["value"]
    assert 1 / factors.NEAR < largest["nvidia-h200"] / largest["published"] < factors.NEAR


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
    mended = table.assign(comparison="mended", mended=True)
    table = pd.concat([table.assign(mended=False), mended])
    assert factors.survival(table, "gpu") == {"all": 6, "near": 2, "turned": 2}
    assert factors.survival(table, "another") == {"all": 0, "near": 0, "turned": 0}
