"""What the topics claim: the headlines of page one and the README, and single numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nbformat import NotebookNode

from press import run, say
from press.display import TABLE_MIME
from press.formats import MISSING
from press.pages.outputs import answered, shown
from study import paths

_NUMBER = re.compile(r"\{([^}]+)\}")
BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
"""Where the README's block of claims begins and ends."""
REGIMES = "kernels", "kernels-whose"
"""Topic and table of whose MLP is fastest in which regime, below the README's claims."""


def stated() -> Iterator[Any]:
    """Every claim in the report's order, as `display.claim` notes it."""
    for page in run.pages():
        path = page.notebook.relative_to(paths.ROOT).as_posix()
        for claim in say.every(page.name):
            yield NotebookNode(claim.as_json(), title=page.title, path=path)


def counts(claim: Any, own: bool) -> str:
    """In how many recordings a claim holds, such as "H200: 3 of 3; H100: partly measured".

    `own`: of this machine alone, which needs no name; else of the others.
    """
    measured = [s for s in claim.standings if s["own"] == own and answered(s)]
    each = [s["count"] if own else f"{s['label']}: {s['count']}" for s in measured]
    return "; ".join(each) or MISSING


def table_of(topic: str, name: str) -> Any:
    """What `display.table_json` says of a table that an executed page shows, else None."""
    for output, meaning in shown(run.copies() / f"{topic}.ipynb"):
        if meaning.get("kind") == "table" and meaning["name"] == name:
            return output["data"][TABLE_MIME]
    return None


def filled(words: str, machine: str | None = None) -> str:
    """A text with `{topic/claim/number}` replaced by that number as the claim's sentence writes it.

    Args:
        machine: whose numbers they are, with a star where it measured some of the cases alone; by
            default the sentence's.

    A dash stands for one that is not there.
    """
    return _NUMBER.sub(lambda match: _number(match[1], machine), words)


def _number(named: str, machine: str | None) -> str:
    topic, claim, value = named.split("/")
    it = say.evaluate(f"{topic}/{claim}")
    if machine is None:
        return it.numbers().get(value, MISSING)
    own = [one for one in it.standings_as_json() if one["machine"] == machine]
    return own[0]["numbers"].get(value, MISSING) if own else MISSING


def readme_block(stated: Iterable[Any], regimes: Mapping[str, Any] | None = None) -> str:
    """The block, markers included: a line a headline claim, and in how many recordings it holds.

    A table of regimes follows, as `display.table_json` has it, if somebody recorded it.
    """
    lines = ["| | Finding | In numbers | Repeated on |", "| --- | --- | --- | --- |"]
    before = None
    for claim in (c for c in stated if c.headline):
        link = f"[{claim.title}]({claim.path})" if claim.study != before else ""
        finding, held = f"**{claim.headline}**", counts(claim, own=False)
        lines.append(f"| {link} | {finding} | {claim.sentence} | {held} |")
        before = claim.study
    if regimes:
        rules = [":--" if side == "left" else "--:" for side in regimes["align"]]
        heads = [" ".join(filter(None, names)) for names in regimes["columns"]]
        cells = [heads, rules, *regimes["rows"]]
        lines += ["", regimes["caption"], "", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join([BEGIN, *lines, END])


def updated_readme(text: str, new: str) -> str:
    """The README `text` with a new block in the place of its own."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md needs exactly one block from {BEGIN} to {END}")
    return pattern.sub(lambda _: new, text)
