"""An SVG document made ready to stand inside an HTML page among others."""

import html
import re

from press.style import INK

_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def inline(svg: str, prefix: str, alt: str) -> str:
    """The `<svg>` element alone, with its own ids, a name for screen readers, and ink that adapts.

    The prefix starts every id, so that clip paths and glyphs of two figures do not meet.
    """
    whole = re.search(r"<svg\b.*</svg>", svg, re.DOTALL)
    if whole is None:
        raise ValueError(f"not an SVG document: {svg[:60]!r}")
    extras = r"<(metadata|script|title|desc)\b.*?</\1>\s*|<!--.*?-->\s*"
    body = re.sub(extras, "", whole[0], flags=re.DOTALL)
    body = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    head, rest = body.split(">", 1)
    rest = re.sub(rf"{INK}|#000000\b", "currentColor", rest, flags=re.IGNORECASE)
    width, height, unit = size(head)
    view = re.search(r'\sviewBox="[^"]*"', head)
    view_box = view[0] if view else f' viewBox="0 0 {width:g} {height:g}"'
    # A tenth larger than drawn: figures as wide as the PDF's text then fill the page's column.
    limit = f' style="max-width: {width * 1.1:.0f}{unit}"' if width else ""
    return (
        f'<svg {_NAMESPACES}{view_box if view or width else ""} role="img" '
        f'aria-labelledby="{prefix}-alt" fill="currentColor" class="drawing"{limit}>'
        f'<title id="{prefix}-alt">{html.escape(alt)}</title>{rest}'
    )


def size(svg: str) -> tuple[float, float, str]:
    """Width, height and their unit as the root element states them; zeros where it does not."""
    head = svg[svg.find("<svg") :].split(">", 1)[0]
    width = re.search(r'\swidth="([\d.]+)(pt|px)?"', head)
    height = re.search(r'\sheight="([\d.]+)(pt|px)?"', head)
    return (float(width[1]), float(height[1]), width[2] or "px") if width and height else (0, 0, "")
