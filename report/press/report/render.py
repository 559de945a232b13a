"""Executed notebooks to the finished report: one HTML file, one PDF, and a page a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from press.report import html, notebook, pdf
from press.report.combine import combine
from press.report.model import Document, ReportError, Section
from press.running.config import Config
from press.running.products import read_metadata, write_whole


@dataclass(frozen=True)
class Rendered:
    """Where the products are; `notebooks` maps a notebook's name to its HTML page."""

    html: Path
    pdf: Path
    notebooks: dict[str, Path]


def sections(config: Config, build: Path) -> list[Section]:
    """The parts of the report, as far as a folder of products has them executed."""
    found = []
    for part in config.parts:
        copy = build / "notebooks" / f"{part.name}.ipynb"
        noted = read_metadata(copy)
        missing = f"not executed yet; `make report ONLY={part.name}` does it"
        found.append(
            Section(
                part.name, part.title, copy if noted else None,
                noted.get("error") if noted else missing, noted.get("profile", ""), part.question,
            )
        )  # fmt: skip
    return found


def render(sections: Sequence[Section], out_dir: Path) -> Rendered:
    """Write `report.html`, `report.pdf` and `notebooks/<name>.html` into `out_dir`.

    The same notebooks give the same bytes. A section that failed, or that has no notebook, appears
    with its error.

    Raises:
        ReportError: there is no section, a notebook cannot be read, Typst refuses the document.
        WriteError: a file cannot be written.
    """
    if not sections:
        raise ReportError("there is nothing to report: study.toml names no notebook")
    document = combine(sections)
    rendered = Rendered(
        html=write_whole(out_dir / "report.html", html.page(document)),
        pdf=write_whole(out_dir / "report.pdf", _compiled(document)),
        notebooks={},
    )
    for section in sections:
        if section.notebook is None:
            continue
        content = html.page(notebook.document(section, section.notebook), home="../report.html")
        path = out_dir / "notebooks" / f"{section.name}.html"
        rendered.notebooks[section.name] = write_whole(path, content)
    return rendered


def _compiled(document: Document) -> bytes:
    try:
        return pdf.compiled(document)
    except RuntimeError as error:
        raise ReportError(
            f"Typst cannot set the PDF: {str(error)[:400]}. The HTML report is written; simplify "
            "what the message names (a formula, a picture) in its notebook"
        ) from error
