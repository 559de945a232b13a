"""Executed notebooks to the finished report: one HTML file, one PDF, and a page a notebook."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat

from press.pages import ReportError
from press.pages.exporters import HTMLExporter, PDFExporter
from press.pages.paper import Section, combined
from press.pages.slides import SlidesExporter, SlidesPDFExporter
from press.running import config
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
    parts = []
    for part in config.parts:
        copy = build / "notebooks" / f"{part.name}.ipynb"
        noted = read_metadata(copy)
        missing = f"not executed yet; `make report ONLY={part.name}` does it"
        parts.append(
            Section(
                part.name, part.title, copy if noted else None,
                noted.get("error") if noted else missing, noted.get("profile", ""), part.question,
            )
        )  # fmt: skip
    return parts


def render(sections: Sequence[Section], out_dir: Path) -> Rendered:
    """Write `report.html`, `report.pdf` and `notebooks/<name>.html` into `out_dir`.

    `paper.ipynb`, the notebook that the report is rendered from, is kept beside them. The same
    notebooks give the same bytes. A section that failed, or that has no notebook, appears with its
    error.

    Raises:
        ReportError: there is no section, a notebook cannot be read, Typst refuses the document.
        WriteError: a file cannot be written.
    """
    if not sections:
        raise ReportError("there is nothing to report: study.toml names no notebook")
    paper = combined(sections)
    write_whole(out_dir / "paper.ipynb", nbformat.writes(paper) + "\n")
    html, _ = HTMLExporter().from_notebook_node(paper)
    page = write_whole(out_dir / "report.html", html)
    pdf, _ = PDFExporter().from_notebook_node(paper)
    rendered = Rendered(page, write_whole(out_dir / "report.pdf", pdf), {})
    for section in sections:
        if section.notebook is not None:
            text, _ = HTMLExporter().from_filename(str(section.notebook))
            path = out_dir / "notebooks" / f"{section.name}.html"
            rendered.notebooks[section.name] = write_whole(path, text)
    return rendered


def slides(products: Path, out_dir: Path) -> list[Path]:
    """Write `slides.html` and `slides.pdf`; the same notebooks give the same bytes.

    Args:
        products: a folder with the executed notebooks, as `replay.executed` leaves them.
        out_dir: gets the two files.

    Raises:
        ReportError: the paper lacks what the deck shows, a notebook cannot be read, or a slide's
            text does not fit.
        WriteError: a file cannot be written.
    """
    paper = combined(sections(config.load(), products))
    page, _ = SlidesExporter().from_notebook_node(paper)
    pdf, _ = SlidesPDFExporter().from_notebook_node(paper)
    return [write_whole(out_dir / "slides.html", page), write_whole(out_dir / "slides.pdf", pdf)]
