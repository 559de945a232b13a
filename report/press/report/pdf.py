"""A document as PDF through Typst: no browser, no LaTeX, no fonts of the system."""

import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import typst

from fusedlib.bench import paths
from press.report import model
from press.report.fragments import converted
from press.report.html import plain_text
from press.style import INK, PAPER_INK

_TEMPLATE = "report.typ"
_PREAMBLE = f'#import "{_TEMPLATE}": *\n'
_UNBROKEN = re.compile(r"\S{25,}")
_LONG, _SHORT = 34, 14  # characters from which a column of a table holds text that wraps
_HEADER = 9


def compiled(document: model.Document) -> bytes:
    """The PDF's bytes, the same each time.

    A formula that Typst does not understand is set as its TeX source.

    Raises:
        RuntimeError: Typst does not accept the document, with its message.
    """
    with tempfile.TemporaryDirectory(prefix="fusedlib-report-") as name:
        folder = Path(name)
        shutil.copyfile(paths.TEMPLATES / _TEMPLATE, folder / _TEMPLATE)
        for block in document.blocks:
            if isinstance(block, model.Figure):
                _write_picture(block, folder)
        title = plain_text(document.title)
        try:
            return _compile(source(converted(document, "typst"), title), folder)
        except RuntimeError:
            mended = converted(document, "typst", _accepted(document, folder))
            return _compile(source(mended, title), folder)


def source(document: model.Document, plain_title: str) -> str:
    """The document, whose texts are Typst's markup, in Typst's language."""
    first = next(
        (at for at, b in enumerate(document.blocks) if isinstance(b, model.Heading)),
        len(document.blocks),
    )
    written = [_WRITERS[type(block)](block) for block in document.blocks]
    parts = [
        _PREAMBLE,
        f"#show: report.with(title: [{document.title}], plain-title: {quoted(plain_title)}, "
        f"lead: [{document.lead}])",
        *written[:first],
        "#contents()",
        *written[first:],
    ]
    return "\n\n".join(parts) + "\n"


def quoted(text: str) -> str:
    """A string literal; characters that PDF cannot hold are left out."""
    text = "".join(c for c in text if c >= " " or c in "\n\t")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _array(items: list[str]) -> str:
    return f"({''.join(item + ', ' for item in items)})"


def _compile(text: str, folder: Path) -> bytes:
    main = folder / "main.typ"
    main.write_text(text, encoding="utf-8")
    result: bytes = typst.compile(str(main), root=str(folder), ignore_system_fonts=True)
    return result


def _accepted(document: model.Document, folder: Path) -> Callable[[str, str], str]:
    """What gives a text as it is written where Typst accepts that, else as its Markdown source."""
    anchors = "\n".join(
        f"#figure([x]) #label({quoted(block.anchor)})"
        for block in document.blocks
        if isinstance(block, model.Heading | model.Claim | model.Table | model.Figure)
    )

    def accepted(markdown: str, written: str) -> str:
        try:
            _compile(f"{_PREAMBLE}\n{anchors}\n#[{written}]\n", folder)
        except RuntimeError:
            return f"#raw({quoted(markdown)})"
        return written

    return accepted


def _write_picture(block: model.Figure, folder: Path) -> None:
    path = folder / _picture_name(block)
    if block.svg:
        path.write_text(block.svg.replace(INK, PAPER_INK), encoding="utf-8")
    else:
        path.write_bytes(block.png or b"")


def _picture_name(block: model.Figure) -> str:
    return f"figure-{block.number}.{'svg' if block.svg else 'png'}"


def _label(anchor: str) -> str:
    return f"#label({quoted(anchor)})"


def _heading(block: model.Heading) -> str:
    body = f"numbered({quoted(block.number)}, [{block.text}])"
    heading = f"#heading(level: {block.level}, {body}) {_label(block.anchor)}"
    return f"#show: appendix\n\n{heading}" if block.number == "A" else heading


def _abstract(block: model.Abstract) -> str:
    return f"#abstract[\n{block.text}\n]"


def _claim(block: model.Claim) -> str:
    verdicts = [f"({quoted(text)}, {str(fails).lower()})" for text, fails in block.verdicts]
    return f"#claim([{block.sentence}], {_array(verdicts)}) {_label(block.anchor)}"


def _table(block: model.Table) -> str:
    lengths = [
        max((len(row[at]) for row in block.rows), default=0) for at in range(len(block.columns))
    ]
    # Beside long text, the shorter text of other columns wraps too.
    least = _SHORT if max(lengths) > 2 * _LONG else _LONG
    long = [length / _LONG if length > least else 0 for length in lengths]
    heads = [
        [*names[:-1], _wrapped(names[-1], [row[at] for row in block.rows])]
        for at, names in enumerate(block.columns)
    ]
    data = {
        "columns": _array([_array([quoted(_soft(c)) for c in names]) for names in heads]),
        "align": _array([quoted(side) for side in block.align]),
        "stub": str(block.stub),
        "long": _array([f"{min(share, 8) ** 0.75:.3g}" for share in long]),
        "rows": _array([_array([quoted(_soft(c)) for c in row]) for row in block.rows]),
    }
    given = ", ".join(f"{name}: {value}" for name, value in data.items())
    note = f"[{block.note}]" if block.note else "none"
    return (
        f"#[#metadata(none) {_label(block.anchor)}]\n"
        f"#datatable({quoted(str(block.number))}, [{block.caption}], {note}, ({given}))"
    )


def _wrapped(header: str, cells: list[str]) -> str:
    """A header in lines hardly longer than the cells below, broken at blanks and after + and _."""
    spaced = re.sub(r"(?<=\w)([+_])(?=\w)", "\\1 \N{WORD JOINER}", header)
    width = max(_HEADER, *map(len, cells), *map(len, spaced.split()))
    lines = textwrap.wrap(spaced, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(" \N{WORD JOINER}", "").replace("\N{WORD JOINER}", "")


def _soft(text: str) -> str:
    """Text in which very long words may break."""
    return _UNBROKEN.sub(
        lambda found: "\N{ZERO WIDTH SPACE}".join(re.findall(r".{1,24}", found[0])), text
    )


def _figure(block: model.Figure) -> str:
    image = f"image({quoted(_picture_name(block))}, alt: {quoted(block.alt)}, {_width(block)})"
    return (
        f"#[#metadata(none) {_label(block.anchor)}]\n"
        f"#picture({quoted(str(block.number))}, [{block.caption}], {image})"
    )


def _width(block: model.Figure) -> str:
    """Drawings keep their size up to the text's width, other pictures fill it."""
    found = re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', block.svg or "")
    return f"width: {found[1]}pt" if found and float(found[1]) < 464 else "width: 100%"


def _text(block: model.Text) -> str:
    return f"#output({quoted(_soft(block.text))})"


def _failure(block: model.Failure) -> str:
    return f"#failure({quoted(_soft(block.title))}, {quoted(_soft(block.lines))})"


def _origin(block: model.Origin) -> str:
    name = f"raw({quoted(block.name)})"
    link = f"link({quoted(block.page)}, {name})" if block.page else name
    return f"#origin([{block.question}], {link})"


_WRITERS: dict[type, Callable[..., str]] = {
    model.Heading: _heading,
    model.Prose: lambda block: block.text,
    model.Abstract: _abstract,
    model.Claim: _claim,
    model.Table: _table,
    model.Figure: _figure,
    model.Text: _text,
    model.Code: lambda block: f"#raw(block: true, {quoted(block.source)})",
    model.Failure: _failure,
    model.Origin: _origin,
}
