"""Claims: sentences that an author wrote, with computed numbers and a condition that must hold.

    @claim("kernels/models", of=lambda rows: rows.query("group == 'models'"))
    def models(rows):
        \"\"\"In bf16 fusedlib is {speed:3×} as fast as Liger.\"\"\"
        speed = ratio(rows, over="liger").groupby("shape").ratio.median()
        return {"speed": (speed.min(), speed.max())}, speed.between(1, 1.12).all()

They stand in `report/claims/<topic>.py`. A machine's set of recordings answers if it has a row of
each case that the claim selects and the profile `full` measures; nothing is borrowed from another.
A number is of the newest such set, and beside it stands each other machine's, where it differs:
"1.11× (H100 1.18×)". Of code that no version changed it is the range over all sets.
"""

import importlib
import inspect
import math
import os
import pkgutil
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import pandas as pd

from fusedlib.bench import machine as machines
from press import display
from press.formats import MISSING, is_missing, spread
from press.origin import days, older, origin
from press.published import MACHINE
from study.rows import REPLAY, folders, key, load

Rows: TypeAlias = pd.DataFrame
Rule = Callable[[Rows], tuple[dict[str, Any], Any]]
THIS = "this machine"
MEASURED = "measured"
REPEATS = (MEASURED, "counted", "same seeds")
ORDER = ("H200", "H100")
"""The machines whose numbers come first."""


@dataclass(frozen=True)
class Answer:
    """What one set says. `holds` is None where a number is missing, so that nobody can tell, or
    where the rule raised `error`, which is a mistake of its author. `origin`: days and commits of
    its rows; `older`: their days, where the code has changed since."""

    set: str
    values: dict[str, Any]
    holds: bool | None
    error: str = ""
    origin: str = ""
    older: str = ""


@dataclass(frozen=True)
class Standing:
    """How a claim stands on one machine: what its sets of all cases say, oldest first."""

    machine: str
    answers: tuple[Answer, ...]
    repeats: str = MEASURED

    @property
    def decided(self) -> list[Answer]:
        """The answers that say whether it holds."""
        return [answer for answer in self.answers if answer.holds is not None]

    @property
    def held(self) -> int:
        """In how many of them it holds."""
        return sum(bool(answer.holds) for answer in self.decided)

    @property
    def status(self) -> str:
        """✓; ✗: one set contradicts; "once": another could, and there is none; "": none tells."""
        varies = self.repeats == MEASURED and self.machine != MACHINE
        alone = "once" if varies and len(self.decided) == 1 else "✓"
        return "" if not self.decided else "✗" if self.held < len(self.decided) else alone

    @property
    def errors(self) -> list[str]:
        """What the rule raised, a line a set."""
        return [f"{answer.set}: {answer.error}" for answer in self.answers if answer.error]

    @property
    def mark(self) -> str:
        """The status beside the machine, with its days where the newest rows are of older code."""
        if self.errors:
            return f"error in the claim: {self.errors[0]}"
        if not self.decided:
            return ""
        newest = self.decided[-1]
        old = f", {newest.older}" if newest.older else ""
        return f"{self.status} {_place(self.machine)}{old}"


@dataclass(frozen=True)
class Claim:
    """A claim as its author stated it; `evaluate` adds how it stands on each machine."""

    topic: str
    name: str
    headline: str
    of: Callable[[Rows], Rows]
    rule: Rule
    template: str
    first: str = ""
    repeats: str = MEASURED
    lead: str = ""
    unchanged: bool = False
    standings: tuple[Standing, ...] = ()

    @property
    def shown(self) -> str:
        """The machine whose numbers come first in the sentence: the first that has them."""
        return next((one.machine for one in self.standings if one.decided), "")

    @property
    def others(self) -> str:
        """The same, where it is not the one that leads."""
        return self.shown if self.shown != self.standings[0].machine else ""

    def sets(self) -> Iterator[tuple[str, str, Rows]]:
        """Each machine's sets that have all cases, oldest first, with the last row of each."""
        chosen = self.of(rows_of(self.topic))
        wanted = required(self.topic, chosen)
        for (machine, name), rows in _by_age(chosen).groupby(["machine", "set"], sort=False):
            if wanted and wanted <= {*(pairs := _pairs(rows))}:
                yield machine, name, rows[pairs.isin(wanted) & ~pairs.duplicated(keep="last")]

    def answer(self, name: str, rows: Rows) -> Answer:
        """The rule over the rows of one set. A NaN is no answer; what it raises is shown."""
        nothing = Answer(
            name, {}, None, origin=origin(rows), older=days(rows) if older(rows) else ""
        )
        try:
            values, holds = self.rule(rows)
            values, holds = {n: _plain(value) for n, value in values.items()}, _plain(holds)
            self._numbers_of([Answer(name, values, None)])
        except Exception as error:
            return replace(nothing, error=f"{type(error).__name__}: {error}")
        known = not any(map(is_missing, (*values.values(), holds)))
        return replace(nothing, values=values, holds=bool(holds) if known else None)

    def sentence(self) -> str:
        """The sentence with its numbers; a dash stands for what nobody measured."""
        fields = string.Formatter().parse(self.template)
        numbers = self.beside()
        text = "".join(words + numbers.get(name or "", "") for words, name, *_ in fields)
        text = f"{_place(self.others)}: {text}" if self.others else text
        return text[:1].upper() + text[1:]

    def numbers(self, machine: str = "") -> dict[str, str]:
        """The sentence's numbers by name, of the machine that it speaks of or of another."""
        texts = self.spreads(machine or self.shown).items()
        return {name: text.partition(" [")[0] for name, text in texts}

    def beside(self) -> dict[str, str]:
        """The same, and in brackets each other machine's where they differ."""
        others = [one.machine for one in self.standings if one.decided][1:]
        texts = {}
        for name, text in self.numbers().items():
            differing = [
                f"{_place(machine)} {number}" for machine in others
                if (number := self.numbers(machine)[name]) != text
            ]  # fmt: skip
            texts[name] = f"{text} ({', '.join(differing)})" if differing else text
        return texts

    def spreads(self, machine: str) -> dict[str, str]:
        """A machine's numbers by name, each with its range over sets."""
        decided = [a for one in self.standings if one.machine == machine for a in one.decided]
        return self._numbers_of(decided)

    def marks(self) -> list[str]:
        """How it stands on every machine that can tell, and whether it said something else once."""
        own = [one.mark for one in self.standings if one.mark]
        return [*own, *["reworded"] * bool(self.first)] if own else ["not measured"]

    def _numbers_of(self, decided: list[Answer]) -> dict[str, str]:
        fields = {n: spec or "" for _, n, spec, _ in string.Formatter().parse(self.template) if n}
        values = {n: [a.values[n] for a in decided] for n in fields}
        if self.unchanged:
            values = {n: _ends(every) for n, every in values.items()}
        return {n: spread(values[n], spec) for n, spec in fields.items()}


CLAIMS: dict[str, Claim] = {}
"""By `topic/name`, as their files stated them: not evaluated."""


def claim(
    name: str, headline: str = "", *, of: Callable[[Rows], Rows], first: str = "",
    repeats: str = MEASURED, lead: str = "", unchanged: bool = False,
) -> Callable[[Rule], Rule]:  # fmt: skip
    """State a claim. Its sentence is the docstring of its rule, which takes the rows of one set,
    and gives the numbers and whether the claim holds.

    Args:
        name: the topic, a slash, and an anchor of lower-case letters, digits and dashes.
        headline: the finding in a few words and no number, without a full stop, where the README
            states it.
        of: selects from the topic's rows, whatever became of them, what must be there.
        first: what it said before a recording contradicted it and its author reworded it.
        repeats: what another recording repeats: "measured", or, where the result is the same by
            nature, "counted" (bytes) or "same seeds" (a replay of the same random numbers).
        lead: the machine whose numbers come first in the sentence, if not the first of `ORDER`.
        unchanged: no recording had other code of what is compared, so that its numbers are ranges
            over all of them.
    """
    topic, _, anchor = name.partition("/")
    if not anchor or repeats not in REPEATS:
        raise ValueError(f'the claim "{name}" needs a name "topic/anchor" and repeats of {REPEATS}')

    def state(rule: Rule) -> Rule:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            raise ValueError(f'the claim "{name}" needs its sentence as the rule\'s docstring')
        CLAIMS[name] = Claim(topic, anchor, headline, of, rule, text, first, repeats, lead,
                             unchanged)  # fmt: skip
        return rule

    return state


def evaluate(name: str) -> Claim:
    """A claim with how it stands on every machine that has rows of its topic, and on this one; of
    one about published tables on these alone."""
    topic = name.partition("/")[0]
    importlib.import_module(f"claims.{topic}")
    stated, own = CLAIMS[name], machines.label(machines.key())
    answers: dict[str, list[Answer]] = {}
    for machine, of_set, rows in stated.sets():
        answers.setdefault(machine, []).append(stated.answer(of_set, rows))
    there = {*answers} if [*answers] == [MACHINE] else {*answers, *rows_of(topic)["machine"], own}
    order = (stated.lead, *ORDER, *sorted(there - {own}), own)
    standings = [
        Standing(machine, tuple(answers.get(machine, ())), stated.repeats)
        for machine in dict.fromkeys(order) if machine in there
    ]  # fmt: skip
    return replace(stated, standings=tuple(standings))


def say(*names: str) -> None:
    """Show claims and how they stand."""
    for name in names:
        it = evaluate(name)
        display.claim(it.sentence(), it.marks(), name=f"{it.topic}-{it.name}")


def filled(words: str, machine: str = "") -> str:
    """A text with `{topic/claim/number}` replaced by that number as the claim's sentence writes it.

    Args:
        machine: whose numbers they are alone, by default all that the sentence has.

    A dash stands for one that is not there.
    """

    def number(match: re.Match[str]) -> str:
        topic, claim, value = match[1].split("/")
        it = evaluate(f"{topic}/{claim}")
        return (it.numbers(machine) if machine else it.beside()).get(value, MISSING)

    return re.sub(r"\{([^{}]+/[^{}]+/[^{}]+)\}", number, words)


def ledger(topic: str) -> pd.DataFrame:
    """A line a set of recordings that answers a claim of a topic: what it says, and where from."""
    lines = []
    for claim in every(topic):
        for one in claim.standings:
            for answer in one.answers:
                said = ", ".join(claim._numbers_of([answer]).values()) if answer.values else ""
                mark = MISSING if answer.holds is None else "✗✓"[answer.holds]
                lines.append((claim.name, _place(one.machine), answer.set, answer.origin, mark,
                              said or answer.error))  # fmt: skip
    heads = ["claim", "machine", "recording", "rows of", "holds", "numbers"]
    return pd.DataFrame(lines, columns=heads).set_index(heads[:3])


def every(topic: str = "") -> list[Claim]:
    """All claims of a topic, or of all, evaluated, in the order of their files."""
    package = importlib.import_module("claims")
    for one in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"claims.{one.name}")
    return [evaluate(name) for name, one in CLAIMS.items() if topic in ("", one.topic)]


def required(topic: str, chosen: Rows) -> set[tuple[str, str]]:
    """Races and providers of some rows that the profile `full` measures; of published ones all."""
    pairs = _pairs(chosen)
    return {*pairs[(chosen["machine"] == MACHINE) | pairs.isin(_in_full(topic))]}


@cache
def _in_full(topic: str) -> frozenset[tuple[str, str]]:
    cases = importlib.import_module(f"study.{topic}").cases("full", device="cuda")
    return frozenset((key(topic, case), case.get("provider") or "") for case in cases)


def rows_of(topic: str) -> Rows:
    """A topic's rows, and this machine's where they may be seen; read anew when a file changed."""
    here = os.environ.get(REPLAY) != "committed"
    files = [folder / f"{topic}.jsonl" for folder in folders(here=here)]
    stamps = frozenset((file, file.stat().st_mtime_ns) for file in files if file.exists())
    return _read(topic, here, stamps)


@cache
def _read(topic: str, here: bool, stamps: frozenset[Any]) -> Rows:
    return load(topic, sessions=True, here=here)


def _pairs(rows: Rows) -> pd.Series:
    providers = rows["provider"].astype(object).where(rows["provider"].notna(), "")
    return pd.Series(list(zip(rows["race"], providers, strict=True)), rows.index, dtype=object)


def _by_age(rows: Rows) -> Rows:
    """Rows in the order in which their sets ended; a published row has no time."""
    if "measured_at" not in rows:
        return rows
    ended = rows.groupby(["machine", "set"])["measured_at"].transform("max").astype(str)
    return rows.iloc[ended.argsort(kind="stable")]


def _ends(values: list[Any]) -> list[Any]:
    """The range of numbers, or of ranges; what is no number stays."""
    if not all(isinstance(value, int | float | tuple) for value in values):
        return values
    ends = [value if isinstance(value, tuple) else (value, value) for value in values]
    return [(min(low for low, _ in ends), max(high for _, high in ends))] if ends else values


def _place(machine: str) -> str:
    """A machine's name in a sentence."""
    return THIS if machine == machines.label(machines.key()) else machine


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
