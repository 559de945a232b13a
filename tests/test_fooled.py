"""The ways to be fooled: `compare` refuses each cheat for its reason, and some pass as told."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from fusedlib.bench import compare
from study import fooled

REASONS = {
    "kept by address": "kept and not computed", "right at first": "rewritten in place",
    "left in memory": "norm error|handed out before", "less work": "norm error",
    "thread": "thread|norm error", "replaced timer": "replaced time.perf_counter",
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten():
    threads = torch.get_num_threads()
    yield
    fooled.forget()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", fooled.CHEATS)
def test_a_cheat_is_refused_for_its_reason(name):
    fooled.forget()
    tried = compare(torch.matmul, {name: fooled.CHEATS[name].function}, fooled.product(256))
    [line] = tried.lines
    assert line.status != "ok" and re.search(REASONS[name], line.reason or "")


def test_the_table_has_a_row_each():
    here = pd.read_csv(Path(fooled.__file__).with_suffix(".csv")).query("where == 'CPU'")
    assert {*fooled.CHEATS} < {*here["lie"]} and here["seen"].notna().all()
