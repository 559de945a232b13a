"""Claims: sentences that an author wrote, with computed numbers and a condition that must hold.

    @claim("kernels/models", of=lambda rows: rows.query("group == 'models'"))
    def models(rows):
        \"\"\"In bf16 fusedlib is {speed:3×} as fast as Liger.\"\"\"
        speed = ratio(rows, over="liger").groupby("shape").ratio.median()
        return {"speed": (speed.min(), speed.max())}, speed.between(1, 1.12).all()

They stand in `report/claims/<topic>.py`. A machine's set of recordings answers if it has a row of
each case that the claim selects and the profile `full` measures; nothing is borrowed from another.
A number is of the newest such set of the first machine; behind the sentence stand the other
machines' in its order: "✓ H200 · ✓ H100: 1.18×, 43 %". Of code that no version changed it is the
range over all sets.
"""

import importlib
import inspect
import math
import os
import pkgutil
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

import pandas as pd

from fusedlib.bench import machine as machines
from press import display
from press.formats import MISSING, formatted, is_missing
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
    """What one set says. `holds` is None where a number is missing or some rows `failed`, so that
    nobody can tell, or where the rule raised `error`, which is a mistake of its author."""

    set: str
    rows: Rows
    values: dict[str, Any]
    holds: bool | None
    error: str = ""
    failed: int = 0


@dataclass(frozen=True)
class Claim:
    """A claim as its author stated it; `evaluate` adds what each machine's sets of all cases say,
    oldest first, the machine first whose numbers lead, and in `begun` who has some cases alone."""

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
    optional: Callable[[Rows], Rows] | None = None
    answers: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()

    def decided(self, machine: str) -> list[Answer]:
        """A machine's answers that say whether it holds."""
        return [answer for answer in self.answers.get(machine, ()) if answer.holds is not None]

    def status(self, machine: str) -> str:
        """✓; ✗: one set contradicts; "once": another could, and there is none; "": none tells."""
        if not (decided := self.decided(machine)):
            return ""
        varies = self.repeats == MEASURED and machine != MACHINE
        alone = "once" if varies and len(decided) == 1 else "✓"
        return alone if all(answer.holds for answer in decided) else "✗"

    def mark(self, machine: str) -> str:
        """The status beside the machine, with its days where the newest rows are of older code."""
        for answer in self.answers[machine]:
            if answer.error:
                return f"error in the claim: {answer.set}: {answer.error}"
        if not (decided := self.decided(machine)):
            return f"{_called(machine)}: not all cases" if machine in self.begun else ""
        newest = decided[-1].rows
        old = f", {days(newest)}" if older(newest) else ""
        return f"{self.status(machine)} {_called(machine)}{old}"

    @property
    def leading(self) -> str:
        """The machine whose numbers come first in the sentence: the first that has them."""
        return next(filter(self.decided, self.answers), "")

    def sets(self) -> Iterator[tuple[str, str, Rows]]:
        """Each machine's sets that have all cases, oldest first, with the last row of each."""
        chosen, wanted = self._wanted()
        if self.optional:  # whoever ran
            more = self.optional(rows_of(self.topic))
            more = more[more["status"] == "ok"]
        if "measured_at" in chosen:  # a published row has no time
            ended = chosen.groupby(["machine", "set"])["measured_at"].transform("max").astype(str)
            chosen = chosen.iloc[ended.argsort(kind="stable")]
        for (machine, name), rows in chosen.groupby(["machine", "set"], sort=False):
            if wanted and wanted <= {*(pairs := _pairs(rows))}:
                rows = rows[pairs.isin(wanted)]
                if self.optional:
                    same = more[(more["machine"] == machine) & (more["set"] == name)]
                    rows = pd.concat([rows, same]).copy()
                yield machine, name, rows[~_pairs(rows).duplicated(keep="last")]

    def machines_with_rows(self) -> set[str]:
        """Those that have a row at least of what a set needs."""
        chosen, wanted = self._wanted()
        return {*chosen.loc[_pairs(chosen).isin(wanted), "machine"]}

    def _wanted(self) -> tuple[Rows, set[tuple[str, str]]]:
        """The rows that it selects, and of which races and providers a set needs one."""
        chosen = self.of(rows_of(self.topic))
        return chosen, required(self.topic, chosen)

    def answer(self, name: str, rows: Rows) -> Answer:
        """The rule over the rows of one set. A NaN or a row that failed is no answer, and where
        fusedlib is wrong it does not hold; what the rule raises is shown."""
        status = rows["status"] if "status" in rows else pd.Series("ok", rows.index)
        if failed := int((status == "failed").sum()):
            return Answer(name, rows, {}, None, failed=failed)
        wrong = rows.loc[status == "wrong", "provider"].astype(str)
        is_wrong = bool(wrong.str.startswith("fused").any())
        try:
            values, holds = self.rule(rows)
            values, holds = {n: _plain(value) for n, value in values.items()}, _plain(holds)
            self.texts([values])
        except Exception as error:
            if is_wrong:  # and has no figure, which rules may count on
                return Answer(name, rows, dict.fromkeys(self._fields()), False)
            return Answer(name, rows, {}, None, f"{type(error).__name__}: {error}")
        known = is_wrong or not any(map(is_missing, (*values.values(), holds)))
        return Answer(name, rows, values, bool(holds and not is_wrong) if known else None)

    def _fields(self) -> dict[str, str]:
        """The names of the sentence's numbers, and how they are written."""
        return {n: spec or "" for _, n, spec, _ in string.Formatter().parse(self.template) if n}

    def texts(self, values: list[dict[str, Any]]) -> dict[str, str]:
        """The sentence's numbers by name: of the last set, or the range over all."""
        texts = {}
        for name, spec in self._fields().items():
            every = [one[name] for one in values]
            if self.unchanged and all(isinstance(value, int | float | tuple) for value in every):
                ends = [end for one in every for end in (one if isinstance(one, tuple) else [one])]
                every = [(min(ends), max(ends))] if ends else []
            texts[name] = formatted(every[-1] if every else None, spec)
        return texts

    def numbers(self, machine: str = "") -> dict[str, str]:
        """The sentence's numbers by name, of the machine that it speaks of or of another."""
        return self.texts([answer.values for answer in self.decided(machine or self.leading)])

    def sentence(self) -> str:
        """The sentence with its numbers; a dash stands for what nobody measured."""
        fields, numbers = string.Formatter().parse(self.template), self.numbers()
        text = "".join(words + numbers.get(name or "", "") for words, name, *_ in fields)
        first = next(iter(self.answers), "")
        text = text if self.leading in ("", first) else f"{_called(self.leading)}: {text}"
        return text[:1].upper() + text[1:]

    def marks(self) -> list[str]:
        """How it stands on every machine that can tell, with its numbers where they differ from
        the sentence's, in the sentence's order."""
        own, marks = self.numbers(), []
        for machine in self.answers:
            theirs = self.numbers(machine) if self.decided(machine) else own
            alike = {
                name for name, text in own.items()
                if theirs[name] == text and text.replace(",", "").isdigit()
            }  # fmt: skip
            unlike = [text for name, text in theirs.items() if name not in alike]
            differing = ", ".join(unlike) if theirs != own else ""
            marks.append(": ".join(filter(None, [self.mark(machine), differing])))
        return [*filter(None, marks)] or ["not measured"]


CLAIMS: dict[str, Claim] = {}
"""By `topic/name`, as their files stated them: not evaluated."""


def claim(
    name: str, headline: str = "", *, of: Callable[[Rows], Rows], first: str = "",
    repeats: str = MEASURED, lead: str = "", unchanged: bool = False,
    optional: Callable[[Rows], Rows] | None = None,
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
        optional: selects what the rule takes too where a set has it, such as rivals that older sets
            lack. Its sentence then names whom it compares with.
    """
    topic, _, anchor = name.partition("/")
    if not anchor or repeats not in REPEATS:
        raise ValueError(f'the claim "{name}" needs a name "topic/anchor" and repeats of {REPEATS}')

    def state(rule: Rule) -> Rule:
        text = " ".join((inspect.getdoc(rule) or "").split())
        if not text:
            raise ValueError(f'the claim "{name}" needs its sentence as the rule\'s docstring')
        CLAIMS[name] = Claim(topic, anchor, headline, of, rule, text, first, repeats, lead,
                             unchanged, optional)  # fmt: skip
        return rule

    return state


def evaluate(name: str) -> Claim:
    """A claim with how it stands on every machine that has rows of its topic, and on this one; of
    one about published tables on these alone."""
    topic = name.partition("/")[0]
    importlib.import_module(f"claims.{topic}")
    stated, own = CLAIMS[name], machines.label(machines.key())
    found = [(machine, stated.answer(of_set, rows)) for machine, of_set, rows in stated.sets()]
    there = {machine for machine, _ in found}
    if there != {MACHINE}:
        there |= {*rows_of(topic)["machine"], own}
    order = dict.fromkeys((stated.lead, *ORDER, *sorted(there - {own}), own))
    answers = {one: [answer for machine, answer in found if machine == one] for one in order
               if one in there}  # fmt: skip
    begun = stated.machines_with_rows() - {one for one, answer in found if not answer.failed}
    return replace(stated, answers=answers, begun=frozenset(begun))


def say(*names: str) -> None:
    """Show claims and how they stand."""
    for name in names:
        it = evaluate(name)
        display.claim(it.sentence(), it.marks(), name=f"{it.topic}-{it.name}")


def filled(words: str, machine: str = "") -> str:
    """A text with `{topic/claim/number}` replaced by that number as the claim's sentence writes it,
    and `{days}` by the days of the rows of all these numbers.

    Args:
        machine: whose numbers they are, by default those of the sentence.

    A dash stands for one that is not there.
    """
    rows = [pd.DataFrame()]

    def number(match: re.Match[str]) -> str:
        topic, claim, value = match[1].split("/")
        it = evaluate(f"{topic}/{claim}")
        over = slice(None) if it.unchanged else slice(-1, None)  # a range is over all sets
        rows.extend(answer.rows for answer in it.decided(machine or it.leading)[over])
        return it.numbers(machine).get(value, MISSING)

    text = re.sub(r"\{([^{}]+/[^{}]+/[^{}]+)\}", number, words)
    return text.replace("{days}", days(pd.concat(rows)) or MISSING)


def ledger(topic: str) -> pd.DataFrame:
    """A line a set of recordings that answers a claim of a topic: what it says, and where from."""
    lines = []
    for claim in every(topic):
        for machine, answers in claim.answers.items():
            for answer in answers:
                said = (
                    f"failed: {answer.failed} of {len(answer.rows)}"
                    if answer.failed
                    else (answer.error or ", ".join(claim.texts([answer.values]).values()))
                )
                mark = MISSING if answer.holds is None else "✗✓"[answer.holds]
                lines.append((claim.name, _called(machine), answer.set, origin(answer.rows), mark,
                              said))  # fmt: skip
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


def _called(machine: str) -> str:
    """A machine's name in a sentence."""
    return THIS if machine == machines.label(machines.key()) else machine


def _plain(value: Any) -> Any:
    """numpy's scalars as Python's; what is not finite is missing."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
