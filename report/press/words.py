"""Numbers in Markdown: links to a claim's value, which `make figures` writes and a test compares.

    fusedlib is [1.03–1.07×](#models "liger") as fast as Liger

names the value `liger` of the claim `models`, of the notebook itself; in `[...](memory.ipynb#
kept "liger")` of another. The number is the leading machine's median; ranges and other
machines stand in the claim.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import nbformat

from press import run, say

NUMBER = re.compile(
    r'\[([^\]\n]*)\]\((?:[\w./]*?(?P<other>\w+)\.ipynb)?#(?P<claim>[\w-]+) "(?P<value>\w+)"\)'
)
Numbers = Mapping[tuple[str, str, str], str]
"""A number's text by study, claim and value."""


class UnknownNumberError(ValueError):
    """A link names a claim or a value that is not there."""


def numbers() -> dict[tuple[str, str, str], str]:
    """The numbers of all claims."""
    return {
        (claim.topic, claim.name, value): text
        for claim in say.every() for value, text in claim.numbers().items()
    }  # fmt: skip


def relinked(text: str, study: str, numbers: Numbers) -> str:
    """A Markdown text with each linked number as it is now.

    Raises:
        UnknownNumberError: a link names a value that no claim has.
    """

    def number(match: re.Match[str]) -> str:
        key = (match["other"] or study, match["claim"], match["value"])
        if key not in numbers:
            known = sorted(value for *claim, value in numbers if tuple(claim) == key[:2])
            raise UnknownNumberError(
                f"{study}: {match[0]} links to no value of a claim; "
                f"{key[0]}/{key[1]} has {', '.join(known) or 'none'}"
            )
        short = numbers[key].partition(" [")[0]  # without the range over recordings
        return f"[{short}]{match[0].partition(']')[2]}"

    return NUMBER.sub(number, text)


def rewritten(notebook: Path, study: str, numbers: Numbers) -> str | None:
    """A notebook's file with its numbers as they are now; None where it is so already."""
    read = nbformat.read(notebook, as_version=4)
    changed = False
    for cell in read.cells:
        if cell.cell_type == "markdown":
            text = relinked(cell.source, study, numbers)
            changed |= text != cell.source
            cell.source = text
    return nbformat.writes(read) + "\n" if changed else None


def rewritten_all() -> dict[Path, str]:
    """The notebooks and pages whose numbers are not as they are now."""
    known = numbers()
    parts = [part for part in run.select() if part.name != run.FRAME]
    texts = {part.notebook: rewritten(part.notebook, part.name, known) for part in parts}
    return {path: text for path, text in texts.items() if text is not None}
