"""What the Typst template asks: literals, tables, widths of drawings."""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from press.pages import svg

_UNBROKEN = re.compile(r"\S{25,}")
_LONG, _SHORT = 34, 14  # characters from which a column of a table holds text that wraps
_HEADER = 9
_TEXT_WIDTH_PT = 464


def quoted(text: str) -> str:
    """A string literal; characters that PDF cannot hold are left out."""
    text = "".join(c for c in text if c >= " " or c in "\n\t")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def array(items: Iterable[str]) -> str:
    """An array of expressions."""
    return f"({''.join(item + ', ' for item in items)})"


def soft(text: str) -> str:
    """Text in which very long words may break."""
    return _UNBROKEN.sub(
        lambda match: "\N{ZERO WIDTH SPACE}".join(re.findall(r".{1,24}", match[0])), text
    )


def datatable(content: dict[str, Any]) -> str:
    """A table's cells as a dictionary for `datatable` of report.typ; `long` are shares of width."""
    columns, rows = content["columns"], content["rows"]
    lengths = [max((len(row[at]) for row in rows), default=0) for at in range(len(columns))]
    # Beside long text, the shorter text of other columns wraps too.
    least = _SHORT if max(lengths) > 2 * _LONG else _LONG
    long = [length / _LONG if length > least else 0 for length in lengths]
    heads = [
        [*names[:-1], _wrapped(names[-1], [row[at] for row in rows])]
        for at, names in enumerate(columns)
    ]

    def cells(texts: Iterable[str]) -> str:
        return array(quoted(soft(text)) for text in texts)

    data = {
        "columns": array(map(cells, heads)),
        "align": array(map(quoted, content["align"])),
        "stub": str(content["stub"]),
        "long": array(f"{min(share, 8) ** 0.75:.3g}" for share in long),
        "rows": array(map(cells, rows)),
    }
    return f"({', '.join(f'{name}: {value}' for name, value in data.items())})"


def _wrapped(header: str, cells: list[str]) -> str:
    """A header in lines hardly longer than the cells below, broken at blanks and after + and _."""
    spaced = re.sub(r"(?<=\w)([+_])(?=\w)", "\\1 \N{WORD JOINER}", header)
    width = max(_HEADER, *map(len, cells), *map(len, spaced.split()))
    lines = textwrap.wrap(spaced, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(" \N{WORD JOINER}", "").replace("\N{WORD JOINER}", "")


def width(drawing: str) -> str:
    """Drawings keep their size up to the text's width, other pictures fill it."""
    wide, _, unit = svg.size(drawing)
    return f"{wide:g}pt" if unit == "pt" and wide < _TEXT_WIDTH_PT else "100%"


def refused(resources: Any, compiled: Callable[[str], object]) -> dict[str, str]:
    """The Markdown texts whose conversion Typst does not accept, each as its own source."""
    anchors = "\n".join(f"#figure([x]) #label({quoted(a)})" for a in resources["anchors"])
    sources = {}
    for texts in (resources["texts"], resources["lines"]):
        for markdown, written in texts.items():
            try:
                compiled(f'#import "report.typ": *\n{anchors}\n#[{written}]\n')
            except RuntimeError:
                sources[markdown] = f"#raw({quoted(markdown)})"
    return sources
