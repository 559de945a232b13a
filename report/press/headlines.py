"""What executed notebooks claim: the headlines of page one and the README, and single numbers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from measure.recording import paths
from press.display import TABLE_MIME
from press.formats import MISSING
from press.pages.outputs import answered, shown
from press.running import config
from press.running.products import copy_path

_NUMBER = re.compile(r"\{([^}]+)\}")
BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
"""Where the README's block of claims begins and ends."""
REGIMES = "kernels", "kernels-whose"
"""Study and table of whose MLP is fastest in which regime, below the README's claims."""


def read_claims(folder: Path | None = None) -> Iterator[Any]:
    """Every claim of the executed notebooks in the report's order, as `display.claim` notes it."""
    parts = config.load()
    for study in parts.with_details(parts.studies):
        for _, claim in shown(copy_path(study.name, folder)):
            if claim.get("kind") == "claim":
                path = study.notebook.resolve().relative_to(paths.ROOT).as_posix()
                yield NotebookNode(claim, title=study.title, path=path)


def counts(claim: Any, own: bool) -> str:
    """In how many recordings a claim holds, such as "H200: 3 of 3; H100: partly measured".

    `own`: of this machine alone, which needs no name; else of the others.
    """
    measured = [s for s in claim.standings if s["own"] == own and answered(s)]
    each = [s["count"] if own else f"{s['label']}: {s['count']}" for s in measured]
    return "; ".join(each) or MISSING


def table_of(study: str, name: str, folder: Path | None = None) -> Any:
    """What `display.table_json` says of a table that an executed notebook shows, else None."""
    for output, meaning in shown(copy_path(study, folder)):
        if meaning.get("kind") == "table" and meaning["name"] == name:
            return output["data"][TABLE_MIME]
    return None


def filled(words: str, machine: str | None = None) -> str:
    """A text with `{study/claim/number}` replaced by that number as the claim's sentence writes it.

    Args:
        machine: whose numbers they are, with a star where it measured some of the cases alone; by
            default the sentence's.

    A dash stands for one that is not there: a claim's notebook may not have been executed.
    """
    copies = copy_path(config.FRAME).parent.glob("*.ipynb")
    stamps = frozenset((copy, copy.stat().st_mtime_ns) for copy in copies)
    numbers = _numbers(stamps, machine)
    return _NUMBER.sub(lambda match: numbers.get(match[1], MISSING), words)


@cache
def _numbers(copies: frozenset[tuple[Path, int]], machine: str | None) -> dict[str, str]:
    """The claims' numbers by `study/claim/number`; read anew when the executed copies differ."""
    return {
        f"{claim.study}/{claim.name}/{key}": text
        for claim in read_claims()
        for stated in ([claim] if machine is None else claim.standings)
        if machine is None or stated.machine == machine
        for key, text in stated.numbers.items()
    }


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


def readme_block_of(folder: Path) -> str:
    """The block from a folder of products."""
    return readme_block(read_claims(folder), table_of(*REGIMES, folder))


def updated_readme(text: str, new: str) -> str:
    """The README `text` with a new block in the place of its own."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md needs exactly one block from {BEGIN} to {END}")
    return pattern.sub(lambda _: new, text)
