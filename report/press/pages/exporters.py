"""nbconvert exporters of our own: an executed notebook as HTML page, Typst source, PDF or slides.

`jupyter nbconvert --to fusedlib_html NOTEBOOK` and so on render a study's executed notebook with
its code; the notebook that `press.pages.paper.combined` makes of all becomes the paper. A
template stands in `report/templates/<name>`. All pages load nothing, and the same notebook gives
the same bytes.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import typst as compiler
from nbconvert.exporters import TemplateExporter
from traitlets import default
from traitlets.config import Config

from fusedlib.bench import paths
from press.display import TABLE_MIME, header_groups
from press.pages import ReportError, html, outputs, svg, typst
from press.pages.outputs import MARKDOWN, meaning, press
from press.pages.paper import PAPERMILL_ERROR
from press.pages.preprocessors import Fragments, Headings, Numbers
from press.style import INK, PAPER_INK

PRIORITY = [TABLE_MIME, "image/svg+xml", "image/png", MARKDOWN, "text/plain"]


class PressExporter(TemplateExporter):
    """What our exporters share: preprocessors, templates, filters.

    Attributes:
        target: what Markdown becomes, "html" or "typst".
        suffix: of the file written; `folder` holds its template, index with `template_suffix`.
        own_filters: of a template beside those that all of ours ask.
    """

    target = "html"
    suffix, folder, template_suffix = ".html", "fusedlib_html", ".html.j2"
    own_filters: ClassVar[dict[str, Any]] = {}

    @property
    def default_config(self) -> Config:
        """No cells that papermill adds about errors; what an output shows, in our order."""
        ours = Config(
            {
                "NbConvertBase": {"display_data_priority": PRIORITY},
                "TagRemovePreprocessor": {"enabled": True, "remove_cell_tags": {PAPERMILL_ERROR}},
                "ExtractOutputPreprocessor": {"extract_output_types": set(PRIORITY[1:3])},
            }
        )
        ours.merge(super().default_config)
        return ours

    @default("preprocessors")
    def _preprocessors_default(self) -> list[Any]:
        coalesce = "nbconvert.preprocessors.CoalesceStreamsPreprocessor"
        return [coalesce, Headings(), Numbers(), Fragments(self.target)]

    @default("file_extension")
    def _file_extension_default(self) -> str:
        return self.suffix

    @default("template_extension")
    def _template_extension_default(self) -> str:
        return self.template_suffix

    @default("template_name")
    def _template_name_default(self) -> str:
        return self.folder

    @default("extra_template_basedirs")
    def _extra_template_basedirs_default(self) -> list[str]:
        return [str(paths.TEMPLATES)]

    @default("extra_template_paths")
    def _extra_template_paths_default(self) -> list[str]:
        return [str(paths.TEMPLATES)]

    def default_filters(self) -> list[tuple[str, Any]]:
        """nbconvert's, and what our templates ask."""
        ours: dict[str, Any] = {
            "meaning": meaning,
            "press": press,
            "verdicts": outputs.verdicts,
            "plain": outputs.plain,
            "error_title": outputs.error_title,
            "error_lines": outputs.error_lines,
            "last_lines": outputs.last_lines,
            "plain_text": outputs.plain_text,
            "alternative": html.alternative,
        }
        return [*super().default_filters(), *(ours | self.own_filters).items()]

    def _create_environment(self) -> Any:
        environment = super()._create_environment()
        environment.trim_blocks = environment.lstrip_blocks = True
        return environment

    def _init_resources(self, resources: Any) -> Any:
        resources = super()._init_resources(resources)
        resources["table_mime"] = TABLE_MIME
        return resources


class HTMLExporter(PressExporter):
    """One HTML file that loads nothing: maths as MathML, figures as inline SVG."""

    export_from_notebook = "Page of fusedlib's report"
    output_mimetype = "text/html"
    own_filters: ClassVar[dict[str, Any]] = {
        "drawing": svg.inline,
        "highlighted": html.highlighted,
        "header_groups": header_groups,
        "contents": html.contents,
    }

    def _init_resources(self, resources: Any) -> Any:
        resources = super()._init_resources(resources)
        resources.update(html.assets("fusedlib_html", "page"))
        return resources


class TypstExporter(PressExporter):
    """Source in Typst's language, beside the pictures that it shows (`resources["outputs"]`)."""

    target = "typst"
    output_mimetype = "text/x-typst"
    suffix, folder, template_suffix = ".typ", "fusedlib_typst", ".typ.j2"
    own_filters: ClassVar[dict[str, Any]] = {
        "quoted": typst.quoted,
        "soft": typst.soft,
        "array": typst.array,
        "datatable": typst.datatable,
        "width": typst.width,
    }

    @default("preprocessors")
    def _preprocessors_default(self) -> list[Any]:
        extract = "nbconvert.preprocessors.ExtractOutputPreprocessor"
        return [extract, *super()._preprocessors_default()]


class PDFExporter(TypstExporter):
    """PDF through Typst: no browser, no LaTeX, no fonts of the system.

    A formula that Typst does not understand is set as its TeX source.
    """

    export_from_notebook = "PDF of fusedlib's report"
    output_mimetype = "application/pdf"
    suffix = ".pdf"

    def from_notebook_node(self, nb: Any, resources: Any = None, **more: Any) -> tuple[Any, Any]:
        """The PDF's bytes.

        Raises:
            ReportError: Typst does not accept the document, with its message.
        """
        source, written = super().from_notebook_node(nb, resources, **more)
        pictures, written["outputs"] = written["outputs"] or {}, {}
        with tempfile.TemporaryDirectory(prefix="fusedlib-report-") as name:
            folder = Path(name)
            shutil.copy(paths.TEMPLATES / "fusedlib_typst" / "report.typ", folder)
            for file, content in pictures.items():
                drawn = content.replace(INK.encode(), PAPER_INK.encode())
                (folder / file).parent.mkdir(exist_ok=True)
                (folder / file).write_bytes(drawn if file.endswith(".svg") else content)
            try:
                return compiled(source, folder), written
            except RuntimeError:
                refused = typst.refused(written, lambda text: compiled(text, folder))
                given = {**(resources or {}), "as_source": refused}
                source, written = super().from_notebook_node(nb, given, **more)
            try:
                return compiled(source, folder), written
            except RuntimeError as error:
                raise ReportError(
                    f"Typst cannot set the PDF: {str(error)[:400]}. Simplify what the message "
                    "names (a formula, a picture) in its notebook"
                ) from error


def compiled(source: str, folder: Path) -> bytes:
    """The PDF of a Typst source that names files of a folder.

    Raises:
        RuntimeError: Typst's message.
    """
    main = folder / "main.typ"
    main.write_text(source, encoding="utf-8")
    pdf: bytes = compiler.compile(str(main), root=str(folder), ignore_system_fonts=True)
    return pdf
