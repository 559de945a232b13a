"""Claims: sentences that an author wrote, with computed numbers and a condition that must hold.

    @claim("kernels/few-fp32", of=lambda rows: rows.query("group == 'sweep' and tokens == 64"))
    def few_fp32(rows):
        \"\"\"In fp32 fusedlib is {speed:3×} as fast as PyTorch.\"\"\"
        speed = ratio(rows, over="eager").groupby("hidden_size").ratio.median()
        return {"speed": (speed.min(), speed.max())}, speed.between(1 / 1.2, 1.2).all()

They stand in `report/claims/<topic>.py`. A machine's set of recordings answers if it has a row of
each case that the claim selects and the profile `full` measures; nothing is borrowed from another.
A number is of the newest such set, its range over all in brackets where rounding shows one.
"""

import importlib
import inspect
import math
import os
import pkgutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import pandas as pd

from fusedlib.bench import machine as machines
from press import display
from press.formats import MISSING, is_missing, spread
from press.published import MACHINE
from study.rows import ASSEMBLED, REPLAY, folders, key, load

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
    where the rule raised `error`, which is a mistake of its author."""

    set: str
    values: dict[str, Any]
    holds: bool | None
    error: str = ""


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
    def count(self) -> str:
        """The status and on how many sets it rests, such as "✓ 2 of 2"."""
        many = f"{self.held} of {len(self.decided)}" if self.repeats == MEASURED else self.repeats
        return f"{self.status} {many}" if self.status in ("✓", "✗") else self.status

    @property
    def errors(self) -> list[str]:
        """What the rule raised, a line a set."""
        return [f"{answer.set}: {answer.error}" for answer in self.answers if answer.error]

    @property
    def text(self) -> str:
        """How it stands in words."""
        if self.errors:
            return f"error in the claim: {'; '.join(self.errors)}"
        if not self.decided:
            lacking = "numbers" if self.answers else "cases"
            return f"no recording has all of its {lacking}"
        verb = "holds" if self.held else "does not hold"
        if self.machine == MACHINE:
            return f"{verb} in the published tables"
        if self.repeats != MEASURED:
            return f"holds ({self.repeats})" if self.status == "✓" else "does not hold"
        several = ", assembled from several runs" * ([a.set for a in self.decided] == [ASSEMBLED])
        plural = "s" * (len(self.decided) > 1)
        where = f" in {self.held} of {len(self.decided)} recording{plural}" if self.held else ""
        return f"{verb}{where}{several}"


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
    standings: tuple[Standing, ...] = ()

    @property
    def shown(self) -> str:
        """The machine whose numbers stand in the sentence: the first that has them."""
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
        try:
            values, holds = self.rule(rows)
            values, holds = {n: _plain(value) for n, value in values.items()}, _plain(holds)
            self._numbers_of([Answer(name, values, None)])
        except Exception as error:
            return Answer(name, {}, None, f"{type(error).__name__}: {error}")
        known = not any(map(is_missing, (*values.values(), holds)))
        return Answer(name, values, bool(holds) if known else None)

    def sentence(self) -> str:
        """The sentence with its numbers; a dash stands for what nobody measured."""
        fields = string.Formatter().parse(self.template)
        numbers = self._numbers(self.shown)
        text = "".join(words + numbers.get(name or "", "") for words, name, *_ in fields)
        text = f"{_place(self.others)}: {text}" if self.others else text
        return text[:1].upper() + text[1:]

    def numbers(self) -> dict[str, str]:
        """The sentence's numbers by name; of a machine that does not lead, with its name."""
        whose = f" ({self.others})" if self.others else ""
        return {name: f"{text}{whose}" for name, text in self._numbers(self.shown).items()}

    def summary(self) -> str:
        """How it stands on every machine, with the numbers that differ, and what it first said.
        This machine is left out where it answers nothing, and what repeats by nature is said once
        for all machines that say the same of it."""
        telling = [s for s in self.standings if s.decided or s.errors or _place(s.machine) != THIS]
        places: dict[tuple[str, str], list[str]] = {}
        for standing in telling or self.standings:
            text = ": ".join(filter(None, (standing.text, self._further(standing))))
            own = standing.machine if standing.repeats == MEASURED else ""
            places.setdefault((text, own), []).append(_place(standing.machine))
        lines = [
            text if names == [MACHINE] else f"{' and '.join(names)}: {text}"
            for (text, _), names in places.items()
        ]
        first = f" First stated as “{self.first}”." if self.first else ""
        return f"{'; '.join(lines)}.{first}"

    def standings_as_json(self) -> list[dict[str, Any]]:
        """How it stands on each machine, as pages show it."""
        names = ("held", "count", "text", "errors")
        return [
            {name: getattr(one, name) for name in names} | {
                "machine": key_of(one.machine), "label": one.machine, "parts": 0,
                "own": _place(one.machine) == THIS, "measured": len(one.decided),
                "contrary": one.status == "✗",
                "further": self._further(one), "numbers": self._numbers(one.machine),
            }
            for one in self.standings
        ]  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """What pages show of it."""
        return {
            "name": self.name, "sentence": self.sentence(), "headline": self.headline,
            "study": self.topic, "numbers": self.numbers(), "first": self.first,
            "standings": self.standings_as_json(),
        }  # fmt: skip

    def _spreads(self, machine: str) -> dict[str, str]:
        """A machine's numbers by name, each with its range."""
        decided = [a for one in self.standings if one.machine == machine for a in one.decided]
        return self._numbers_of(decided)

    def _numbers_of(self, decided: list[Answer]) -> dict[str, str]:
        fields = {n: spec or "" for _, n, spec, _ in string.Formatter().parse(self.template) if n}
        return {n: spread([a.values[n] for a in decided], spec) for n, spec in fields.items()}

    def _numbers(self, machine: str) -> dict[str, str]:
        return {n: text.partition(" [")[0] for n, text in self._spreads(machine).items()}

    def _further(self, standing: Standing) -> str:
        """Numbers of a machine that the sentence lacks: those with a range, and those that differ
        from its own, such as "422 ms instead of 260 ms" where the sentence has 260 ms."""
        own, texts = self._numbers(self.shown), []
        for name, text in self._spreads(standing.machine).items():
            if text not in (own[name], MISSING):
                alone = len(own) == 1 or text.partition(" [")[0] == own[name]
                texts.append(text if alone else f"{text} instead of {own[name]}")
        return ", ".join(texts)


CLAIMS: dict[str, Claim] = {}
"""By `topic/name`, as their files stated them: not evaluated."""


def claim(
    name: str, headline: str = "", *, of: Callable[[Rows], Rows], first: str = "",
    repeats: str = MEASURED, lead: str = "",
) -> Callable[[Rule], Rule]:  # fmt: skip
    """State a claim. Its sentence is the docstring of its rule, which takes the rows of one set,
    and gives the numbers and whether the claim holds.

    Args:
        name: the topic, a slash, and an anchor of lower-case letters, digits and dashes.
        headline: the finding in a few words and no number, without a full stop, where it stands in
            the table on page one, the README and the slides.
        of: selects from the topic's rows, whatever became of them, what must be there.
        first: what it said before a recording contradicted it and its author reworded it.
        repeats: what another recording repeats: "measured", or, where the result is the same by
            nature, "counted" (bytes) or "same seeds" (a replay of the same random numbers).
        lead: the machine whose numbers stand in the sentence, if not the first of `ORDER`.
    """
    topic, _, anchor = name.partition("/")
    if not anchor or repeats not in REPEATS:
        raise ValueError(f'the claim "{name}" needs a name "topic/anchor" and repeats of {REPEATS}')

    def state(rule: Rule) -> Rule:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            raise ValueError(f'the claim "{name}" needs its sentence as the rule\'s docstring')
        CLAIMS[name] = Claim(topic, anchor, headline, of, rule, text, first, repeats, lead)
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


def say(name: str) -> None:
    """Show a claim and how it stands."""
    it = evaluate(name)
    display.claim(it.summary(), **it.as_json())


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


def _place(machine: str) -> str:
    """A machine's name in a sentence."""
    return THIS if machine == machines.label(machines.key()) else machine


def key_of(label: str) -> str:
    """The name of a machine's folder, of its name for people."""
    return f"nvidia-{label.lower()}" if label.isupper() else label


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
