"""Claims: how rows become ✓, ✗ or once, and what holds of every claim that stands in a file."""

import importlib
import re
import string
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import claims
from claims_checks import names_in, turns
from fusedlib.bench import machine as machines
from press import published, run, say
from press.headlines import counts
from press.pages.outputs import where_it_holds
from report_sample import outputs_of

FILES = sorted(Path(claims.__file__).parent.glob("[a-z]*.py"))
TOPICS = [file.stem for file in FILES]
for topic in TOPICS:
    importlib.import_module(f"claims.{topic}")


def rows(ms: dict[tuple[str, str], list[float | None]]) -> pd.DataFrame:
    """A row a time, each of a race of its own, by machine and set; sets are older first."""
    lines = [
        {"machine": machine, "set": of_set, "race": f"r{at}", "provider": "fused", "status": "ok",
         "measured_at": f"2026-01-0{day}", "median_ms": each}
        for day, ((machine, of_set), every) in enumerate(ms.items())
        for at, each in enumerate(every)
    ]  # fmt: skip
    return pd.DataFrame(lines)


Stated = Callable[..., say.Claim]


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> Stated:
    """A claim over hand-made rows, of which all races but "beyond" must be there."""
    monkeypatch.setattr(say, "CLAIMS", {})

    def of(measured: pd.DataFrame, rule: say.Rule, **options: Any) -> say.Claim:
        full = {*say._pairs(measured)} - {("beyond", "fused")}
        monkeypatch.setattr(say, "rows_of", lambda topic: measured)
        monkeypatch.setattr(say, "_in_full", lambda topic: frozenset(full))
        say.claim("kernels/x", **{"of": lambda every: every} | options)(rule)
        return say.evaluate("kernels/x")

    return of


def slowest(measured):
    """The slowest takes {ms:2 ms}."""
    return {"ms": measured["median_ms"].max()}, measured["median_ms"].max() < 5


@pytest.mark.parametrize(
    ("ms", "options", "count", "text"),
    [
        ([[1.0]], {}, "once", "holds in 1 of 1 recording"),
        ([[1.0], [2.0]], {}, "✓ 2 of 2", "holds in 2 of 2 recordings"),
        ([[9.0], [1.0]], {}, "✗ 1 of 2", "holds in 1 of 2 recordings"),
        ([[9.0]], {}, "✗ 0 of 1", "does not hold"),
        ([[1.0]], {"repeats": "counted"}, "✓ counted", "holds (counted)"),
        ([[1.0], [9.0]], {"repeats": "same seeds"}, "✗ same seeds", "does not hold"),
        ([[None]], {}, "", "no recording has all of its numbers"),
        ([], {}, "", "no recording has all of its cases"),
    ],
)
def test_a_claim_holds_is_contradicted_or_was_measured_once(stated, ms, options, count, text):
    measured = rows({("H200", f"s{at}"): every for at, every in enumerate(ms)} | {("H1", "s"): [1]})
    standing = stated(measured, slowest, **options).standings[0 if ms else -1]
    assert (standing.count, standing.text) == (count, text)
    assert standing.status == count.partition(" ")[0]


def test_a_set_that_was_put_together_says_so(stated):
    claim = stated(rows({("H200", "assembled"): [1.0]}), slowest)
    assert "H200: holds in 1 of 1 recording, assembled from several runs." in claim.summary()


def test_numbers_are_the_newest_set_s_of_the_first_machine_and_others_follow(stated):
    ms = {("H100", "a"): [2.0], ("H200", "a"): [4.0], ("H200", "b"): [1.0], ("H200", "c"): [3.0]}
    claim = stated(rows(ms), slowest, first="All are fast.")
    assert claim.sentence() == "The slowest takes 3.0 ms."
    assert claim.numbers() == {"ms": "3.0 ms"}
    assert claim.summary() == (
        "H200: holds in 3 of 3 recordings: 3.0 ms [1.0–4.0]; "
        "H100: holds in 1 of 1 recording: 2.0 ms. First stated as “All are fast.”."
    )
    claim = stated(rows(ms), slowest, lead="H100")
    assert claim.sentence() == "The slowest takes 2.0 ms."
    claim = stated(rows({("H200", "a"): [None], ("H100", "a"): [2.0]}), slowest)
    assert claim.sentence() == "H100: The slowest takes 2.0 ms."
    assert claim.numbers() == {"ms": "2.0 ms (H100)"}
    claim = stated(rows({("H200", "a"): [None]}), slowest)
    assert claim.sentence() == "The slowest takes —."


def test_another_machine_s_numbers_stand_beside_the_sentence_s_own(stated):
    def both(measured):
        """It takes {least:2 ms} to {most:2 ms}."""
        return {"least": measured["median_ms"].min(), "most": measured["median_ms"].max()}, True

    ms = {("H200", "a"): [1.0, 4.0], ("H100", "a"): [3.0, 4.0], ("H100", "b"): [2.0, 4.0]}
    assert stated(rows(ms), both).summary() == (
        "H200: holds in 1 of 1 recording; "
        "H100: holds in 2 of 2 recordings: 2.0 ms [2.0–3.0] instead of 1.0 ms."
    )


def test_what_repeats_by_nature_is_said_once_of_machines_that_say_the_same(stated):
    ms = {("H200", "a"): [1.0], ("H100", "a"): [1.0]}
    summary = stated(rows(ms), slowest, repeats="same seeds").summary()
    assert summary == "H200 and H100: holds (same seeds)."
    ms[("H100", "a")] = [2.0]
    summary = stated(rows(ms), slowest, repeats="same seeds").summary()
    assert summary == "H200: holds (same seeds); H100: holds (same seeds): 2.0 ms."


def test_this_machine_answers_too(stated):
    own = machines.label(machines.key())
    claim = stated(rows({("H200", "a"): [1.0], (own, "a"): [9.0]}), slowest)
    assert "; this machine: does not hold: 9.0 ms." in claim.summary()
    assert [one["own"] for one in claim.standings_as_json()] == [False, True]


def test_only_sets_of_all_cases_answer_none_borrows_and_the_last_row_counts(stated):
    measured = rows({("H200", "a"): [1.0, 2.0], ("H200", "b"): [9.0]})
    [standing, _] = stated(measured, slowest).standings
    assert [answer.set for answer in standing.answers] == ["a"], "b lacks a case"
    beyond = measured.iloc[[0]].assign(race="beyond", median_ms=9.0)
    again = measured.iloc[[0]].assign(median_ms=3.0, measured_at="2026-01-08")
    [standing, _] = stated(pd.concat([measured, beyond, again]), slowest).standings
    assert [answer.values for answer in standing.answers] == [{"ms": 3.0}]


def test_what_a_rule_raises_is_shown(stated):
    def broken(measured):
        """It takes {ms:2 ms}."""
        return {"ms": measured["missing"].max()}, True

    def without(measured):
        """It takes {ms:2 ms}."""
        return {}, True

    for rule, error in ((broken, "a: KeyError: 'missing'"), (without, "a: KeyError: 'ms'")):
        claim = stated(rows({("H200", "a"): [1.0], ("H100", "a"): [1.0]}), rule)
        assert f"H200: error in the claim: {error}" in claim.summary()
        assert (claim.standings[0].status, claim.sentence()) == ("", "It takes —.")
        [said, *_] = claim.standings_as_json()
        assert (said["errors"], said["measured"]) == ([error], 0)


def test_a_claim_about_published_tables_is_about_nobody_else(stated):
    table = published.as_cases("warmup")
    assert table["race"].is_unique and {*table["machine"]} == {published.MACHINE}

    def rule(measured):
        """The tables have {lines:,d} rows."""
        return {"lines": len(measured)}, len(measured) == len(table)

    claim = stated(rows({("H200", "a"): [1.0]}), rule, of=lambda _: table)
    assert [(one.machine, one.status) for one in claim.standings] == [("published", "✓")]
    assert claim.summary() == "holds in the published tables."
    assert claim.sentence() == f"The tables have {len(table)} rows."


@pytest.mark.parametrize("wrong", [{"name": "x"}, {"repeats": "often"}])
def test_a_claim_without_topic_sentence_or_known_repeats_is_refused(wrong):
    options = {"name": "kernels/x", "of": lambda every: every} | wrong
    with pytest.raises(ValueError, match="needs a name"):
        say.claim(**options)
    with pytest.raises(ValueError, match="needs its sentence"):
        say.claim("kernels/x", of=options["of"])(lambda measured: ({}, True))


def test_pages_read_what_say_shows(stated):
    ms = {("H200", "a"): [1.0], ("H200", "b"): [2.0], ("H100", "a"): [9.0]}
    stated(rows(ms), slowest, headline="Fast", first="Quick.")
    [output] = outputs_of(lambda: say.say("kernels/x"))
    shown = output.metadata.fusedlib
    assert (shown.kind, shown.study, shown.name) == ("claim", "kernels", "x")
    assert shown.numbers == {"ms": "2.0 ms"}
    assert counts(shown, own=False) == "H200: ✓ 2 of 2; H100: ✗ 0 of 1"
    assert [one["machine"] for one in shown.standings[:2]] == ["nvidia-h200", "nvidia-h100"]
    assert where_it_holds(shown) == [
        ("holds in 2 of 2 recordings on the H200: 2.0 ms [1.0–2.0]", False),
        ("does not hold on the H100: 9.0 ms", True), ("first stated as “Quick.”", False),
    ]  # fmt: skip


# --- every claim ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every() -> Iterator[Callable[[str], list[say.Claim]]]:
    """The claims of a topic over the repository's rows alone, seen from a machine without rows."""
    with run.recorded_rows():
        yield cache(say.every)


@pytest.mark.parametrize("file", FILES, ids=TOPICS)
def test_all_claims_of_a_file_are_stated_and_none_hides_another(every, file):
    written = re.findall(r'^@claim\(\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
    assert [f"{one.topic}/{one.name}" for one in every(file.stem)] == written
    assert {*written} <= {f"{one.topic}/{one.name}" for one in every("")}


AWAITED = {"log-probs"}
"""Claims whose cases no recording has yet; they leave with their first rows."""


@pytest.mark.parametrize("topic", TOPICS)
def test_each_claim_has_numbers_holds_where_it_leads_and_says_where_not(every, topic):
    for claim in every(topic):
        fields = {name for _, name, *_ in string.Formatter().parse(claim.template) if name}
        for standing in claim.standings:
            assert not standing.errors, f"{claim.name} on {standing.machine}: {standing.errors}"
            assert all(fields <= {*answer.values} for answer in standing.decided), claim.name
            if standing.status == "✗":
                assert not (claim.headline and standing.machine == claim.standings[0].machine)
                assert standing.held < len(standing.decided) and standing.text in claim.summary()
        awaited = claim.name in AWAITED
        assert bool(claim.shown) != awaited, f"{claim.name} is measured, or no longer"
        assert awaited or "—" not in claim.sentence(), claim.sentence()


@pytest.mark.parametrize("topic", TOPICS)
def test_some_change_of_its_rows_makes_each_claim_false(every, topic):
    """In each set; what made it false in one is tried first in the next, and what the rule names
    before all else."""
    for claim in every(topic):
        found: list = []
        named = names_in(claim.rule.__code__)
        for _, of_set, part in claim.sets():
            if claim.answer(of_set, part).holds is None:
                continue
            tried = sorted(turns(part), key=lambda turn: turn.subject not in named)
            false = (
                turn for turn in (*found[-1:], *tried)
                if claim.answer(of_set, turn.of(part)).holds is False
            )  # fmt: skip
            turn = next(false, None)
            assert turn is not None, f"{claim.name} cannot fail"
            found.append(turn)
        assert found or claim.name in AWAITED, claim.name


def test_the_kernels_claims_need_the_cases_that_they_needed_before(every):
    """As many as when each claim stood in a cell of a notebook."""
    needed = {claim.name: len(next(claim.sets())[2]) for claim in every("kernels")}
    assert needed == {
        "models": 112, "fp32": 20, "clock": 16, "few-tokens": 48, "few-fp32": 8,
        "tf32": 48, "fp32-rates": 2, "lengths": 4,
    }  # fmt: skip
