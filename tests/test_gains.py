"""What ours gives and where it gives nothing, from rows made by hand."""

import re

import memory_rows
import pandas as pd
import pytest
from card_rows import EMPTY
from test_kernels_study import CPU, FULL, full_frame

from fusedlib.study import gains
from fusedlib.study.kernels import floors, regimes, tables
from fusedlib.study.kernels.figures import leading_rows

MEMORY = pd.DataFrame(memory_rows.full())
FOUND = regimes.gains(leading_rows(FULL))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((8192, 4096, 14336), "models"), ((1024, 4096, 4096), "many"), ((256, 4096, 4096), "some"),
        ((64, 4096, 4096), "few"), ((64, 8192, 8192), "wide"), ((16, 64, 64), "few"),
    ],
)  # fmt: skip
def test_every_problem_has_one_size(shape, size):
    assert regimes.size_of(*shape) == size


def test_a_gain_is_a_rival_s_time_over_ours():
    models = regimes.of(FOUND, regimes.Regime("bf16", "models", "graph"))
    ratio = models[models["way"] == "forward"].groupby("rival")["ratio"].median()
    assert ratio["Liger"] == pytest.approx(1.05, rel=0.01)
    assert ratio["eager"] == pytest.approx(1.10, rel=0.01)
    best = regimes.best(FOUND)
    assert (best.groupby(["format", "shape", "way", "launch"]).size() == 1).all()
    assert set(regimes.best(models)["rival"]) == {"QuACK"}


def test_of_two_settings_of_a_rival_the_faster_counts():
    rows = FULL[FULL["provider"] == "inductor"]
    faster = rows.assign(
        provider="inductor-max",
        samples_ms=[[0.5 * v for v in samples] for samples in rows["samples_ms"]],
    )
    found = regimes.gains(leading_rows(pd.concat([FULL, faster], ignore_index=True)))
    assert len(found) == len(FOUND)
    ours, before = (f[f["rival"] == "Inductor"]["ratio"].median() for f in (found, FOUND))
    assert ours == pytest.approx(before / 2, rel=0.01)


def test_the_table_has_a_line_a_regime_and_memory_last():
    table = gains.table(FULL, MEMORY)
    assert list(table.columns)[:2] == ["Liger fwd", "Liger fwd+bwd"]
    assert "QuACK fwd+bwd" in table.columns
    assert "bf16, shapes of language models, from Python (2)" in table.index
    last = table.iloc[-1]
    assert last.name == "memory, bf16, shapes of language models: kept, peak (2)"
    # 672 over 448 MiB at both shapes; 1,072 over 912 at one, 462 over 494 at the other.
    assert last["Liger fwd"] == "1.50"
    assert last["Liger fwd+bwd"] == "0.935–1.18"


def test_nothing_is_where_the_best_rival_is_not_slower():
    slow = full_frame({"fused": 1.2})
    text = "; ".join(gains.nothing(slow, MEMORY))
    assert "bf16, shapes of language models (8 of 8 cases, down to 0.8" in text
    assert "peak memory in bf16 (1 of 2 shapes: 0.935 at 4096·4096·11008)" in text
    fast = full_frame({"fused": 0.5})
    assert gains.nothing(fast, EMPTY) == []


def test_floors_are_held_or_missed_with_the_least_ratio():
    table = floors.table(FOUND)
    models = table.loc[("bf16, shapes of language models, from Python", "forward")]
    assert models["floor"] == "1.030" and models["held at"] == "2 of 2 shapes"
    slow = regimes.gains(leading_rows(full_frame({"fused": 1.2})))
    text = floors.sentence(slow, "a card")
    missed = r"language models, from Python, forward: 0\.\d+ at .{15} where 1\.030 was the floor"
    assert re.search(missed, text) and "hold at every timed shape on a card" in text


@pytest.mark.parametrize("frame", [CPU, EMPTY], ids=["cpu", "empty"])
def test_without_ours_there_is_no_gain_and_no_error(frame):
    found = regimes.gains(leading_rows(frame))
    assert found.empty and gains.table(frame, frame).empty and gains.nothing(frame, frame) == []
    assert floors.sentence(found, "x") is None and len(floors.table(found).columns)


def test_the_table_of_gains_sets_the_fastest_rival_beside_liger():
    table = tables.gains_table(FOUND)
    line = table.loc[("bf16", "shapes of language models", "graph")]
    # Liger 1.05 and QuACK 1.03 times ours, both shapes in both directions.
    assert line[("forward", "Liger")].startswith("1.05") and line[("", "no gain in")] == "0 of 4"
    assert line[("forward", "fastest")].startswith("1.03")
    slow = tables.gains_table(regimes.gains(leading_rows(full_frame({"fused": 1.2}))))
    line = slow.loc[("bf16", "shapes of language models", "graph")]
    assert line[("", "no gain in")] == "4 of 4" and line[("forward", "fastest")].startswith("0.8")
    assert len(tables.gains_table(FOUND.iloc[:0]).columns)
