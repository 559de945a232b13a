"""How claims are evaluated; those of the notebooks are held in `tests/test_report_paper.py`."""

import contextlib

import pandas as pd
import pytest
from nbformat import NotebookNode

import claims_checks
from fusedlib.bench import machine
from measure import study
from press import claims as stating
from press import display
from press.claims import Claim
from press.headlines import counts
from press.pages.outputs import where_it_holds


def frame(**columns) -> pd.DataFrame:
    size = len(next(iter(columns.values())))
    base = {"machine": "m", "recording": "a", "status": "ok", "profile": "full"}
    result = pd.DataFrame(
        {name: [value] * size for name, value in base.items()}
        | {"device_type": ["cuda"] * size, "own": [False] * size}
        | columns
    )
    result = result.assign(case=result.get("case", [str(i) for i in range(size)]))
    result["machine"] = pd.Categorical(result["machine"], categories=["m", machine.key()])
    result.attrs["study"] = "00_x"
    return result


def stated(rows, rule, **options) -> Claim:
    result = stating.claim("x", rows, **options)(rule)
    stating.CLAIMS.remove(result)
    return result


def test_a_number_is_the_newest_recording_s_with_the_range_over_all():
    """A median over recordings of different code is a number that nobody measured."""
    rows = frame(recording=["a", "b", "c"], case=["1"] * 3, median_ms=[1.011, 1.165, 1.053])

    def rule(measured):
        """The step takes {ms:4 ms}."""
        return {"ms": measured["median_ms"].iloc[0]}, measured["median_ms"].iloc[0] < 1.2

    claim = stated(rows, rule)
    assert claim.sentence() == "The step takes 1.053 ms."
    assert "m: holds in 3 of 3 recordings: 1.053 ms [1.011–1.165]" in claim.summary()
    assert "this machine: not measured; on a large GPU `make study ONLY=00_x" in claim.summary()
    mine = rows.assign(machine=machine.key(), own=True, median_ms=[9.0, 7.0, 8.0])
    both = pd.concat([rows, mine]).astype({"machine": rows["machine"].dtype})
    claim = stated(both, rule)
    assert claim.sentence() == "The step takes 1.053 ms."
    assert (
        "this machine: does not hold: 8.000 ms [7.000–9.000]. Measured here: The step takes 8."
        in claim.summary()
    )


def test_a_recording_that_fails_is_counted():
    rows = frame(
        recording=["a", "a", "b", "b"], case=["1", "2", "1", "2"], median_ms=[1.0, 2.0, 1.0, 9.0]
    )

    def rule(measured):
        """The slowest takes {ms:2 ms}."""
        return {"ms": measured["median_ms"].max()}, measured["median_ms"].max() < 5

    standing = stated(rows, rule).standings[0]
    assert (standing.held, standing.measured, standing.count) == (1, 2, "1 of 2")


@pytest.mark.parametrize(
    ("slow", "headline", "refused"),
    [("other", "Fast", False), ("m", "Fast", True), ("m", "", False)],
)
def test_a_contradiction_is_shown_and_red_where_a_headline_s_machine_leads(
    monkeypatch, slow, headline, refused
):
    """Red on any machine it made authors reword until all agreed (issue 51.4)."""
    monkeypatch.setattr(claims_checks, "RECORDED", {"m", "other"})
    ms = {"m": [1.0, 1.0], "other": [1.0, 1.0], slow: [9.0, 1.0]}
    rows = pd.concat(
        [frame(recording=["a", "b"], case=["1"] * 2, median_ms=of) for of in ms.values()]
    )
    names = [name for name in ms for _ in range(2)]
    rows["machine"] = pd.Categorical(names, categories=["m", "other", machine.key()])
    rows.attrs["study"] = "00_x"
    claim = stated(rows, slowest, headline=headline, first="All are fast.")
    with pytest.raises(AssertionError, match="x on m") if refused else contextlib.nullcontext():
        claims_checks.check_each_holds_or_says_where_not([claim])
    assert f"{slow}: holds in 1 of 2 recordings" in claim.summary()
    assert claim.summary().endswith("First stated as “All are fast.”.")


def slowest(measured):
    """The slowest takes {ms:2 ms}."""
    return {"ms": measured["median_ms"].max()}, measured["median_ms"].max() < 5


def test_only_recordings_of_all_cases_answer_and_none_borrows():
    rows = frame(
        recording=["a", "a", "b", "c", "c"], case=["1", "2", "1", "1", "2"],
        median_ms=[1.0, 2.0, 9.0, 1.0, None], status=["ok", "ok", "ok", "ok", "oom"],
    )  # fmt: skip
    standing = stated(rows, slowest).standings[0]
    assert [e.recording for e in standing.evaluations] == ["a", "c"], (
        "b lacks a case; oom is present"
    )
    against = "does not hold in a recording of 1 of its 2 cases"
    assert standing.count == f"2 of 2, {against}", "b has one case, which is too slow"
    assert standing.text.endswith(f"{against} (“The slowest takes 9.0 ms.”)")


def all_fast(measured):
    """In {fast:,d} of {all:,d} cases it takes less than 5 ms, {slow:2 ms} at most."""
    ms = measured["median_ms"]
    return {"fast": (ms < 5).sum(), "all": len(ms), "slow": ms.max()}, (ms < 5).mean() > 0.7


@pytest.mark.parametrize(
    ("theirs", "verdict"),
    [([1.0, 2.0, 3.0], "holds"), ([1.0, 8.0, 9.0], "does not hold")],
)
@pytest.mark.parametrize("lack", ["no row", "no figure"])
def test_a_recording_of_some_cases_is_listed_with_what_these_say(theirs, verdict, lack):
    """Of H100 3 of 5 directions were within a bound, and its recording was not counted."""
    rows = frame(case=list("1234"), median_ms=[1.0, 2.0, 3.0, 4.0])
    other = rows.assign(machine="nvidia-h100", median_ms=[*theirs, None])
    other["status"] = ["ok", "ok", "ok", "unavailable"]
    both = pd.concat([rows, other if lack == "no figure" else other.iloc[:3]])
    both["machine"] = pd.Categorical(both["machine"], ["m", "nvidia-h100", machine.key()])

    def rule(measured):
        values, holds = all_fast(measured)
        return values, holds if measured["median_ms"].notna().all() else float("nan")

    rule.__doc__ = all_fast.__doc__
    claim = stated(both, rule)
    h100 = claim.standings[1]
    told = f"{verdict} in a recording of 3 of its 4 cases"
    assert h100.text == told and not h100.measured
    assert f"H100: {told}" in claim.summary()
    most = f"{max(theirs):.1f} ms"
    assert most in claim.further_numbers(h100) and most not in claim.sentence(), "its numbers"
    assert claim.standings_as_json()[1]["numbers"]["slow"] == f"{most}*"
    shown = {"standings": [s.as_json() for s in claim.standings]}
    assert (f"{h100.text} on the H100", verdict != "holds") in where_it_holds(shown)
    counted = counts(NotebookNode(shown), own=False)
    assert counted == f"m: 1 of 1; H100: {told if verdict != 'holds' else 'partly measured'}"


def test_a_recording_of_some_cases_beside_whole_ones_shows_the_rows_that_speak_against_it():
    rows = frame(
        recording=["a"] * 4 + ["b"] * 2, case=list("1234") + list("12"),
        median_ms=[1.0, 2.0, 3.0, 4.0, 7.0, 9.0],
    )  # fmt: skip
    claim = stated(rows, all_fast)
    told = "In 0 of 2 cases it takes less than 5 ms, 9.0 ms at most."
    partly = f"does not hold in a recording of 2 of its 4 cases (“{told}”)"
    assert claim.standings[0].text == f"holds in 1 of 1 recording, {partly}"
    assert claim.sentence() == "In 4 of 4 cases it takes less than 5 ms, 4.0 ms at most."
    assert claim.standings[0].count.startswith("1 of 1, does not hold in a recording")


def test_a_rule_that_cannot_answer_for_some_cases_gives_no_verdict():
    """It needs every case: that one is missing speaks neither for the claim nor against it."""
    rows = frame(
        recording=["a"] * 3 + ["b"] * 2, case=list("123") + list("12"),
        median_ms=[1.0, 2.0, 3.0, 7.0, 9.0],
    )  # fmt: skip

    def rule(measured):
        """It takes {ms:2 ms}."""
        ms = measured["median_ms"]
        return {"ms": ms.max()}, len(ms) == 3 and ms.max() < 5

    standing = stated(rows, rule).standings[0]
    assert not standing.contrary
    assert standing.text == "holds in 1 of 1 recording", "nothing of the one that cannot tell"


def test_where_the_leading_machine_measured_nothing_the_sentence_is_another_s_and_says_so():
    """A folder of one's own led, and every number became "H200 1.0 ms; H100 1.1 ms"."""
    h200, h100 = (
        frame(median_ms=[ms]).assign(machine=name)
        for name, ms in (("nvidia-h200", 1.0), ("nvidia-h100", 1.1))
    )
    both = pd.concat([h200, h100])
    names = ["my-gpu", "nvidia-h200", "nvidia-h100", machine.key()]
    both["machine"] = pd.Categorical(both["machine"], names)
    claim = stated(both, slowest)
    assert claim.sentence() == "H200: The slowest takes 1.0 ms."
    assert "H100: holds in 1 of 1 recording: 1.1 ms" in claim.summary()
    assert claim.numbers() == {"ms": "1.0 ms (H200)"}


def test_cases_that_the_full_profile_does_not_measure_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(study, "names", lambda: ["00_x"])
    monkeypatch.setattr(study, "full_cases", lambda name: {"1": {}, "2": {}})
    rows = frame(
        recording=["a", "a", "a", "b", "b"], case=["1", "2", "former", "1", "2"],
        median_ms=[1.0, 2.0, 99.0, 1.0, 3.0], study=["00_x"] * 5,
    )  # fmt: skip
    claim = stated(rows, slowest)
    assert claim.sentence() == "The slowest takes 3.0 ms." and claim.standings[0].held == 2
    older = rows.assign(measured_at=["2026-11-02"] * 3 + ["2026-11-01"] * 2)
    assert stated(older, slowest).sentence() == "The slowest takes 2.0 ms."


def test_another_recorded_machine_s_number_stands_in_its_verdict_where_its_digits_differ():
    rows = frame(median_ms=[1.0])
    other = rows.assign(machine="nvidia-h100", median_ms=[1.04])
    both = pd.concat([rows, other])
    both["machine"] = pd.Categorical(both["machine"], ["m", "nvidia-h100", machine.key()])

    def two(measured):
        """It takes {ms:2 ms}, or {exact:3 ms}."""
        ms = measured["median_ms"].iloc[0]
        return {"ms": ms, "exact": ms}, ms > 0

    claim = stated(both, two)
    assert claim.sentence() == "It takes 1.0 ms, or 1.00 ms."
    assert claim.numbers() == {"ms": "1.0 ms", "exact": "1.00 ms"}
    assert (
        "m: holds in 1 of 1 recording; H100: holds in 1 of 1 recording: 1.04 ms for 1.00 ms;"
        in claim.summary()
    )
    alone = stated(both[both["machine"] == "nvidia-h100"], two)
    assert alone.sentence() == "H100: It takes 1.0 ms, or 1.04 ms."


def test_an_assembled_recording_is_named_where_a_claim_rests_on_it_alone():
    rows = frame(recording=["assembled"], median_ms=[1.0])
    standing = stated(rows, slowest).standings[0]
    assert standing.count == "1 of 1, assembled"
    assert standing.text == "holds in 1 of 1 recording, assembled from several runs"


@pytest.mark.parametrize("repeats", ["counted", "same seeds"])
@pytest.mark.parametrize(
    ("ms", "count", "text"),
    [(1, "{}", "holds ({})"), (9, "does not hold, {}", "does not hold, {}")],
)
def test_what_cannot_vary_says_why_instead_of_counting(repeats, ms, count, text):
    rows = frame(recording=["a", "b"], case=["1", "1"], median_ms=[ms, ms])
    claim = stated(rows, slowest, repeats=repeats)
    assert claim.standings[0].count == count.format(repeats)
    assert claim.standings[0].text == text.format(repeats)


@pytest.mark.parametrize(
    ("x", "answer", "sentence"),
    [(float("nan"), True, "It is —."), (1.0, float("nan"), "It is 1.00.")],
    ids=["NaN", "NaN for an answer"],
)
def test_what_could_not_be_computed_is_partly_measured(x, answer, sentence):
    def rule(measured):
        """It is {x:3}."""
        return {"x": x}, answer

    claim = stated(frame(median_ms=[1.0]), rule)
    assert claim.standings[0].measured == 0 and not claim.standings[0].errors
    assert claim.standings[0].text == (
        "measured without a number that the claim needs, too little to tell"
    )
    assert claim.sentence() == sentence


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (lambda measured: ({"x": measured["absent"].max()}, True), "a: KeyError: 'absent'"),
        (lambda measured: ({"x": measured["median_ms"].iloc[7]}, True), "a: IndexError"),
        (lambda measured: ({"x": "a" + 1}, True), "a: TypeError"),
    ],
    ids=["missing column", "no row", "type"],
)
def test_an_author_s_mistake_is_an_error_and_seen(rule, error):
    rule.__doc__ = "It is {x:3}."
    with display.captured() as shown:
        claim = stated(frame(median_ms=[1.0]), rule)
    assert claim.standings[0].errors[0].startswith(error)
    [output] = shown
    [(text, fails)] = where_it_holds(output["metadata"]["fusedlib"])
    assert text.startswith("error in the claim: " + error) and fails
