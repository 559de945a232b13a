"""The ways to be fooled: `compare` refuses each cheat for its reason, and some pass as told."""

import re
from pathlib import Path

import pandas as pd
import pytest
import torch

from fusedlib.bench import compare
from study import fooled

REASONS = {
    "kept by address": "kept and not computed", "kept by version": "kept and not computed",
    "kept by three values": "kept and not computed", "right at first": "rewritten in place",
    "left in memory": "norm error|handed out before", "less work": "norm error",
    "thread": "thread|norm error", "replaced timer": "replaced time.perf_counter",
    "lazy tensor": "not a plain torch.Tensor", "inputs destroyed": "wrote over x",
    "answer found": "kept and not computed", "missing gradient": "no gradient arrived at w",
    "identity": "norm error", "loose tolerance": "norm error",
    "constant problem": "nothing to compute", "lower precision": "norm error",
    "shaped to the test": "inputs of seed 1", "silent fallback": "^$",
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten():
    threads = torch.get_num_threads()
    yield
    fooled.forget()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", fooled.CHEATS)
def test_a_cheat_is_refused_for_its_reason(name):
    one = fooled.CHEATS[name]
    fooled.forget()
    inputs = one.inputs(256)
    tried = compare(one.reference, {name: one.function}, inputs, backward=one.backward)
    [line] = tried.lines
    assert (line.status == "ok") == (name == "silent fallback")
    assert re.search(REASONS[name], line.reason or "")


def test_a_search_in_each_call_and_one_mask_pass_as_their_docstrings_say():
    given = fooled.product(64)
    assert compare(torch.matmul, {"it": fooled.search}, given, rounds=2).lines[0].status == "ok"
    one = fooled.CHEATS["shaped to the test"]
    [line] = compare(one.reference, {"it": one.function}, one.inputs(64)(0), rounds=2).lines
    assert line.status == "ok"


def test_the_table_has_a_row_each():
    here = pd.read_csv(Path(fooled.__file__).with_suffix(".csv")).query("where == 'CPU'")
    assert {*fooled.CHEATS} < {*here["lie"]} and here["seen"].notna().all()
