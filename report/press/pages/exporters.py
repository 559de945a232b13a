"""nbconvert exporters of our own: an executed notebook as HTML page, Typst source or PDF.

`jupyter nbconvert --to fusedlib_html NOTEBOOK` and so on render an executed notebook with its
code; the notebook that `press.pages.paper.combined` makes of all becomes the paper. A template
stands in `report/templates/<name>`. All pages load nothing, and the same notebook gives the same
bytes.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import nbconvert
import typst
from nbconvert.exporters import TemplateExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from traitlets.config import Config

from press.display import TABLE_MIME, header_groups
from press.pages import ReportError, html, outputs, svg, typst_filters
from press.pages.preprocessors import Fragments, Numbers, Pictures, Pieces
from press.style import INK, PAPER_INK
from study import paths

FILTERS = (
    outputs.meaning, outputs.press, outputs.plain, outputs.error_title, outputs.error_lines,
    outputs.is_figure, outputs.last_lines, outputs.plain_text, outputs.alternative,
    html.as_csv, html.contents, html.font_data, html.highlighted, svg.inline, header_groups,
    typst_filters.quoted, typst_filters.soft, typst_filters.datatable, typst_filters.width,
)  # fmt: skip
"""What our templates ask beside nbconvert's own filters."""


def _nbconvert_templates() -> list[str]:
    """The folder of nbconvert's own templates, which ours extend, as it was installed with it.

    Jupyter looks below this Python's prefix; packages that PYTHONPATH names have theirs elsewhere.
    """
    folders = (
        parent / "share" / "jupyter" / "nbconvert" / "templates"
        for parent in Path(nbconvert.__file__).parents
    )
    return [str(folder) for folder in folders if (folder / "base").is_dir()][:1]


class PressExporter(TemplateExporter):
    """What our exporters share: preprocessors, templates, filters.

    None has the name of one of nbconvert's: what a user set for that one would count here.
    """

    target = "html"  # what Markdown becomes, or "typst"
    suffix, folder, template_suffix = ".html", "fusedlib_html", ".html.j2"
    steps: ClassVar[list[type]] = [
        CoalesceStreamsPreprocessor, Pieces, Pictures, Numbers, Fragments,
    ]  # fmt: skip

    @property
    def default_config(self) -> Config:
        """nbconvert's, and ours: where templates lie, and what happens before."""
        config = super().default_config
        config[type(self).__name__].update(
            file_extension=self.suffix, template_extension=self.template_suffix,
            template_name=self.folder, template_file=f"index{self.template_suffix}",
            preprocessors=self.steps,
            extra_template_basedirs=[str(paths.TEMPLATES), *_nbconvert_templates()],
            extra_template_paths=[str(paths.TEMPLATES)],
        )  # fmt: skip
        return config

    def default_filters(self) -> list[tuple[str, Any]]:
        """nbconvert's, and what our templates ask."""
        return [*super().default_filters(), *((one.__name__, one) for one in FILTERS)]

    def _create_environment(self) -> Any:
        environment = super()._create_environment()
        environment.trim_blocks = environment.lstrip_blocks = True
        return environment

    def _init_resources(self, resources: Any) -> Any:
        resources = super()._init_resources(resources)
        resources.update(target=self.target, table_mime=TABLE_MIME)
        return resources


class FusedlibHTMLExporter(PressExporter):
    """One HTML file that loads nothing: maths as MathML, figures as inline SVG."""

    export_from_notebook = "Page of fusedlib's report"
    output_mimetype = "text/html"


class FusedlibTypstExporter(PressExporter):
    """Source in Typst's language, beside the pictures that it shows (`resources["outputs"]`)."""

    target = "typst"
    output_mimetype = "text/x-typst"
    suffix, folder, template_suffix = ".typ", "fusedlib_typst", ".typ.j2"


class FusedlibPDFExporter(FusedlibTypstExporter):
    """PDF through Typst: no browser, no LaTeX, no fonts of the system."""

    export_from_notebook = "PDF of fusedlib's report"
    output_mimetype = "application/pdf"
    suffix = ".pdf"

    def from_notebook_node(self, nb: Any, resources: Any = None, **more: Any) -> tuple[Any, Any]:
        """The PDF's bytes."""
        given = {**(resources or {}), "output_files_dir": ""}
        source, written = super().from_notebook_node(nb, given, **more)
        files, written["outputs"] = written["outputs"], {}
        try:
            return compiled(source, files), written
        except RuntimeError as error:
            raise ReportError(
                f"Typst cannot set the PDF: {str(error)[:400]}. Simplify what the message "
                "names in its notebook"
            ) from error


def compiled(source: str, files: Mapping[str, bytes]) -> bytes:
    """The PDF of a Typst source; Typst's message is a RuntimeError.

    Beside the source stand the template that it imports, and files by name; drawings get the ink of
    paper. All lie in a folder: in memory Typst's binding takes text alone.
    """
    with tempfile.TemporaryDirectory(prefix="fusedlib-typst-") as folder:
        for name, content in {"main.typ": source.encode(), **files}.items():
            drawn = name.endswith(".svg")
            (Path(folder) / name).write_bytes(
                content.replace(INK.encode(), PAPER_INK.encode()) if drawn else content
            )
        shutil.copy(paths.TEMPLATES / "fusedlib_typst" / "report.typ", folder)
        return typst.compile(Path(folder) / "main.typ", ignore_system_fonts=True)
