"""A claim: a sentence that an author wrote, with computed numbers and a predicate that must hold.

    @claim("speed", rows.query("T == 16384 and dtype == 'bfloat16'"))
    def _(rows):
        \"\"\"Fused attention is {gain:3×} as fast.\"\"\"
        gain = ratios(rows, "plain").ratio.max()
        return {"gain": gain}, gain > 3

It is evaluated for every machine and every recording. One that measured a part of the cases anew
is completed by the last full one: what it measured votes too. Numbers are medians over what the
recordings of the leading machine measured, their range in brackets where rounding shows one.
"""

import inspect
import math
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fusedlib.bench import machine as machines
from fusedlib.study import display, published
from fusedlib.study.analysis import leading
from fusedlib.study.formats import is_missing, spread

Rule = Callable[[pd.DataFrame], tuple[dict[str, Any], Any]]
THIS = "this machine"


@dataclass(frozen=True)
class Evaluation:
    """One recording's answer: the numbers, and whether it holds; None: not measured."""

    recording: str
    values: dict[str, Any]
    holds: bool | None
    partial: bool = False


@dataclass(frozen=True)
class Verdict:
    """One machine's answers."""

    machine: str
    own: bool
    evaluations: tuple[Evaluation, ...]

    @property
    def measured(self) -> int:
        """Recordings in which it could be told."""
        return sum(e.holds is not None for e in self.evaluations)

    @property
    def held(self) -> int:
        """Recordings in which it holds."""
        return sum(bool(e.holds) for e in self.evaluations)

    @property
    def count(self) -> str:
        """In how many recordings of all its cases it holds, such as "3 of 3".

        A recording of some of them counts where it contradicts.
        """
        measured = self.measured - self._in_part
        return f"{self.held - self._in_part} of {measured}"

    @property
    def _in_part(self) -> int:
        """Recordings of some cases that agree."""
        return sum(e.partial and bool(e.holds) for e in self.evaluations)

    def text(self, study: str) -> str:
        """For people."""
        if self.machine == published.MACHINE and self.measured:
            return f"{'holds' if self.held else 'does not hold'} in the published tables"
        if not self.measured:
            return f"not measured; on a large GPU `make study ONLY={study} PROFILE=full` does"
        if self.held == 0:
            return "does not hold"
        many = "recording" if self.count.endswith(" 1") else "recordings"
        more = f", and in {self._in_part} more in part" if self._in_part else ""
        return f"holds in {self.count} {many}{more}"


@dataclass
class Claim:
    """A claim and what it rests on."""

    name: str
    selection: pd.DataFrame
    rule: Rule
    template: str
    headline: bool = False
    awaiting: bool = False
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def study(self) -> str:
        """The study whose rows it rests on."""
        return str(self.selection.attrs.get("study", ""))

    def evaluate(self, rows: pd.DataFrame, recording: str, partial: bool = False) -> Evaluation:
        """The rule over the rows of one recording. A missing column, no rows or a NaN is no answer;
        an error of another kind is the author's.
        """
        try:
            values, holds = self.rule(rows)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, ZeroDivisionError):
            return Evaluation(recording, {}, None, partial)
        if any(is_missing(_plain(v)) for v in values.values()) or is_missing(_plain(holds)):
            return Evaluation(recording, {}, None, partial)
        plain = {k: _plain(v) for k, v in values.items()}
        return Evaluation(recording, plain, bool(holds), partial)

    def judge(self) -> None:
        """Evaluate every machine's recordings."""
        self.verdicts = []
        rows = self.selection
        for name in rows["machine"].cat.categories:
            part = rows[rows["machine"] == name]
            found = [self.evaluate(*said) for said in voices(part)]
            self.verdicts.append(Verdict(str(name), name == machines.key(), tuple(found)))

    def parts(self, machine: str | None = None) -> list[tuple[str, str, str]]:
        """The sentence in parts: text, then the name and formatted value of a number, or blanks.

        Numbers are of the machine, by default of the leading one; a dash stands for each where it
        measured nothing.
        """
        shown = machine or leading(self.selection)
        told = next((v for v in self.verdicts if v.machine == shown), None)
        answers = [e for e in told.evaluations if e.holds is not None] if told else []
        return [
            (text, name or "", spread(_measured(answers, name), spec or "") if name else "")
            for text, name, spec, _ in string.Formatter().parse(self.template)
        ]

    def sentence(self, machine: str | None = None) -> str:
        """The sentence with its numbers, or with those of another machine than the leading one."""
        return "".join(text + value for text, _, value in self.parts(machine))

    def numbers(self) -> dict[str, str]:
        """The numbers of the sentence as they stand in it, by name."""
        return {name: value for _, name, value in self.parts() if name}

    def verdict(self) -> str:
        """Every machine's verdict in one line, and what this one measured where it leads not."""
        who = {v.machine: f"{THIS if v.own else v.machine}: " for v in self.verdicts}
        who[published.MACHINE] = ""  # the verdict says where
        told = "; ".join(who[v.machine] + v.text(self.study) for v in self.verdicts) + "."
        mine = machines.key()
        known = mine != leading(self.selection) and any(v.own and v.measured for v in self.verdicts)
        return f"{told} Measured here: {self.sentence(mine)}" if known else told


def complete(rows: pd.DataFrame) -> list[str]:
    """The recordings of one machine that hold as many of the cases as the fullest."""
    counts = rows.groupby("recording", sort=True)["case"].nunique()
    return [str(name) for name, n in counts.items() if n == counts.max()]


def voices(rows: pd.DataFrame) -> Iterator[tuple[pd.DataFrame, str, bool]]:
    """What each recording of one machine says: rows of every case, its name, whether in part.

    A partial one is completed by the last complete one, whose rows of one session go together: they
    were timed in turns. A recording without a whole session has nothing to say.
    """
    full = complete(rows)
    base = rows[rows["recording"] == full[-1]] if full else rows
    turns = base["session"].fillna(base["case"]) if "session" in base else base["case"]
    for name, part in rows.groupby("recording", sort=True):
        if name in full:
            yield part, str(name), False
            continue
        anew = base["case"].isin(part["case"]).groupby(turns).transform("all")
        if anew.any():
            mine = part[part["case"].isin(base.loc[anew, "case"])]
            yield pd.concat([base[~anew], mine]), str(name), True


def _measured(answers: list[Evaluation], name: str) -> list[Any]:
    """The values of a number, but for those that a partial recording has from the complete one."""
    full = [a.values[name] for a in answers if name in a.values and not a.partial]
    return full + [
        a.values[name] for a in answers
        if name in a.values and a.partial and a.values[name] not in full
    ]  # fmt: skip


CLAIMS: list[Claim] = []
"""Every claim that was stated in this process, in order."""


def claim(
    name: str, selection: pd.DataFrame, *, headline: bool = False, awaiting: bool = False
) -> Callable[[Rule], Claim]:
    """State a claim over a plain selection of raw rows, evaluate it, and show it.

    Args:
        name: anchor, of lower-case letters, digits and dashes; unique in a study.
        selection: rows that it rests on, all statuses among them: also what `make record` measures.
        headline: whether it stands in the table on page one and in the README.
        awaiting: it rests on rows that nobody has recorded yet. Until they are, it is shown on the
            notebook's page only; a test fails once they are and this is still said.

    Raises:
        ValueError: the rule has no sentence as docstring.
    """

    def state(rule: Rule) -> Claim:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            raise ValueError(f'the claim "{name}" needs its sentence as the function\'s docstring')
        made = Claim(name, selection, rule, text, headline, awaiting)
        made.judge()
        CLAIMS.append(made)
        if awaiting:
            display.awaiting(made.sentence(), made.verdict())
            return made
        display.claim(
            made.sentence(), made.verdict(), name, headline=headline, study=made.study,
            numbers=made.numbers(), verdicts=[
                {"machine": v.machine, "own": v.own, "held": v.held, "measured": v.measured,
                 "count": v.count, "text": v.text(made.study)}
                for v in made.verdicts
            ],
        )  # fmt: skip
        return made

    return state


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
