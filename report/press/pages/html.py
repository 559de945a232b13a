"""What the HTML templates ask: fonts, contents, code."""

import base64
import re
from typing import Any

import pandas as pd
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from press.pages.outputs import press
from study import paths


def font_data(file: str) -> str:
    """A font of the templates as the address of its own data."""
    data = base64.b64encode((paths.TEMPLATES / "fonts" / file).read_bytes()).decode()
    return f"data:font/{file.rpartition('.')[2]};base64,{data}"


def contents(cells: list[Any], lines: dict[str, str]) -> list[dict[str, Any]]:
    """Entries of the table of contents: sections, each with its subsections."""
    entries: list[dict[str, Any]] = []
    for cell in cells:
        at = press(cell)
        if at.get("role") != "heading" or at.level > 2:
            continue
        text = re.sub(r"</?a\b[^>]*>", "", lines[cell.source])
        entry = {"anchor": at.anchor, "number": at.number, "text": text, "parts": []}
        if at.level == 1 or not entries:
            entries.append(entry)
        else:
            entries[-1]["parts"].append(entry)
    return entries


def highlighted(source: str) -> str:
    """HTML of Python source; magics and anything else that is not Python stays as it is."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    marked: str = highlight(source, lexer, HtmlFormatter(nowrap=True))
    return marked


def as_csv(content: dict[str, Any]) -> str:
    """A table's cells as CSV."""
    heads = [" ".join(filter(None, names)) for names in content["columns"]]
    return pd.DataFrame(content["rows"], columns=heads).to_csv(index=False)
