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
        "kernel that skips work, time (L4)": 28.86 / 9.22,
        "torch.compile, xl (RTX PRO 6000)": 161.069 / 132.873,
        "autocast over fp32, small (RTX PRO 6000)": 24.2399 / 27.7978,
        "mean without warm-up, small (a notebook)": 71.293851 / 38.934001,
        "Liger over Hugging Face, memory (RTX 4090)": 18382989824 / 3596532224,
        "torch.compile with CUDA graphs, a token (A100)": 89.5 / 46.7,
        "torch.compile without mask, training (A100)": 24.6 / 20.3,
        "torch.compile by layer, two GPUs (A100)": 27.7 / 23.2,
    }
    assert stated[list(expected)].to_dict() == pytest.approx(expected)
    assert stated.index.is_unique and len(stated) == 47


def test_measured_factors_are_of_the_published_settings(table):
    """Another setting turned round: DeepSpeed's defaults, Hugging Face's mask, no CUDA graphs, a
    step on a CPU among a GPU's."""
    ours = table[table["machine"] == "nvidia-h200"].set_index("comparison")["value"]
    expected = {
        "Liger over Hugging Face, time (RTX 4090)": 925.076 / 929.313,
        "autocast over fp32, large (RTX PRO 6000)": (173.725 / 99.428 + 172.866 / 93.308) / 2,
        "torch.compile without mask, training (A100)": 236.499 / 185.864,
        "torch.compile with CUDA graphs, a token (A100)": 438.910 / 102.128,
    }
    assert ours[list(expected)].to_dict() == pytest.approx(expected, rel=0.01)


def test_on_the_h100_no_gain_is_kept_but_the_kernel_s_and_a_mean_s(table):
    drawn = table[table["drawn"] & ~table["apart"]]
    kept = factors.standing(drawn, "nvidia-h100").query("sure").index
    assert {*kept} == {
        "kernel that skips work, time (L4)", "kernel that skips work, memory (L4)",
        "mean without warm-up, small (a notebook)",
    }  # fmt: skip


def test_factors_of_launch_bound_steps_have_the_range_of_their_sessions(table):
    """Each of four sessions on the H200 clocked both formats; one had the xl step at half its time
    in another."""
    ours = table[table["machine"] == "nvidia-h200"].set_index("comparison")
    xl = ours.loc["autocast over fp32, xl (RTX PRO 6000)"]
    assert (xl["low"], xl["high"]) == pytest.approx(
        (341.977 / 217.063, 341.086 / 106.837), rel=1e-4
    )
    small = ours.loc["torch.compile, small (RTX PRO 6000)"]
    assert small["low"] < 1.61 < 1.99 < small["value"] == small["high"]


def test_a_factor_of_two_gpus_is_over_a_baseline_of_two(table):
    """Steps of one GPU and of two have no session, and one GPU's was taken for the other's."""
    ours = table[table["machine"] == "nvidia-h200"].set_index("comparison")
    two = ours.loc["torch.compile by layer, two GPUs (A100)"]
    assert two["low"] == two["high"] == pytest.approx(258.359 / 207.252, rel=3e-3)


def test_the_abstract_says_what_the_recorded_factors_are(table):
    """Fewer than half keep their gain in every session, and two of autocast change sides."""
    survival = factors.survival(table[table["drawn"]], "nvidia-h200")
    assert survival["sure"] < survival["all"] / 2
    each = factors.standing(table[table["drawn"]], "nvidia-h200").query("sure")
    assert each.index.str.startswith("kernel that skips work").sum() == 2
    assert survival["once"] == 5, "those of two sessions or more: that kernel, and warm-up"
    own = table[table["drawn"] & ~table["apart"]].set_index("comparison")
    stated, ours = (own[own["machine"] == name] for name in ("published", "nvidia-h200"))
    turned = (stated["value"] < 0.99) & (ours["low"].reindex(stated.index) > 1.01)
    assert survival["turned"] == turned.sum() == 2
    assert turned.index[turned].str.startswith("autocast").all()


def test_every_published_factor_was_measured_by_a_gpu(table):
    ours = table[table["by"] == "measured"]
    assert {*ours["comparison"]} == {*table["comparison"]}
    assert not ours.duplicated(["comparison", "machine"]).any() and ours["value"].gt(0).all()


def test_survival_counts_kept_gains_and_factors_that_change_sides():
    pairs = [
        (3.0, 2.8, 2.7, 2.9), (3.0, 1.5, 1.4, 2.9), (3.0, 0.5, 0.5, 0.5), (0.5, 2.0, 2.0, 2.0),
        (1.02, 0.95, 0.95, 0.95), (1.5, 1.0, 1.0, 1.0), (3.0, 2.8, 1.0, 2.9),
    ]  # fmt: skip
    rows = []
    for at, (published, *measured) in enumerate(pairs):
        rows.append((str(at), "published", "published", published, published, published))
        rows.append((str(at), "measured", "gpu", *measured))
    columns = ["comparison", "by", "machine", "value", "low", "high"]
    table = pd.DataFrame(rows, columns=columns)
    table["sessions"] = table["comparison"].eq("0").map({True: 1, False: 2})
    other = table.assign(comparison="other", apart=True)
    table = pd.concat([table.assign(apart=False), other])
    expected = {"all": 7, "near": 2, "sure": 1, "once": 1, "possible": 3, "turned": 3,
                "depend": ["1", "6"]}  # fmt: skip
    assert factors.survival(table, "gpu") == expected
    nothing = {**dict.fromkeys(expected, 0), "depend": []}
    assert factors.survival(table, "another") == nothing
