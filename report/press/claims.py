"""A claim: a sentence that an author wrote, with computed numbers and a predicate that must hold.

    @claim("speed", rows.query("T == 16384 and dtype == 'bfloat16'"))
    def _(rows):
        \"\"\"Fused attention is {gain:3×} as fast.\"\"\"
        gain = ratios(rows, "plain").ratio.max()
        return {"gain": gain}, gain > 3

It is evaluated in each recording that holds all cases that it selects under the profile `full`;
nothing is borrowed from another. Numbers are medians over the recordings of a machine, their range
in brackets where rounding shows one. Where another recorded machine's number differs in the digits
printed, it follows in parentheses.
"""

import inspect
import math
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.bench.results import ASSEMBLED
from press import display, plan, published
from press.analysis import leading
from press.formats import MISSING, is_missing, spread

Rule = Callable[[pd.DataFrame], tuple[dict[str, Any], Any]]
THIS = "this machine"
MEASURED, COUNTED, SAME_SEEDS = "measured", "counted", "same seeds"
REPEATS = (MEASURED, COUNTED, SAME_SEEDS)


@dataclass(frozen=True)
class Evaluation:
    """One recording's answer: the numbers, and whether it holds; None: a case gave no figure.

    `error` is what the rule raised, which is a mistake of its author.
    """

    recording: str
    values: dict[str, Any]
    holds: bool | None
    error: str | None = None


@dataclass(frozen=True)
class Verdict:
    """One machine's answers: those of its recordings that hold all cases."""

    machine: str
    own: bool
    evaluations: tuple[Evaluation, ...]
    repeats: str = MEASURED

    @property
    def measured(self) -> int:
        """Recordings in which it could be told."""
        return sum(e.holds is not None for e in self.evaluations)

    @property
    def held(self) -> int:
        """Recordings in which it holds."""
        return sum(bool(e.holds) for e in self.evaluations)

    @property
    def errors(self) -> list[str]:
        """What the rule raised, a line a recording."""
        return [f"{e.recording}: {e.error}" for e in self.evaluations if e.error]

    @property
    def count(self) -> str:
        """In how many recordings it holds, such as "3 of 3"; what cannot vary says why instead."""
        if self.repeats != MEASURED:
            return self.repeats if self.held == self.measured else f"does not hold, {self.repeats}"
        assembled = [e.recording for e in self.evaluations if e.holds is not None] == [ASSEMBLED]
        return f"{self.held} of {self.measured}" + (f", {ASSEMBLED}" if assembled else "")

    def text(self, study: str) -> str:
        """For people."""
        if self.errors:
            return f"error in the claim: {'; '.join(self.errors)}"
        if self.machine == published.MACHINE and self.measured:
            return f"{'holds' if self.held else 'does not hold'} in the published tables"
        if not self.measured:
            how = (
                f"; on a large GPU `make study ONLY={study} PROFILE=full` does" if self.own else ""
            )
            return f"not measured{how}"
        if self.repeats != MEASURED:
            return f"holds ({self.repeats})" if self.held == self.measured else self.count
        if self.held == 0:
            return "does not hold"
        count, _, assembled = self.count.partition(", ")
        return f"holds in {count} recording{'s' * (not count.endswith(' 1'))}" + (
            ", assembled from several runs" if assembled else ""
        )


@dataclass
class Claim:
    """A claim and what it rests on."""

    name: str
    selection: pd.DataFrame
    rule: Rule
    template: str
    headline: bool = False
    repeats: str = MEASURED
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def study(self) -> str:
        """The study whose rows it rests on."""
        return str(self.selection.attrs.get("study", ""))

    def evaluate(self, rows: pd.DataFrame, recording: str) -> Evaluation:
        """The rule over the rows of one recording. A NaN is no answer."""
        try:
            values, holds = self.rule(rows)
        except Exception as error:
            return Evaluation(recording, {}, None, f"{type(error).__name__}: {error}")
        if any(is_missing(_plain(v)) for v in values.values()) or is_missing(_plain(holds)):
            return Evaluation(recording, {}, None)
        return Evaluation(recording, {k: _plain(v) for k, v in values.items()}, bool(holds))

    def judge(self) -> None:
        """Evaluate every machine's recordings that have all cases."""
        rows = self.selection
        self.verdicts = [
            Verdict(
                str(name), name == machines.key(),
                tuple(self.evaluate(part, at) for at, part in complete(rows, str(name))),
                self.repeats,
            )
            for name in rows["machine"].cat.categories
        ]  # fmt: skip

    def parts(self, machine: str | None = None) -> list[tuple[str, str, str]]:
        """The sentence in parts: text, then the name and formatted value of a number, or blanks.

        Numbers are of the machine, a dash where it measured nothing; by default of the leading one,
        with those of other recorded machines after it where they differ.
        """
        shown = machine or leading(self.selection)
        answers = {
            v.machine: [e for e in v.evaluations if e.holds is not None] for v in self.verdicts
        }
        beside = [
            v.machine for v in self.verdicts
            if machine is None and v.machine != shown and not v.own and answers[v.machine]
        ]  # fmt: skip

        def value(name: str, spec: str) -> str:
            own, *others = (
                spread([e.values[name] for e in answers.get(at, []) if name in e.values], spec)
                for at in (shown, *beside)
            )
            if own == MISSING and others:  # the leading machine has not measured it
                return "; ".join(map(_of, beside, others))
            apart = [
                _of(at, text) for at, text in zip(beside, others, strict=True) if text != own
            ]  # fmt: skip
            return f"{own} ({', '.join(apart)})" if apart else own

        return [
            (text, name or "", value(name, spec or "") if name else "")
            for text, name, spec, _ in string.Formatter().parse(self.template)
        ]

    def sentence(self, machine: str | None = None) -> str:
        """The sentence with its numbers, or with those of one machine alone."""
        return "".join(text + value for text, _, value in self.parts(machine))

    def numbers(self) -> dict[str, str]:
        """The leading machine's numbers of the sentence, by name."""
        return {name: value for _, name, value in self.parts(leading(self.selection)) if name}

    def verdict(self) -> str:
        """Every machine's verdict in one line, and what this one measured where it leads not."""
        who = {
            v.machine: f"{THIS if v.own else machines.label(v.machine)}: " for v in self.verdicts
        }
        who[published.MACHINE] = ""  # the verdict says where
        sentence = "; ".join(who[v.machine] + v.text(self.study) for v in self.verdicts) + "."
        mine = machines.key()
        known = mine != leading(self.selection) and any(v.own and v.measured for v in self.verdicts)
        return f"{sentence} Measured here: {self.sentence(mine)}" if known else sentence


def _of(machine: str, text: str) -> str:
    """A machine's number after its name: a space in it does not break the line."""
    return f"{machines.label(machine)}\N{NO-BREAK SPACE}{text}"


def complete(rows: pd.DataFrame, machine: str) -> Iterable[tuple[str, pd.DataFrame]]:
    """The recordings of a machine that hold all cases of a selection, each with its rows."""
    wanted = required(rows)
    own = rows[rows["machine"] == machine]
    for name, part in own.groupby("recording", sort=True):
        if len(part) and wanted and wanted <= {*part["case"]}:
            yield str(name), part[part["case"].isin(wanted)]


def required(rows: pd.DataFrame) -> set[str]:
    """The cases of a selection that the profile `full` measures; of published tables, all."""
    studies = {*rows["study"]} & {*plan.studies()} if "study" in rows else ()
    if not studies:
        return {*rows["case"]}
    return {*rows["case"]} & {case for study in studies for case in plan.full_cases(study)}


CLAIMS: list[Claim] = []
"""Every claim that was stated in this process, in order."""


def claim(
    name: str, selection: pd.DataFrame, *, headline: bool = False, repeats: str = MEASURED
) -> Callable[[Rule], Claim]:
    """State a claim over a plain selection of raw rows, evaluate it, and show it.

    Args:
        name: anchor, of lower-case letters, digits and dashes; unique in a study.
        selection: rows that it rests on, all statuses among them: also what `make record` measures.
        headline: whether it stands in the table on page one and in the README.
        repeats: what another recording repeats: "measured", or, where the result is the same by
            nature, "counted" (bytes) or "same seeds" (a replay of the same random numbers).

    Raises:
        ValueError: the rule has no sentence as docstring, or `repeats` is none of these.
    """
    if repeats not in REPEATS:
        raise ValueError(f"repeats={repeats!r} is unknown; known are {', '.join(REPEATS)}")

    def state(rule: Rule) -> Claim:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            raise ValueError(f'the claim "{name}" needs its sentence as the function\'s docstring')
        result = Claim(name, selection, rule, text, headline, repeats)
        result.judge()
        CLAIMS.append(result)
        display.claim(
            result.sentence(), result.verdict(), name, headline=headline, study=result.study,
            numbers=result.numbers(), verdicts=[
                {"machine": v.machine, "label": machines.label(v.machine), "own": v.own,
                 "held": v.held, "measured": v.measured, "count": v.count,
                 "text": v.text(result.study), "errors": v.errors}
                for v in result.verdicts
            ],
        )  # fmt: skip
        return result

    return state


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
