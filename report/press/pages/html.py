"""What the HTML templates ask: fonts and style sheets, contents, code, tables."""

import base64
import re
from typing import Any

from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from fusedlib.bench import paths
from press.pages.outputs import meaning, plain, press

_FACES = (
    ("STIX Two Math Subset", "stix-two-math-subset.woff2", "woff2", ""),
    ("Libertinus Serif", "libertinus-serif-regular.ttf", "truetype", ""),
    ("Libertinus Serif", "libertinus-serif-italic.woff", "woff", "font-style: italic; "),
    ("Libertinus Serif", "libertinus-serif-bold.woff", "woff", "font-weight: 600 800; "),
)


def assets(template: str, name: str) -> dict[str, str]:
    """Fonts, style sheet and script that a template writes into its page."""
    folder = paths.TEMPLATES / template
    return {
        "fonts": "\n".join(map(_font_face, _FACES)),
        "style": (folder / f"{name}.css").read_text(encoding="utf-8"),
        "script": (folder / f"{name}.js").read_text(encoding="utf-8"),
    }


def _font_face(face: tuple[str, str, str, str]) -> str:
    family, file, kind, style = face
    data = base64.b64encode((paths.TEMPLATES / "fonts" / file).read_bytes()).decode()
    source = f'src: url("data:font/{kind};base64,{data}") format("{kind}")'
    return f'@font-face {{ font-family: "{family}"; {style}{source}; }}'


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


def alternative(output: Any) -> str:
    """What a reader who cannot see a picture should know."""
    shown = meaning(output)
    text = shown.get("alt") or plain(output.data.get("text/plain", "")) or shown.get("caption")
    return text or "Picture without a caption."


def highlighted(source: str) -> str:
    """HTML of Python source; magics and anything else that is not Python stays as it is."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    marked: str = highlight(source, lexer, HtmlFormatter(nowrap=True))
    return marked
