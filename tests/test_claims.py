"""How claims are evaluated; those of the notebooks are held in `tests/test_report_paper.py`."""

import json

import pandas as pd
import pytest

from fusedlib.bench import machine
from fusedlib.study import claims as stating
from fusedlib.study import published, recording
from fusedlib.study.claims import Claim


def frame(**columns) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    base = {"machine": "m", "recording": "a", "status": "ok", "profile": "full"}
    made = pd.DataFrame(
        {name: [value] * size for name, value in base.items()}
        | {"device_type": ["cuda"] * size, "own": [False] * size}
        | columns
    )
    made = made.assign(case=made.get("case", [str(i) for i in range(size)]))
    made["machine"] = pd.Categorical(made["machine"], categories=["m", machine.key()])
    made.attrs["study"] = "00_x"
    return made


def stated(rows, rule) -> Claim:
    made = stating.claim("x", rows)(rule)
    stating.CLAIMS.remove(made)
    return made


def test_a_headline_is_the_median_of_all_recordings_with_their_range():
    """Issue 18: the newest of eight recordings stood as the headline."""
    rows = frame(recording=["a", "b", "c"], case=["1"] * 3, median_ms=[1.011, 1.165, 1.053])

    def rule(found):
        """The step takes {ms:4 ms}."""
        return {"ms": found["median_ms"].iloc[0]}, found["median_ms"].iloc[0] < 1.2

    claim = stated(rows, rule)
    assert claim.sentence() == "The step takes 1.053 ms [1.011–1.165]."
    assert "m: holds in 3 of 3 recordings" in claim.verdict()
    assert "this machine: not measured; on a large GPU `make study ONLY=00_x" in claim.verdict()
    mine = rows.assign(machine=machine.key(), own=True, median_ms=[9.0, 7.0, 8.0])
    both = pd.concat([rows, mine]).astype({"machine": rows["machine"].dtype})
    claim = stated(both, rule)
    assert claim.sentence() == "The step takes 1.053 ms [1.011–1.165]."
    assert "this machine: does not hold. Measured here: The step takes 8." in claim.verdict()


def test_a_recording_that_fails_is_counted():
    rows = frame(
        recording=["a", "a", "b", "b"], case=["1", "2", "1", "2"], median_ms=[1.0, 2.0, 1.0, 9.0]
    )

    def rule(found):
        """The slowest takes {ms:2 ms}."""
        return {"ms": found["median_ms"].max()}, found["median_ms"].max() < 5

    verdict = stated(rows, rule).verdicts[0]
    assert (verdict.held, verdict.measured, verdict.count) == (1, 2, "1 of 2")


def test_a_partial_recording_votes_with_what_it_measured_in_turns():
    """Of nine recordings of a claim eight lacked some case, and the ninth was among the best."""
    cases, sessions = ["eager", "fused", "large"], ["s", "s", "t"]
    rows = frame(
        recording=["a"] * 3 + ["b"] * 3 + ["c"] * 2 + ["d"] * 2 + ["e"],
        case=cases * 2 + ["eager", "fused", "fused", "large", "fused"],
        session=sessions * 2 + ["u", "u", "v", "w", "x"],
        median_ms=[2.0, 1.0, 9.0, 2.2, 1.0, 9.9, 3.0, 4.0, 0.1, 30.0, 0.1],
    )  # fmt: skip

    def rule(found):
        """It is {gain:2×} as fast, the large one takes {ms:2 ms}."""
        ms = found.set_index("case")["median_ms"]
        return {"gain": ms["eager"] / ms["fused"], "ms": ms["large"]}, ms["eager"] > ms["fused"]

    claim = stated(rows, rule)
    told = {e.recording: e for e in claim.verdicts[0].evaluations}
    assert claim.verdicts[0].text("03") == "holds in 2 of 3 recordings, and in 1 more in part"
    assert told["c"].values == {"gain": 0.75, "ms": 9.9} and not told["c"].holds
    assert told["d"].values == {"gain": 2.2, "ms": 30.0}, "its fused has no eager of the same turns"
    assert "e" not in told, "no whole session"
    assert claim.sentence().startswith("It is 2.0× [0.75–2.2]")


@pytest.mark.parametrize(("least", "told"), [(0, "holds"), (1e9, "does not hold")])
def test_a_claim_of_published_figures_names_no_recording(least, told):
    rows = published.as_rows("compilers_history", "00_x")

    def rule(found):
        """The tables have {n:,d} rows."""
        return {"n": len(found)}, len(found) > least

    assert stated(rows, rule).verdict() == f"{told} in the published tables."


@pytest.mark.parametrize(
    "rule",
    [
        lambda found: ({"x": found["absent"].max()}, True),
        lambda found: ({"x": float("nan")}, True),
        lambda found: ({"x": 1.0}, float("nan")),
        lambda found: ({"x": found["median_ms"].iloc[7]}, True),
    ],
    ids=["missing column", "NaN", "NaN for an answer", "no row"],
)
def test_what_could_not_be_computed_is_not_measured(rule):
    rule.__doc__ = "It is {x:3}."
    claim = stated(frame(median_ms=[1.0]), rule)
    assert claim.verdicts[0].measured == 0
    assert claim.sentence() == "It is —."


def test_a_claim_needs_its_sentence():
    with pytest.raises(ValueError, match="needs its sentence"):
        stating.claim("x", frame(median_ms=[1.0]))(lambda found: ({}, True))


def test_cases_of_claims_are_those_of_their_selections():
    rows = frame(case=["1", "2", "3"], median_ms=[1.0, 2.0, 3.0])

    def rule(found):
        """Something."""
        return {}, len(found) > 0

    assert recording.cases_of([stated(rows[rows["median_ms"] < 3], rule)]) == {"1", "2"}


def test_the_analysis_of_a_notebook_runs_without_its_measuring(tmp_path):
    def cell(text, *tags):
        return {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": text}

    notebook = tmp_path / "n.ipynb"
    cells = [cell("x = 1"), cell("raise SystemExit", "measure"), cell("print(x)")]
    notebook.write_text(json.dumps({"cells": cells}))
    assert recording.analysis_of(notebook).claims == []
