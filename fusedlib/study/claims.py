"""A claim: a sentence that an author wrote, with computed numbers and a predicate that must hold.

    @claim("speed", rows.query("T == 16384 and dtype == 'bfloat16'"))
    def _(rows):
        \"\"\"Fused attention is {gain:3×} as fast.\"\"\"
        gain = ratios(rows, "plain").ratio.max()
        return {"gain": gain}, gain > 3

It is evaluated for every machine and every complete recording. Numbers are medians over the
recordings of the leading machine, their range in brackets where rounding shows one.
"""

import inspect
import math
import string
from collections.abc import Callable
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

    def text(self, study: str) -> str:
        """For people."""
        if self.machine == published.MACHINE and self.measured:
            return f"{'holds' if self.held else 'does not hold'} in the published tables"
        if not self.measured:
            return f"not measured; `make study ONLY={study} PROFILE=full` does"
        if self.held == 0:
            return "does not hold"
        many = "recording" if self.measured == 1 else "recordings"
        return f"holds in {self.held} of {self.measured} {many}"


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

    def evaluate(self, rows: pd.DataFrame, recording: str) -> Evaluation:
        """The rule over the rows of one recording. A missing column, no rows or a NaN is no answer;
        an error of another kind is the author's.
        """
        try:
            values, holds = self.rule(rows)
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, ZeroDivisionError):
            return Evaluation(recording, {}, None)
        if any(is_missing(_plain(v)) for v in values.values()) or is_missing(_plain(holds)):
            return Evaluation(recording, {}, None)
        return Evaluation(recording, {k: _plain(v) for k, v in values.items()}, bool(holds))

    def judge(self) -> None:
        """Evaluate every machine's complete recordings."""
        self.verdicts = []
        rows = self.selection
        for name in rows["machine"].cat.categories:
            part = rows[rows["machine"] == name]
            found = [self.evaluate(part[part["recording"] == r], r) for r in complete(part)]
            self.verdicts.append(Verdict(str(name), name == machines.key(), tuple(found)))

    def parts(self) -> list[tuple[str, str, str]]:
        """The sentence in parts: text, then the name and formatted value of a number, or blanks.

        A dash stands for each number where nothing was measured.
        """
        shown = leading(self.selection)
        told = next((v for v in self.verdicts if v.machine == shown), None)
        answers = [e.values for e in told.evaluations if e.holds is not None] if told else []
        return [
            (
                text,
                name or "",
                spread([a[name] for a in answers if name in a], spec or "") if name else "",
            )
            for text, name, spec, _ in string.Formatter().parse(self.template)
        ]

    def sentence(self) -> str:
        """The sentence with its numbers."""
        return "".join(text + value for text, _, value in self.parts())

    def numbers(self) -> dict[str, str]:
        """The numbers of the sentence as they stand in it, by name."""
        return {name: value for _, name, value in self.parts() if name}

    def verdict(self) -> str:
        """Every machine's verdict in one line."""
        who = {v.machine: f"{THIS if v.own else v.machine}: " for v in self.verdicts}
        who[published.MACHINE] = ""  # the verdict says where
        return "; ".join(who[v.machine] + v.text(self.study) for v in self.verdicts) + "."


def complete(rows: pd.DataFrame) -> list[str]:
    """The recordings of one machine that hold as many of the cases as the fullest."""
    counts = rows.groupby("recording", sort=True)["case"].nunique()
    return [str(name) for name, n in counts.items() if n == counts.max()]


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
            display.awaiting(made.template, made.verdict())
            return made
        display.claim(
            made.sentence(), made.verdict(), name, headline=headline, study=made.study,
            numbers=made.numbers(), verdicts=[
                {"machine": v.machine, "own": v.own, "held": v.held, "measured": v.measured,
                 "text": v.text(made.study)}
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
