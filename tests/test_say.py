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
from press import origin, published, run, say, show
from report_sample import outputs_of
from study import provenance
from study.memory import from_tables

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
    ("ms", "options", "mark"),
    [
        ([[1.0]], {}, "once H200"),
        ([[1.0], [2.0]], {}, "✓ H200"),
        ([[9.0], [1.0]], {}, "✗ H200"),
        ([[9.0]], {}, "✗ H200"),
        ([[1.0]], {"repeats": "counted"}, "✓ H200"),
        ([[1.0], [9.0]], {"repeats": "same seeds"}, "✗ H200"),
        ([[None]], {}, ""),
        ([], {}, ""),
    ],
)
def test_a_claim_holds_is_contradicted_or_was_measured_once(stated, ms, options, mark):
    measured = rows({("H200", f"s{at}"): every for at, every in enumerate(ms)} | {("H1", "s"): [1]})
    claim = stated(measured, slowest, **options)
    machine = [*claim.answers][0 if ms else -1]
    assert (claim.mark(machine), claim.status(machine)) == (mark, mark.partition(" ")[0])


KERNELS = "fusedlib/ops/loss/kernels.py"


def test_a_mark_of_other_code_has_its_days_and_the_ledger_the_commits(stated, monkeypatch):
    """Whatever the day: a recording of this morning may be of other kernels, and one without
    hashes is of nobody knows what."""
    now = provenance.files()
    files = {
        "kernel": now | {KERNELS: "0" * 40}, "none": None, "same": now,
        "version": now | {"fusedlib/__init__.py": "0" * 40},
        "clock": now | {"fusedlib/bench/clock.py": "0" * 40},
        "moved": {f"moved/{path}": content for path, content in now.items()},
    }  # fmt: skip
    lines = [{"began": f"2026-11-{day}T10:00:00", "commit": f"{code}abcdef", "files": files[code]}
             for day, code in enumerate(files, 23)]  # fmt: skip
    monkeypatch.setattr(origin, "recordings", lambda: pd.DataFrame(lines))
    marks = {}
    for code, line in zip(files, lines, strict=True):
        of = {name: line[name] for name in ("began", "commit")}
        claim = stated(rows({("H200", "a"): [1.0, 2.0]}).assign(**of), slowest)
        marks[code] = claim.marks()
    same = ["once H200"]
    assert marks == dict.fromkeys(files, same) | {
        "kernel": ["once H200, 23 Nov"], "none": ["once H200, 24 Nov"],
    }  # fmt: skip
    monkeypatch.setattr(say, "every", lambda topic: [claim])
    assert say.ledger("kernels")["rows of"].tolist() == ["28 Nov, movedab"]


def test_a_row_that_failed_decides_nothing_and_a_wrong_one_of_fusedlib_s_contradicts(stated):
    def count(measured):
        """It takes {ms:2 ms} in all {cases:,d} cases."""
        ms = measured["median_ms"].dropna()
        return {"ms": ms.max(), "cases": len(measured)}, len(ms) == 2

    def strict(measured):
        """It takes {ms:2 ms}."""
        return {"ms": measured.set_index("race")["median_ms"].loc["r0"].item()}, True

    whole = rows({("H200", "a"): [1.0, 2.0], ("H200", "b"): [1.0, 2.0]})
    some = (whole["set"] == "b") & (whole["race"] == "r1")
    for status, provider, marks in (
        ("ok", "fused", ["✓ H200"]), ("failed", "fused", ["once H200"]),
        ("failed", "liger", ["once H200"]), ("wrong", "fused-mlp", ["✗ H200"]),
        ("wrong", "liger", ["✗ H200"]),  # the rule wants both
    ):  # fmt: skip
        bad = whole.assign(status=whole["status"].mask(some, status))
        bad["provider"] = bad["provider"].mask(bad["race"] == "r1", provider)
        bad["median_ms"] = bad["median_ms"].mask(some & (status != "ok"))
        claim = stated(bad, count)
        assert [mark.partition(":")[0] for mark in claim.marks()] == marks, (status, provider)
    for status, marks in (("failed", ["H200: not all cases"]), ("wrong", ["✗ H200"])):
        gone = whole[:2].assign(status=status, median_ms=None).drop(columns="race")
        claim = stated(gone.assign(race=["r1", "r2"]), strict)
        assert claim.marks() == marks, "whatever the rule makes of it"


def test_a_machine_that_lacks_a_case_says_so(stated):
    ms = {("H200", "a"): [1.0, 2.0], ("H100", "a"): [1.0]}
    claim = stated(rows(ms), slowest)
    assert claim.marks() == ["once H200", "H100: not all cases"] and claim.status("H100") == ""
    beyond = rows(ms).query("machine == 'H100'").assign(race="beyond")
    claim = stated(pd.concat([rows(ms).query("machine == 'H200'"), beyond]), slowest)
    assert claim.marks() == ["once H200"], "it has none that is measured today"


def test_numbers_are_the_newest_set_s_of_the_first_machine_and_others_beside(stated):
    ms = {("H100", "a"): [2.0], ("H200", "a"): [4.0], ("H200", "b"): [1.0], ("H200", "c"): [3.0]}
    claim = stated(rows(ms), slowest, first="All are fast.")
    assert claim.sentence() == "The slowest takes 3.0 ms."
    assert claim.numbers() == {"ms": "3.0 ms"} and claim.numbers("H100") == {"ms": "2.0 ms"}
    assert claim.marks() == ["✓ H200", "once H100: 2.0 ms"], "numbers of others at their marks"
    claim = stated(rows(ms), slowest, lead="H100")
    assert claim.sentence() == "The slowest takes 2.0 ms."
    assert claim.marks() == ["once H100", "✓ H200: 3.0 ms"]
    claim = stated(rows(ms | {("H100", "b"): [3.0]}), slowest)
    assert claim.marks() == ["✓ H200", "✓ H100"], "the same on both"
    claim = stated(rows(ms), slowest, unchanged=True)
    assert claim.sentence() == "The slowest takes 1.0–4.0 ms."
    claim = stated(rows({("H200", "a"): [None], ("H100", "a"): [2.0]}), slowest)
    assert claim.sentence() == "H100: The slowest takes 2.0 ms."
    claim = stated(rows({("H200", "a"): [None]}), slowest)
    assert (claim.sentence(), claim.marks()) == ("The slowest takes —.", ["not measured"])


def test_this_machine_answers_too(stated):
    own = machines.label(machines.key())
    claim = stated(rows({("H200", "a"): [1.0], (own, "a"): [9.0]}), slowest)
    assert claim.marks() == ["once H200", "✗ this machine: 9.0 ms"]


def test_only_sets_of_all_cases_answer_none_borrows_and_the_last_row_counts(stated):
    measured = rows({("H200", "a"): [1.0, 2.0], ("H200", "b"): [9.0]})
    answers = stated(measured, slowest).answers["H200"]
    assert [answer.set for answer in answers] == ["a"], "b lacks a case"
    beyond = measured.iloc[[0]].assign(race="beyond", median_ms=9.0)
    again = measured.iloc[[0]].assign(median_ms=3.0, measured_at="2026-01-08")
    answers = stated(pd.concat([measured, beyond, again]), slowest).answers["H200"]
    assert [answer.values for answer in answers] == [{"ms": 3.0}]


def test_a_rival_that_older_sets_lack_is_compared_where_it_ran_and_ends_no_set(stated):
    measured = rows({("H200", "a"): [1.0], ("H200", "b"): [2.0]})
    newer = measured.iloc[[1]].assign(provider="liger", median_ms=9.0)
    every = pd.concat([measured, newer])

    def named(which):
        return lambda rows: rows.query(f"provider == '{which}'")

    claim = stated(every, slowest, of=named("fused"), optional=named("liger"))
    assert [answer.values["ms"] for answer in claim.answers["H200"]] == [1.0, 9.0]
    assert claim.status("H200") == "✗"
    strict = stated(every, slowest, of=lambda rows: rows).answers["H200"]
    assert [answer.set for answer in strict] == ["b"]


def test_what_a_rule_raises_is_shown(stated):
    def broken(measured):
        """It takes {ms:2 ms}."""
        return {"ms": measured["missing"].max()}, True

    def without(measured):
        """It takes {ms:2 ms}."""
        return {}, True

    for rule, error in ((broken, "a: KeyError: 'missing'"), (without, "a: KeyError: 'ms'")):
        claim = stated(rows({("H200", "a"): [1.0], ("H100", "a"): [1.0]}), rule)
        assert claim.marks()[0] == f"error in the claim: {error}"
        assert (claim.status("H200"), claim.sentence()) == ("", "It takes —.")


def test_a_claim_about_published_tables_is_about_nobody_else(stated):
    table = from_tables(show.published("memory"))
    assert table["race"].is_unique and {*table["machine"]} == {published.MACHINE}

    def rule(measured):
        """The tables have {lines:,d} rows."""
        return {"lines": len(measured)}, len(measured) == len(table)

    claim = stated(rows({("H200", "a"): [1.0]}), rule, of=lambda _: table)
    assert [(one, claim.status(one)) for one in claim.answers] == [("published", "✓")]
    assert claim.marks() == ["✓ published"]
    assert claim.sentence() == f"The tables have {len(table)} rows."


@pytest.mark.parametrize("wrong", [{"name": "x"}, {"repeats": "often"}])
def test_a_claim_without_topic_sentence_or_known_repeats_is_refused(wrong):
    options = {"name": "kernels/x", "of": lambda every: every} | wrong
    with pytest.raises(ValueError, match="needs a name"):
        say.claim(**options)
    with pytest.raises(ValueError, match="needs its sentence"):
        say.claim("kernels/x", of=options["of"])(lambda measured: ({}, True))


def test_pages_read_what_say_shows_and_the_ledger_has_each_set(stated, monkeypatch):
    ms = {("H200", "a"): [1.0], ("H200", "b"): [2.0], ("H100", "a"): [9.0]}
    claim = stated(rows(ms), slowest)
    [output] = outputs_of(lambda: say.say("kernels/x"))
    shown = output.metadata.fusedlib
    assert (shown.kind, shown.name, shown.sentence) == ("claim", "kernels-x", claim.sentence())
    assert shown.marks == ["✓ H200", "✗ H100: 9.0 ms"]
    monkeypatch.setattr(say, "every", lambda topic: [claim])
    lines = say.ledger("kernels")
    assert lines["holds"].tolist() == ["✓", "✓", "✗"]
    assert lines["numbers"].tolist() == ["1.0 ms", "2.0 ms", "9.0 ms"]


def test_a_text_is_filled_with_the_numbers_of_claims():
    text = "{kernels/fp32-rates/ours} with ours, {kernels/fp32-rates/nobody} with that"
    with run.recorded_rows():
        claim = say.evaluate("kernels/fp32-rates")
        numbers = {n: claim.numbers(n)["ours"] for n in ("H200", "H100")}
        assert say.filled(text) == f"{numbers['H200']} with ours, — with that"
        assert say.filled("{kernels/fp32-rates/ours}", "H100") == numbers["H100"] != numbers["H200"]
        rates, ranged = (
            say.evaluate(f"kernels/{n}").decided("H200") for n in ("fp32-rates", "tf32")
        )
        of_both = [answer.rows for answer in (rates[-1], *ranged)]  # a range is over all sets
        both = "{days}; {kernels/fp32-rates/ours}, {kernels/tf32/gain}"
        said = say.filled(both).partition("; ")[0]
        assert said == origin.days(pd.concat(of_both)) != origin.days(rates[-1].rows) != ""
        assert say.filled("{days}") == "—"


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


AWAITED: set[str] = {"models-by-layout", "compiled"}
"""Claims whose cases no recording has yet; they leave with their first rows."""


@pytest.mark.parametrize("topic", TOPICS)
def test_each_claim_has_numbers_holds_where_it_leads_and_says_where_not(every, topic):
    for claim in every(topic):
        fields = {name for _, name, *_ in string.Formatter().parse(claim.template) if name}
        for machine, answers in claim.answers.items():
            assert not any(a.error for a in answers), (claim.name, claim.mark(machine))
            assert all(fields <= {*answer.values} for answer in claim.decided(machine)), claim.name
            if claim.status(machine) == "✗":
                assert not (claim.headline and machine == next(iter(claim.answers)))
                assert claim.mark(machine) in claim.marks()
        awaited = claim.name in AWAITED
        assert bool(claim.leading) != awaited, f"{claim.name} is measured, or no longer"
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


@pytest.mark.parametrize("topic", TOPICS)
def test_no_claim_holds_where_a_row_failed(every, topic):
    for claim in every(topic):
        for _, of_set, part in claim.sets():
            if "status" not in part or not claim.answer(of_set, part).holds:
                continue
            for at in range(len(part)):
                status = [*part["status"]]
                status[at] = "failed"
                assert not claim.answer(of_set, part.assign(status=status)).holds, claim.name


@pytest.mark.parametrize("name", ["precision/batch-invariant", "precision/token-bits"])
def test_all_cases_kept_their_bits_means_each_of_them_has_figures(every, name):
    [claim] = [one for one in every("precision") if one.name == name.partition("/")[2]]
    for _, of_set, part in claim.sets():
        figures = [column for column in part if column.startswith("changed_")]
        for at in part.index[part["provider"].str.startswith("fused")]:
            if name.endswith("token-bits") and part.loc[at, "provider"] != "fused-invariant":
                continue
            if part.loc[at].get("situation") == "packed":
                continue  # of which the sentence does not speak
            lost = part.copy()
            lost.loc[at, "status"] = "oom"
            lost.loc[at, figures] = None
            assert not claim.answer(of_set, lost).holds
