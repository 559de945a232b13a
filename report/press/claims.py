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
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from measure.recording.results import ASSEMBLED
from press import display, measuring, published
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
class Standing:
    """How a claim stands on one machine: the answers of its recordings that hold all cases."""

    machine: str
    study: str
    evaluations: tuple[Evaluation, ...]
    repeats: str = MEASURED

    @property
    def own(self) -> bool:
        """Whether it is this machine."""
        return self.machine == machines.key()

    @property
    def label(self) -> str:
        """The machine's name for people."""
        return machines.label(self.machine)

    @property
    def answers(self) -> list[Evaluation]:
        """Of the recordings in which it could be told."""
        return [e for e in self.evaluations if e.holds is not None]

    @property
    def measured(self) -> int:
        """How many these are."""
        return len(self.answers)

    @property
    def held(self) -> int:
        """Recordings in which it holds."""
        return sum(bool(e.holds) for e in self.answers)

    @property
    def errors(self) -> list[str]:
        """What the rule raised, a line a recording."""
        return [f"{e.recording}: {e.error}" for e in self.evaluations if e.error]

    @property
    def count(self) -> str:
        """In how many recordings it holds, such as "3 of 3"; what cannot vary says why instead."""
        if self.repeats != MEASURED:
            return self.repeats if self.held == self.measured else f"does not hold, {self.repeats}"
        assembled = [e.recording for e in self.answers] == [ASSEMBLED]
        return f"{self.held} of {self.measured}" + (f", {ASSEMBLED}" if assembled else "")

    @property
    def text(self) -> str:
        """The same in words."""
        if self.errors:
            return f"error in the claim: {'; '.join(self.errors)}"
        if not self.measured:
            how = f"; on a large GPU `make study ONLY={self.study} PROFILE=full` does"
            return f"not measured{how if self.own else ''}"
        if self.machine == published.MACHINE:
            return f"{'holds' if self.held else 'does not hold'} in the published tables"
        if self.repeats != MEASURED:
            return f"holds ({self.repeats})" if self.held == self.measured else self.count
        if not self.held:
            return "does not hold"
        count, _, assembled = self.count.partition(", ")
        plural, several = "s" * (self.measured > 1), ", assembled from several runs"
        return f"holds in {count} recording{plural}{several if assembled else ''}"

    def as_json(self) -> dict[str, Any]:
        """What pages show of it."""
        names = ("machine", "label", "own", "held", "measured", "count", "text", "errors")
        return {name: getattr(self, name) for name in names}


@dataclass
class Claim:
    """A claim and what it rests on."""

    name: str
    selection: pd.DataFrame
    rule: Rule
    template: str
    headline: str = ""
    repeats: str = MEASURED
    standings: list[Standing] = field(default_factory=list)

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

    def evaluate_all(self) -> None:
        """Evaluate every machine's recordings that have all cases."""
        for name in map(str, self.selection["machine"].cat.categories):
            parts = complete(self.selection, name)
            evaluations = tuple(self.evaluate(part, recording) for recording, part in parts)
            self.standings.append(Standing(name, self.study, evaluations, self.repeats))

    def sentence(self, machine: str | None = None) -> str:
        """The sentence with its numbers, or with those of one machine alone.

        They are the leading machine's, a dash where it measured nothing, with those of other
        recorded machines after them where they differ.
        """
        filled = ((text, self._value(name, spec, machine)) for text, name, spec in self._fields())
        return "".join(text + value for text, value in filled)

    def numbers(self) -> dict[str, str]:
        """The leading machine's numbers of the sentence, by name."""
        leader = leading(self.selection)
        return {n: self._value(n, spec, leader) for _, n, spec in self._fields() if n}

    def _fields(self) -> Iterator[tuple[str, str, str]]:
        """Text of the sentence, then the name and format of the number behind it, or blanks."""
        for text, name, spec, _ in string.Formatter().parse(self.template):
            yield text, name or "", spec or ""

    def _value(self, name: str, spec: str, machine: str | None) -> str:
        def spread_of(standing: Standing) -> str:
            return spread([e.values[name] for e in standing.answers if name in e.values], spec)

        if not name:
            return ""
        shown = machine or leading(self.selection)
        own = next((spread_of(s) for s in self.standings if s.machine == shown), MISSING)
        others = [s for s in self.standings if s.machine != shown and not s.own and s.measured]
        texts = [(s.label, spread_of(s)) for s in others if machine is None]
        # A space between a machine's name and its number does not break the line.
        apart = [f"{label}\N{NO-BREAK SPACE}{text}" for label, text in texts if text != own]
        if own == MISSING and apart:  # the leading machine has not measured it
            return "; ".join(apart)
        return f"{own} ({', '.join(apart)})" if apart else own

    def summary(self) -> str:
        """How it stands on every machine, and what this one measured where it leads not."""
        where = {s.machine: f"{THIS if s.own else s.label}: " for s in self.standings}
        where[published.MACHINE] = ""  # the text says where
        text = "; ".join(where[s.machine] + s.text for s in self.standings) + "."
        mine = machines.key()
        here, leads = any(s.own and s.measured for s in self.standings), leading(self.selection)
        return f"{text} Measured here: {self.sentence(mine)}" if here and mine != leads else text


def complete(rows: pd.DataFrame, machine: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The recordings of a machine that hold all cases of a selection, each with its rows."""
    wanted = required(rows)
    own = rows[rows["machine"] == machine]
    for name, part in own.groupby("recording", sort=True):
        if len(part) and wanted and wanted <= {*part["case"]}:
            yield str(name), part[part["case"].isin(wanted)]


def required(rows: pd.DataFrame) -> set[str]:
    """The cases of a selection that the profile `full` measures; of published tables, all."""
    studies = {*rows["study"]} & {*measuring.studies()} if "study" in rows else ()
    if not studies:
        return {*rows["case"]}
    return {*rows["case"]} & {case for study in studies for case in measuring.full_cases(study)}


CLAIMS: list[Claim] = []
"""Every claim that was stated in this process, in order."""


def claim(
    name: str, selection: pd.DataFrame, *, headline: str = "", repeats: str = MEASURED
) -> Callable[[Rule], Claim]:
    """State a claim over a plain selection of raw rows, evaluate it, and show it.

    Args:
        name: anchor, of lower-case letters, digits and dashes; unique in a study.
        selection: rows that it rests on, all statuses among them: also what `make record` measures.
        headline: the finding in a few words and no number, without a full stop, where it stands in
            the table on page one, the README and the slides.
        repeats: what another recording repeats: "measured", or, where the result is the same by
            nature, "counted" (bytes) or "same seeds" (a replay of the same random numbers).
    """
    if repeats not in REPEATS:
        raise ValueError(f"repeats={repeats!r} is unknown; known are {', '.join(REPEATS)}")

    def state(rule: Rule) -> Claim:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            dropped = " (this Python drops docstrings: run it without -OO or PYTHONOPTIMIZE=2)"
            raise ValueError(
                f'the claim "{name}" needs its sentence as the function\'s docstring'
                f"{dropped if sys.flags.optimize > 1 else ''}"
            )
        result = Claim(name, selection, rule, text, headline, repeats)
        result.evaluate_all()
        CLAIMS.append(result)
        display.claim(
            result.sentence(), result.summary(), name, headline=headline, study=result.study,
            numbers=result.numbers(), standings=[s.as_json() for s in result.standings],
        )  # fmt: skip
        return result

    return state


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
