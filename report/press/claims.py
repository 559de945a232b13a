"""A claim: a sentence that an author wrote, with computed numbers and a predicate that must hold.

    @claim("speed", rows.query("T == 16384 and dtype == 'bfloat16'"))
    def _(rows):
        \"\"\"Fused attention is {gain:3×} as fast.\"\"\"
        gain = ratios(rows, "plain").ratio.max()
        return {"gain": gain}, gain > 3

It is evaluated in each recording that holds all cases that it selects under the profile `full`;
nothing is borrowed from another. A recording of some of the cases, or one in which a case gave no
figure, is listed as partly measured. What it says of these cases counts where the rule can answer
for them: where it holds for the same cases of a recording that has all.

Numbers are medians over the recordings of a machine, their range in brackets where rounding shows
one. Where another recorded machine's number differs in the digits printed, it follows in
parentheses; of a machine that measured the claim only in part, "in part" stands beside its name.
"""

import inspect
import math
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from measure import study as studies
from measure.recording.results import ASSEMBLED
from press import display, published
from press.analysis import NoRowsError, leading
from press.formats import MISSING, formatted, is_missing, spread

Rule = Callable[[pd.DataFrame], tuple[dict[str, Any], Any]]
THIS = "this machine"
MEASURED, COUNTED, SAME_SEEDS = "measured", "counted", "same seeds"
REPEATS = (MEASURED, COUNTED, SAME_SEEDS)


@dataclass(frozen=True)
class Evaluation:
    """One recording's answer: the numbers, and whether it holds; None: a case gave no figure, or
    none of the rows that the rule asks for is there.

    `error` is what the rule raised, which is a mistake of its author.
    """

    recording: str
    values: dict[str, Any]
    holds: bool | None
    error: str | None = None


@dataclass(frozen=True)
class Part:
    """What a recording says of a claim that it measured in part.

    Attributes:
        evaluation: of the cases that have a row. A number that needs others is missing; where the
            cases cannot tell, a zero is too, for a rule that finds no rows counts none.
        holds: whether the claim holds for the cases that count; None: these cannot tell.
        counted: so many cases count.
        cases: so many cases the claim has.
        sentence: the claim's, with the numbers of these cases.
    """

    evaluation: Evaluation
    holds: bool | None
    counted: int
    cases: int
    sentence: str

    @property
    def text(self) -> str:
        """For people, such as "does not hold in a recording of 5 of its 20 cases".

        A rule judges all of them together, so nobody knows in how many it fails.
        """
        if self.holds is None:
            if self.counted >= self.cases:  # as the rate of a copy beside the times
                return "measured without a number that the claim needs, too little to tell"
            return f"partly measured: {self.counted} of {self.cases} cases, too few to tell"
        verdict = "holds" if self.holds else "does not hold"
        return f"{verdict} in a recording of {self.counted} of its {self.cases} cases"


@dataclass(frozen=True)
class Standing:
    """How a claim stands on one machine: the answers of its recordings that hold all cases, and
    what those say that measured it in part."""

    machine: str
    study: str
    evaluations: tuple[Evaluation, ...]
    parts: tuple[Part, ...] = ()
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
    def contrary(self) -> tuple[Part, ...]:
        """The recordings of some of the cases that speak against the claim."""
        return tuple(part for part in self.parts if part.holds is False)

    @property
    def shown(self) -> list[Evaluation]:
        """Whose numbers stand in the sentence: of all cases, else of those that were measured."""
        parts = [part.evaluation for part in self.parts]
        return self.answers or [evaluation for evaluation in parts if evaluation.values]

    @property
    def name(self) -> str:
        """The machine's name beside a number in the sentence."""
        return self.label if self.measured else f"{self.label} in part"

    @property
    def errors(self) -> list[str]:
        """What the rule raised, a line a recording."""
        return [f"{e.recording}: {e.error}" for e in self.evaluations if e.error]

    @property
    def count(self) -> str:
        """In how many recordings it holds, such as "3 of 3"; what cannot vary says why instead."""
        against = self.contrary[-1].text if self.contrary else ""
        if not self.measured:
            return against or ("partly measured" if self.parts else "")
        if self.repeats != MEASURED:
            alike = self.held == self.measured
            counted = self.repeats if alike else f"does not hold, {self.repeats}"
        else:
            assembled = f", {ASSEMBLED}" if self._assembled else ""
            counted = f"{self.held} of {self.measured}{assembled}"
        return f"{counted}, {against}" if against else counted

    @property
    def text(self) -> str:
        """The same in words, with the recordings of some of the cases that speak against it. What
        else is measured in part is named where no recording has all, the largest alone."""
        if self.errors:
            return f"error in the claim: {'; '.join(self.errors)}"
        quoted = self.contrary if self.measured else ()  # else its numbers stand in the sentence
        listed = [*self.contrary]
        if not self.measured:
            holding = [part for part in self.parts if part.holds]
            others = holding or ([] if listed else self.parts)
            listed += sorted(others, key=lambda part: part.counted)[-1:]
        verdicts = [self._whole] * bool(self.measured) + [
            f"{part.text} (“{part.sentence}”)" if part in quoted else part.text for part in listed
        ]
        how = f"; on a large GPU `make study ONLY={self.study} PROFILE=full` does"
        return ", ".join(dict.fromkeys(verdicts)) or f"not measured{how if self.own else ''}"

    @property
    def _whole(self) -> str:
        """What the recordings of all cases say."""
        if self.machine == published.MACHINE:
            return f"{'holds' if self.held else 'does not hold'} in the published tables"
        if self.repeats != MEASURED:
            alike = self.held == self.measured
            return f"holds ({self.repeats})" if alike else f"does not hold, {self.repeats}"
        if not self.held:
            return "does not hold"
        several = ", assembled from several runs" if self._assembled else ""
        plural = "s" * (self.measured > 1)
        return f"holds in {self.held} of {self.measured} recording{plural}{several}"

    @property
    def _assembled(self) -> bool:
        """Whether the only recording of all cases was put together from several runs."""
        return [e.recording for e in self.answers] == [ASSEMBLED]

    def as_json(self) -> dict[str, Any]:
        """What pages show of it."""
        names = ("machine", "label", "own", "held", "measured", "count", "text", "errors")
        numbers = {"parts": len(self.parts), "contrary": len(self.contrary)}
        return {name: getattr(self, name) for name in names} | numbers


@dataclass
class Claim:
    """A claim and what it rests on."""

    name: str
    selection: pd.DataFrame
    rule: Rule
    template: str
    headline: str = ""
    repeats: str = MEASURED
    first: str = ""
    standings: list[Standing] = field(default_factory=list)

    @property
    def study(self) -> str:
        """The study whose rows it rests on."""
        return str(self.selection.attrs.get("study", ""))

    def evaluate(self, rows: pd.DataFrame, recording: str) -> Evaluation:
        """The rule over the rows of one recording. A NaN is no answer."""
        try:
            values, holds = self.rule(rows)
        except NoRowsError:
            return Evaluation(recording, {}, None)
        except Exception as error:
            return Evaluation(recording, {}, None, f"{type(error).__name__}: {error}")
        values, holds = {name: _plain(v) for name, v in values.items()}, _plain(holds)
        if any(map(is_missing, values.values())) or is_missing(holds):
            return Evaluation(recording, values, None)
        return Evaluation(recording, values, bool(holds))

    def evaluate_all(self) -> None:
        """Evaluate every machine's recordings, those of all cases first."""
        names = list(map(str, self.selection["machine"].cat.categories))
        wanted = required(self.selection)
        whole: dict[str, list[Evaluation]] = {}
        held: list[pd.DataFrame] = []
        for name in names:
            whole[name] = []
            for recording, rows in complete(self.selection, name):
                whole[name].append(self.evaluate(rows, recording))
                held += [rows] if whole[name][-1].holds else []
        for name in names:
            decided = {e.recording for e in whole[name] if e.holds is not None or e.error}
            parts = tuple(
                self._part(rows, recording, held, len(wanted))
                for recording, rows in _with_figures(self.selection, name, wanted)
                if recording not in decided
            )
            standing = Standing(name, self.study, tuple(whole[name]), parts, self.repeats)
            self.standings.append(standing)

    def _part(
        self, rows: pd.DataFrame, recording: str, held: Sequence[pd.DataFrame], cases: int
    ) -> Part:
        """What the rows of some cases say, where the rule holds for the same cases of `held`."""
        evaluation = self.evaluate(rows, recording)
        for other in held:
            alike = set(zip(rows["case"], rows["status"], strict=True)) & set(
                zip(other["case"], other["status"], strict=True)
            )
            same = {case for case, _ in alike}
            if same and self.evaluate(other[other["case"].isin(same)], "").holds:
                own = self.evaluate(rows[rows["case"].isin(same)], recording)
                if own.holds is not None:
                    return Part(own, own.holds, len(same), cases, self._filled(own.values))
        ran = int((rows["status"] == "ok").sum())
        known = {name: value for name, value in evaluation.values.items() if value != 0}
        return Part(replace(evaluation, values=known), None, ran, cases, self._filled(known))

    def _filled(self, values: Mapping[str, Any]) -> str:
        """The sentence with these values, a dash for one that is missing."""
        fields = self._fields()
        return "".join(text + (formatted(values.get(n), s) if n else "") for text, n, s in fields)

    def sentence(self, machine: str | None = None) -> str:
        """The sentence with its numbers, or with those of one machine alone.

        They are the leading machine's, of its newest recording; ranges and other machines' are in
        `summary`. Where the leading machine measured nothing they are another's, which is said
        first; a dash stands for what nobody measured.
        """
        shown = self._machine()
        chosen = machine or (shown.machine if shown else leading(self.selection))
        filled = ((text, self._value(name, spec, chosen)) for text, name, spec in self._fields())
        sentence = "".join(text + value for text, value in filled)
        if machine or shown is None or shown.machine == leading(self.selection):
            return sentence
        return f"{THIS[0].upper() + THIS[1:] if shown.own else shown.name}: {sentence}"

    def numbers(self) -> dict[str, str]:
        """The numbers of the sentence by name, of one machine, named where it is not the leader."""
        shown, leader = self._machine(), leading(self.selection)
        name = shown.machine if shown else leader
        values = {n: self._value(n, spec, name) for _, n, spec in self._fields() if n}
        if shown is None or name == leader:
            return values
        return {n: f"{text} ({shown.name})" for n, text in values.items()}

    def _machine(self) -> Standing | None:
        """Whose numbers stand in the sentence: the leader's, else the first's that has some."""
        leader = leading(self.selection)
        order = sorted(self.standings, key=lambda s: (not s.measured, s.machine != leader, s.own))
        return next((s for s in order if s.shown), None)

    def _fields(self) -> Iterator[tuple[str, str, str]]:
        """Text of the sentence, then the name and format of the number behind it, or blanks."""
        for text, name, spec, _ in string.Formatter().parse(self.template):
            yield text, name or "", spec or ""

    def _value(self, name: str, spec: str, machine: str) -> str:
        """A machine's number as the sentence has it."""
        [values] = [self._values(s, name) for s in self.standings if s.machine == machine] or [[]]
        return spread(values, spec).partition(" [")[0] if name else ""

    @staticmethod
    def _values(standing: Standing, name: str) -> list[Any]:
        return [e.values[name] for e in standing.shown if name in e.values]

    def further_numbers(self, standing: Standing) -> str:
        """Numbers of a machine that the sentence lacks: those that vary over recordings, and those
        that differ from its own, such as "422 ms for 260 ms" where the sentence has 260 ms."""
        shown = self._machine()
        fields = {name: spec for _, name, spec in self._fields() if name}
        further = []
        for name, spec in fields.items():
            text = spread(self._values(standing, name), spec)
            own = self._value(name, spec, shown.machine) if shown else MISSING
            if shown and text not in (own, MISSING):
                alone = len(fields) == 1 or text.partition(" [")[0] == own
                unknown = f"{name.replace('_', ' ')} {text}"
                words = unknown if own == MISSING else f"{text} for {own}"
                further.append(text if alone else words)
        return ", ".join(further)

    def standings_as_json(self) -> list[dict[str, Any]]:
        """How it stands on each machine, and its numbers there, as pages show it. Those of some of
        the cases alone have a star."""
        fields = [(name, spec) for _, name, spec in self._fields() if name]
        return [
            s.as_json() | {
                "further": self.further_numbers(s),
                "numbers": {n: text for n, spec in fields if (text := self._number(s, n, spec))},
            }
            for s in self.standings
        ]  # fmt: skip

    def _number(self, standing: Standing, name: str, spec: str) -> str:
        text = self._value(name, spec, standing.machine)
        if standing.measured:
            return text
        return "" if text == MISSING else f"{text}*"

    def summary(self) -> str:
        """How it stands on every machine, and what this one measured where it leads not."""
        where = {s.machine: f"{THIS if s.own else s.label}: " for s in self.standings}
        where[published.MACHINE] = ""  # the text says where
        further = ((s, self.further_numbers(s)) for s in self.standings)
        text = (
            "; ".join(f"{where[s.machine]}{s.text}{f': {f}' * bool(f)}" for s, f in further) + "."
        )
        text += f" First stated as “{self.first}”." if self.first else ""
        mine = machines.key()
        here = any(s.own and s.shown for s in self.standings)
        first = self._machine()
        elsewhere = here and first is not None and first.machine != mine
        return f"{text} Measured here: {self.sentence(mine)}" if elsewhere else text


def complete(rows: pd.DataFrame, machine: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The recordings of a machine that hold all cases of a selection, oldest first, each with its
    rows."""
    wanted = required(rows)
    own = _by_age(rows[rows["machine"] == machine])
    for name, part in own.groupby("recording", sort=False):
        if len(part) and wanted and wanted <= {*part["case"]}:
            yield str(name), part[part["case"].isin(wanted)]


def _with_figures(
    rows: pd.DataFrame, machine: str, wanted: set[str]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """The recordings of a machine in which one of the cases at least has figures, oldest first."""
    own = _by_age(rows[(rows["machine"] == machine) & rows["case"].isin(wanted)])
    for name, part in own.groupby("recording", sort=False):
        if (part["status"] == "ok").any():
            yield str(name), part


def _by_age(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows in the order in which their recordings ended; a published row has no time."""
    if "measured_at" not in rows:
        return rows
    ended = rows.groupby("recording")["measured_at"].max()
    aged = rows.assign(ended=rows["recording"].map(ended).astype(str))
    return aged.sort_values("ended", kind="stable").drop(columns="ended")


def required(rows: pd.DataFrame) -> set[str]:
    """The cases of a selection that the profile `full` measures; of published tables, all."""
    names = {*rows["study"]} & {*studies.names()} if "study" in rows else ()
    if not names:
        return {*rows["case"]}
    return {*rows["case"]} & {case for name in names for case in studies.full_cases(name)}


CLAIMS: list[Claim] = []
"""Every claim that was stated in this process, in order."""


def claim(
    name: str, selection: pd.DataFrame, *, headline: str = "", repeats: str = MEASURED,
    first: str = "",
) -> Callable[[Rule], Claim]:  # fmt: skip
    """State a claim over a plain selection of raw rows, evaluate it, and show it.

    Args:
        name: anchor, of lower-case letters, digits and dashes; unique in a study.
        selection: rows that it rests on, all statuses among them: also what `make record` measures.
        headline: the finding in a few words and no number, without a full stop, where it stands in
            the table on page one, the README and the slides.
        repeats: what another recording repeats: "measured", or, where the result is the same by
            nature, "counted" (bytes) or "same seeds" (a replay of the same random numbers).
        first: what it said before a recording contradicted it and its author reworded it, which
            is shown beside it; `report/HISTORY.md` says more.
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
        result = Claim(name, selection, rule, text, headline, repeats, first)
        result.evaluate_all()
        CLAIMS.append(result)
        display.claim(
            result.sentence(), result.summary(), name, headline=headline, study=result.study,
            numbers=result.numbers(), standings=result.standings_as_json(), first=first,
        )  # fmt: skip
        return result

    return state


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
