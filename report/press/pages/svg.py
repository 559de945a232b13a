"""An SVG document made ready to stand inside an HTML page among others."""

import html
import re
from collections.abc import Sequence

from press.style import INK

NAME_PT = 9


def inline(svg: str, prefix: str, alt: str) -> str:
    """The `<svg>` element alone, with its own ids, a name for screen readers, and ink that adapts.

    Args:
        svg: a document by matplotlib or another program.
        prefix: starts every id, so that clip paths and glyphs of two figures do not meet.
        alt: alternative text, plain.
    """
    element = re.search(r"<svg\b.*</svg>", svg, re.DOTALL)
    if element is None:
        raise ValueError(f"not an SVG document: {svg[:60]!r}")
    body = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", element[0], flags=re.DOTALL)
    body = re.sub(r"<(script|title|desc)\b.*?</\1>\s*", "", body, flags=re.DOTALL)
    body = _own_ids(body, prefix)
    body = re.sub(rf"{INK}|#000000\b", "currentColor", body, flags=re.IGNORECASE)
    head, rest = body.split(">", 1)
    return f'{_head(head, prefix)}<title id="{prefix}-alt">{html.escape(alt)}</title>{rest}'


def stacked(parts: Sequence[tuple[str, str]]) -> str:
    """Drawings below each other as one SVG document, each under its name.

    Args:
        parts: names and SVG documents with a width and a height in points.
    """
    wide = at = 0.0
    bodies = []
    for number, (name, svg) in enumerate(parts):
        element = re.search(r"<svg\b.*</svg>", svg, re.DOTALL)
        size = re.search(r'\swidth="([\d.]+)pt"\s+height="([\d.]+)pt"', svg) or re.search(
            r'(?=.*?\swidth="([\d.]+)pt")(?=.*?\sheight="([\d.]+)pt")', svg, re.DOTALL
        )
        if element is None or size is None:
            raise ValueError(f"not an SVG document with a size in points: {svg[:60]!r}")
        width, height = float(size[1]), float(size[2])
        body = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", element[0], flags=re.DOTALL)
        bodies += [
            f'<text x="4" y="{at + NAME_PT:g}" font-size="{NAME_PT}pt" '
            f'font-family="Libertinus Serif, serif" fill="{INK}">{html.escape(name)}</text>',
            _own_ids(
                re.sub(r'(\s(?:width|height)="[\d.]+)pt"', r'\1"', body, count=2), f"part{number}"
            ).replace("<svg", f'<svg y="{at + 1.5 * NAME_PT:g}"', 1),
        ]
        wide, at = max(wide, width), at + height + 2 * NAME_PT
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{wide:g}pt" height="{at:g}pt" viewBox="0 0 {wide:g} {at:g}">'
        f"{''.join(bodies)}</svg>"
    )


def _own_ids(body: str, prefix: str) -> str:
    ids = dict.fromkeys(re.findall(r'\sid="([^"]+)"', body))
    names = {old: f"{prefix}-{at}" for at, old in enumerate(ids)}
    body = re.sub(r'(\sid=")([^"]+)"', lambda m: f'{m[1]}{names[m[2]]}"', body)

    def target(match: re.Match[str]) -> str:
        return f"{match[1]}{names.get(match[2], match[2])}{match[3]}"

    body = re.sub(r'((?:xlink:)?href="#)([^"]+)(")', target, body)
    return re.sub(r"(url\(#)([^)]+)(\))", target, body)


def _head(head: str, prefix: str) -> str:
    """The root element: it scales, keeps its proportions, and says what it shows."""
    width = re.search(r'\swidth="([\d.]+)(pt|px)?"', head)
    height = re.search(r'\sheight="([\d.]+)(pt|px)?"', head)
    box = re.search(r'\sviewBox="[^"]*"', head)
    size = f"0 0 {width[1]} {height[1]}" if width and height else ""
    view = box[0] if box else f' viewBox="{size}"' if size else ""
    # A tenth larger than drawn: figures as wide as the PDF's text then fill the page's column.
    limit = f' style="max-width: {float(width[1]) * 1.1:.0f}{width[2] or "px"}"' if width else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"{view} '
        f'role="img" aria-labelledby="{prefix}-alt" fill="currentColor" class="drawing"{limit}>'
    )
