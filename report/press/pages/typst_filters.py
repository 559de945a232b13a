"""What the Typst template asks: literals, tables, widths of drawings."""

import json
import re
import textwrap
from typing import Any

from press.formats import number
from press.pages import svg

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]")
_UNBROKEN = re.compile(r"\S{25,}")
_PIECE = re.compile(r"[^\s./(]{1,32}[./(]?|[./(]")  # what stays whole of a very long word
_DECIMAL = re.compile(r"(?<![\w.,])[−-]?\d+\.\d+(e[+-]?\d+)?(?![\w.])")
_LONG, _SHORT = 34, 14  # characters from which a column of a table holds text that wraps
_WORD = 14  # characters of its longest piece for which a column of text gets width
_HEADER = 9
_TEXT_WIDTH_PT = 464


def quoted(text: str) -> str:
    """A string literal; characters that PDF cannot hold are left out."""
    return json.dumps(_CONTROL.sub("", text), ensure_ascii=False)


def soft(text: str) -> str:
    """Text in which very long words may break, behind dots, slashes and brackets first."""
    return _UNBROKEN.sub(
        lambda match: "\N{ZERO WIDTH SPACE}".join(_PIECE.findall(match[0])),
        _CONTROL.sub("", text),
    )


def datatable(content: dict[str, Any]) -> str:
    """A table's cells as a dictionary for `datatable` of report.typ; `long` are shares of width.
    Those of a published table have at most six digits: the page has them all."""
    published = content.get("name", "").startswith("published-")
    rows = [[_short(cell) if published else cell for cell in row] for row in content["rows"]]
    cells = [[row[at] for row in rows] for at in range(len(content["columns"]))]
    lengths = [max(map(len, column), default=0) for column in cells]
    # Beside long text, the shorter text of other columns wraps too.
    least = _SHORT if max(lengths) > 2 * _LONG else _LONG
    shares = [
        max(length / _LONG, _longest_piece(column) / _WORD) if length > least else 0
        for length, column in zip(lengths, cells, strict=True)
    ]
    heads = zip(content["columns"], cells, strict=True)
    data = {
        "columns": [[*map(soft, names[:-1]), soft(_wrapped(names[-1], c))] for names, c in heads],
        "align": content["align"],
        "stub": content["stub"],
        "long": [float(f"{min(share, 8) ** 0.75:.3g}") for share in shares],
        "rows": [[*map(soft, row)] for row in rows],
    }
    return f"json(bytes({quoted(json.dumps(data))}))"


def _short(cell: str) -> str:
    """A cell whose decimal numbers have six digits where they have more."""

    def shorter(match: re.Match[str]) -> str:
        digits = re.sub(r"e.*|[−.-]", "", match[0]).lstrip("0")
        return number(float(match[0].replace("−", "-")), 6) if len(digits) > 6 else match[0]

    return _DECIMAL.sub(shorter, cell)


def _longest_piece(cells: list[str]) -> int:
    """Characters of the longest piece that `soft` leaves whole of a very long word."""
    words = (word for cell in cells for word in _UNBROKEN.findall(cell))
    return max((len(piece) for word in words for piece in _PIECE.findall(word)), default=0)


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
