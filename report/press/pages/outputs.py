"""What templates and other readers ask of a notebook, its cells and outputs."""

import re
from typing import Any

from nbconvert.filters import strip_ansi
from nbformat import NotebookNode

from press.display import TABLE_MIME

MARKDOWN = "text/markdown"
DRAWING = "image/svg+xml"
PICTURES = {DRAWING: "svg", "image/png": "png", "image/jpeg": "jpg", "image/gif": "gif",
            "image/webp": "webp"}  # fmt: skip
"""Formats of pictures that pages and PDF can show, the best first, with their files' endings."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
ERROR_LINES = 14


def press(node: Any) -> Any:
    """What the press knows of a notebook, a cell or an output."""
    metadata = node.get("metadata", {})  # an error and printed text have none
    return metadata.setdefault("press", NotebookNode())


def meaning(output: Any) -> Any:
    """What `press.display` says of an output: its kind, name, caption and so on."""
    return output.get("metadata", {}).get("fusedlib", {})


def slugify(text: str) -> str:
    """Lower-case ASCII letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def is_figure(output: Any) -> bool:
    """True if an output shows a picture."""
    data = output.get("data", {})
    return TABLE_MIME not in data and bool(PICTURES.keys() & data.keys())


def plain_text(markdown: str) -> str:
    """Text of a line of Markdown for places without markup: window title, PDF's metadata."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"(?<!\\)[`*$]", "", text).replace("\\", "")


def plain(text: str) -> str:
    """Terminal output without colours and control characters."""
    return _CONTROL.sub("", strip_ansi(text)).strip("\n")


def last_lines(text: str) -> str:
    """The end of an error, where its cause stands."""
    lines = plain(text).split("\n")
    return "\n".join(["…", *lines[-ERROR_LINES:]] if len(lines) > ERROR_LINES else lines)


def error_title(output: Any) -> str:
    """An error's first line."""
    return "Execution stopped here: " + plain(f"{output.ename}: {output.evalue}").split("\n")[0]


def error_lines(output: Any) -> str:
    """The end of an error's traceback."""
    return last_lines("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")


def alternative(output: Any) -> str:
    """What a reader who cannot see a picture should know."""
    shown = meaning(output)
    text = shown.get("alt") or plain(output.data.get("text/plain", "")) or shown.get("caption")
    return text or "Picture without a caption."
