"""nbconvert exporters of our own: an executed notebook as HTML page, Typst source, PDF or slides.

`jupyter nbconvert --to fusedlib_html NOTEBOOK` and so on render a study's executed notebook with
its code; the notebook that `press.pages.paper.combined` makes of all becomes the paper or a deck
of slides. A template stands in `report/templates/<name>`. All pages load nothing, and the same
notebook gives the same bytes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import typst
from nbconvert.exporters import TemplateExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExtractOutputPreprocessor
from traitlets.config import Config

from measure.recording import paths
from press.display import TABLE_MIME, header_groups
from press.pages import ReportError, html, outputs, svg, typst_filters
from press.pages.preprocessors import Fragments, Headings, Numbers
from press.style import INK, PAPER_INK

PRIORITY = [TABLE_MIME, "image/svg+xml", "image/png", outputs.MARKDOWN, "text/plain"]
FILTERS = {
    function.__name__: function
    for function in (
        outputs.meaning, outputs.press, outputs.where_it_holds, outputs.plain, outputs.error_title,
        outputs.error_lines, outputs.last_lines, outputs.plain_text, outputs.alternative,
        html.contents, html.font_data, html.highlighted, svg.inline, header_groups,
        typst_filters.quoted, typst_filters.soft, typst_filters.datatable, typst_filters.width,
    )
}  # fmt: skip
"""What our templates ask beside nbconvert's own filters."""


class PressExporter(TemplateExporter):
    """What our exporters share: preprocessors, templates, filters."""

    target = "html"  # what Markdown becomes, or "typst"
    suffix, folder, template_suffix = ".html", "fusedlib_html", ".html.j2"
    steps: ClassVar[list[type]] = [CoalesceStreamsPreprocessor, Headings, Numbers, Fragments]

    @property
    def default_config(self) -> Config:
        """nbconvert's, and ours: what an output shows, in our order, and where templates lie."""
        config = super().default_config
        config.NbConvertBase.display_data_priority = PRIORITY
        config.ExtractOutputPreprocessor.extract_output_types = set(PRIORITY[1:3])
        config[type(self).__name__].update(
            file_extension=self.suffix, template_extension=self.template_suffix,
            template_name=self.folder, preprocessors=self.steps,
            extra_template_basedirs=[str(paths.TEMPLATES)],
            extra_template_paths=[str(paths.TEMPLATES)],
        )  # fmt: skip
        return config

    def default_filters(self) -> list[tuple[str, Any]]:
        """nbconvert's, and what our templates ask."""
        return [*super().default_filters(), *FILTERS.items()]

    def _create_environment(self) -> Any:
        environment = super()._create_environment()
        environment.trim_blocks = environment.lstrip_blocks = True
        return environment

    def _init_resources(self, resources: Any) -> Any:
        resources = super()._init_resources(resources)
        resources.update(target=self.target, table_mime=TABLE_MIME)
        return resources


class HTMLExporter(PressExporter):
    """One HTML file that loads nothing: maths as MathML, figures as inline SVG."""

    export_from_notebook = "Page of fusedlib's report"
    output_mimetype = "text/html"


class TypstExporter(PressExporter):
    """Source in Typst's language, beside the pictures that it shows (`resources["outputs"]`)."""

    target = "typst"
    output_mimetype = "text/x-typst"
    suffix, folder, template_suffix = ".typ", "fusedlib_typst", ".typ.j2"
    steps: ClassVar[list[type]] = [ExtractOutputPreprocessor, *PressExporter.steps]


class PDFExporter(TypstExporter):
    """PDF through Typst: no browser, no LaTeX, no fonts of the system.

    A formula that Typst does not understand is set as its TeX source.
    """

    export_from_notebook = "PDF of fusedlib's report"
    output_mimetype = "application/pdf"
    suffix = ".pdf"

    def from_notebook_node(self, nb: Any, resources: Any = None, **more: Any) -> tuple[Any, Any]:
        """The PDF's bytes."""
        source, written = super().from_notebook_node(nb, resources, **more)
        files, written["outputs"] = written["outputs"] or {}, {}
        look = "fusedlib_typst/report.typ"
        try:
            return compiled(source, look, files), written
        except RuntimeError:
            refused = typst_filters.refused(written, lambda text: compiled(text, look, files))
            given = {**(resources or {}), "as_source": refused}
            source, written = super().from_notebook_node(nb, given, **more)
            written["outputs"] = {}
        try:
            return compiled(source, look, files), written
        except RuntimeError as error:
            raise ReportError(
                f"Typst cannot set the PDF: {str(error)[:400]}. Simplify what the message "
                "names (a formula, a picture) in its notebook"
            ) from error


def compiled(source: str, look: str, files: Mapping[str, bytes]) -> bytes:
    """The PDF of a Typst source; Typst's message is a RuntimeError.

    Beside the source stand the template that it imports, and files by name; drawings get the ink of
    paper.
    """
    template = paths.TEMPLATES / look
    project: Any = {"main.typ": source.encode(), template.name: template.read_bytes()}
    for name, content in files.items():
        drawn = name.endswith(".svg")
        project[name] = content.replace(INK.encode(), PAPER_INK.encode()) if drawn else content
    return typst.compile(project, ignore_system_fonts=True)
