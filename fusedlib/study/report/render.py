"""Executed notebooks to the finished report: one HTML file, one PDF, and a page a notebook."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusedlib.study.report import html, notebook, pdf
from fusedlib.study.report.combine import FRAME, ReportError, combine
from fusedlib.study.report.model import Document, Section

__all__ = ["FRAME", "Rendered", "ReportError", "Section", "render", "write_file"]


@dataclass(frozen=True)
class Rendered:
    """Where the products are; `notebooks` maps a notebook's name to its HTML page."""

    html: Path
    pdf: Path
    notebooks: dict[str, Path]


def render(sections: Sequence[Section], out_dir: Path) -> Rendered:
    """Write `report.html`, `report.pdf` and `notebooks/<name>.html` into `out_dir`.

    The same notebooks give the same bytes. A section that failed, or that has no notebook, appears
    with its error.

    Raises:
        ReportError: there is no section, a notebook cannot be read, Typst refuses the document, a
            file cannot be written.
    """
    if not sections:
        raise ReportError("there is nothing to report: study.toml names no notebook")
    document = combine(sections)
    rendered = Rendered(
        html=write_file(out_dir / "report.html", html.page(document).encode()),
        pdf=write_file(out_dir / "report.pdf", _compiled(document)),
        notebooks={},
    )
    for section in sections:
        if section.notebook is None:
            continue
        content = html.page(notebook.document(section, section.notebook), home="../report.html")
        path = out_dir / "notebooks" / f"{section.name}.html"
        rendered.notebooks[section.name] = write_file(path, content.encode())
    return rendered


def _compiled(document: Document) -> bytes:
    try:
        return pdf.compiled(document)
    except RuntimeError as error:
        raise ReportError(
            f"Typst cannot set the PDF: {str(error)[:400]}. The HTML report is written; simplify "
            "what the message names (a formula, a picture) in its notebook"
        ) from error


def write_file(path: Path, content: bytes) -> Path:
    """Replace a file as a whole, so that a reader or a full disk never leaves half of it.

    Raises:
        ReportError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise ReportError(
            f"cannot write {path}: {error.strerror or error}. Make room, or set FUSEDLIB_BUILD to "
            "a folder you may write to"
        ) from error
    return path
