"""What happens to a notebook before nbconvert writes it: headings, numbers, links, Markdown.

What a preprocessor finds out stands in `metadata.press` of a cell, an output or the notebook:

    notebook   paper, title, lead; see `press.pages.paper`; dead: its links that lead nowhere
    cell       study, least (its headings' least level), role ("heading", "origin", "index" or
               "failure") with what the role needs
    output     anchor, number; of a picture mime, file and damage: why it cannot be shown
"""

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from io import BytesIO
from itertools import chain, count
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nbconvert.preprocessors import Preprocessor
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output
from PIL import Image

from press.display import TABLE_MIME, figure_data
from press.pages import pandoc, svg
from press.pages.outputs import (
    DRAWING,
    MARKDOWN,
    PICTURES,
    is_figure,
    meaning,
    press,
    slugify,
)
from press.style import GROUND, INK, PAPER_INK
from study import paths

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_LINK = re.compile(
    r"(?<!!)\[([^\]]*)\]\((?=[\w#.])([\w/.-]+\.ipynb)?(?:#([^)\s]+))?"
    r'( "\w+")?\)'  # a number's value: see `press.words`
)
_FILE = re.compile(r"(?<!!)(\[[^\]]*\]\()(?=[\w.])([\w/.-]+\.(?!ipynb)\w+)(?=\))")
_PICTURE = re.compile(r"^!\[([^\]]*)\]\((?:\.\./)*figures/([\w-]+)\.svg\)[ ]*$", re.MULTILINE)
_ANSWER = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


class Pictures(Preprocessor):
    """Each picture is decoded and looked at; source for Typst has it as a file beside it.

    `resources["refused"]` says of a file why Typst does not take it.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources["outputs"]` for Typst, and say of each picture what is wrong with it."""
        folder, files = Path(resources.get("output_files_dir") or ""), {}
        for at, cell in enumerate(nb.cells):
            for index, output in enumerate(cell.get("outputs", [])):
                if not is_figure(output):
                    continue
                mime = next(mime for mime in PICTURES if mime in output.data)
                name = f"picture-{at}-{index}.{PICTURES[mime]}"
                beside = str(Path(folder.name) / name)
                damage = (resources.get("refused") or {}).get(beside, "")
                try:
                    content = picture_bytes(mime, output.data[mime])
                except Exception as error:  # Pillow's decoders raise of every kind
                    damage = str(error) or type(error).__name__
                if not damage:
                    files[str(folder / name)] = content
                press(output).update(mime=mime, file=beside, damage=damage)
        if resources["target"] == "typst":
            resources["outputs"] = files
        return nb, resources


def picture_bytes(mime: str, data: str) -> bytes:
    """The bytes of a picture in a notebook; whatever is wrong with them is raised."""
    if mime == DRAWING:
        svg.element(data)
        return data.encode()
    content = base64.b64decode(data)
    Image.open(BytesIO(content)).load()
    return content


class Opening(Preprocessor):
    """A picture of `figures/` on a line of its own in Markdown becomes a figure, as cells show it.

    So it is part of the page, wherever that lies, and of the PDF.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Split the cells at such lines; one of a figure that is not drawn yet is left out."""
        nb.cells = [part for cell in nb.cells for part in _split(cell, _PICTURE, _opening)]
        return nb, resources


def _opening(cell: Any, alt: str, name: str) -> Any:
    """A cell that shows a figure of `figures/`; None where it is not drawn yet."""
    path = paths.ROOT / "figures" / f"{name}.svg"
    if not path.is_file():
        return None
    drawn = path.read_text(encoding="utf-8").replace(PAPER_INK, INK).replace(GROUND, "")
    shown = {"kind": "figure", "caption": alt, "alt": alt, "name": f"{name}-first"}
    output = new_output("display_data", figure_data(drawn, shown))
    output.metadata["fusedlib"] = shown
    return new_code_cell("", outputs=[output], metadata=cell.metadata)


class Answers(Preprocessor):
    """An answer in `<details>` becomes a cell of its own, which pages fold and paper shows.

    HTML in Markdown is shown as text; this much of it the web, JupyterLab and our pages all know.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Split the cells at their answers."""
        nb.cells = [part for cell in nb.cells for part in _split(cell, _ANSWER, _answer)]
        return nb, resources


def _answer(cell: Any, summary: str, text: str) -> Any:
    answer = _text(text, cell)
    press(answer).update(press(cell), role="answer", summary=summary)
    return answer


def _split(cell: Any, pattern: re.Pattern[str], make: Callable[..., Any]) -> Iterator[Any]:
    """The cell, or its text split where the pattern matches.

    `make` gives a match's cell, of the cell and the match's groups, or None.
    """
    if cell.cell_type != "markdown" or not pattern.search(cell.source):
        yield cell
        return
    end = 0
    for match in pattern.finditer(cell.source):
        yield _text(cell.source[end : match.start()], cell)
        if (part := make(cell, *match.groups())) is not None:
            yield part
        end = match.end()
    if cell.source[end:].strip():
        yield _text(cell.source[end:], cell)


def _text(source: str, cell: Any) -> Any:
    """A Markdown cell with part of another one's text."""
    return new_markdown_cell(source.strip("\n"), metadata=deepcopy(cell.metadata))


class Headings(Preprocessor):
    """Each heading of a Markdown cell becomes a cell of its own; the title is the notebook's."""

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Split cells at headings; a heading's level is no less than its cell's `least`."""
        cells = []
        for cell in nb.cells:
            if cell.cell_type != "markdown" or "role" in press(cell):
                cells.append(cell)
                continue
            for level, text in parts(cell.source):
                details = {**press(cell)}
                if level:
                    details |= {"role": "heading", "level": max(level, details.get("least", 1))}
                metadata = {**cell.metadata, "press": details}
                cells.append(new_markdown_cell(text, metadata=metadata))
        first = press(cells[0]) if cells else {}
        if first.get("role") == "heading" and first["level"] == 1:
            press(nb).title = cells.pop(0).source
        nb.cells = cells
        return nb, resources


def parts(text: str) -> Iterator[tuple[int, str]]:
    """Headings of a Markdown text with their levels, and with level 0 the text between them."""
    pieces: list[tuple[int, list[str]]] = [(0, [])]
    fence = ""
    for line in text.split("\n"):
        if mark := _FENCE.match(line):
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        if heading := None if fence else _HEADING.match(line):
            pieces += [(len(heading[1]), [heading[2]]), (0, [])]
        else:
            pieces[-1][1].append(line)
    for level, lines in pieces:
        if any(line.strip() for line in lines):
            yield level, "\n".join(lines).strip("\n")


class Numbers(Preprocessor):
    """Headings, tables and figures get numbers and anchors; links find what they name.

    A link `[picture above](#name)` finds a target of its own notebook first, then of any, and
    `[table](../report/sections/memory.ipynb#name)` one of that notebook, or its section. Words
    for readers of notebooks become "Figure 2"; a number's text stays. On the page of one notebook
    a link to another keeps its words and leads to that one's page; one to a file goes on from the
    folder of the notebook that was executed. A link that finds nothing is only its words, and in
    the paper stands in the notebook's `dead`.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Number in the order of the cells, then resolve all links."""
        self._titles: dict[str, str] = {}  # of what links can lead to, by anchor
        self._names: dict[str, str] = {}  # the first anchor of each name
        self._counts = {"Table": 0, "Figure": 0}
        self._sections = self._letters = self._parts = 0
        paper = bool(press(nb).get("paper"))
        for cell in nb.cells:
            self._number(cell, paper=paper)
        for cell in nb.cells:
            if press(cell).get("role") == "index":
                cell.source = _index(nb)
        self._pages = None if paper else _neighbours(resources)  # of other notebooks
        here = resources.get("metadata", {}).get("path")
        was = nb.metadata.get("papermill", {}).get("input_path")
        self._dead: list[str] = []
        press(nb).dead = self._dead
        for cell in nb.cells:
            link = partial(self._linked, press(cell).get("study", ""))
            for holder, key, _ in markdown_of(cell):
                holder[key] = _LINK.sub(link, holder[key])
                if here and was and not paper:
                    holder[key] = _FILE.sub(
                        lambda m: m[1] + relpath(Path(was).parent / m[2], here), holder[key]
                    )
        resources["anchors"] = sorted(self._titles)
        return nb, resources

    def _number(self, cell: Any, *, paper: bool) -> None:
        at = press(cell)
        study = at.get("study", "")
        if at.get("role") == "heading":
            at.update(first=not self._sections and not self._letters, level=max(at.level - 1, 1))
            number = self._section(at.level, at.get("appendix", False))
            at.number = number if paper else ""
            title = f"Section {at.number}" if at.number else cell.source
            words = (study,) if at.get("whole") else (study, at.get("after") or cell.source)
            at.anchor = self._anchor(words, title, slugify(cell.source))
        for output in cell.get("outputs", []):
            shown = meaning(output)
            table = TABLE_MIME in output.get("data", {})
            if shown.get("kind") == "claim":
                title, name = "the claim", shown.name
            elif table or is_figure(output):
                kind = "Table" if table else "Figure"
                self._counts[kind] += 1
                press(output).number = self._counts[kind]
                title, name = f"{kind} {self._counts[kind]}", shown.get("name", "figure")
            else:
                continue
            press(output).anchor = self._anchor((study, name), title, name)

    def _anchor(self, words: Iterable[str], title: str, name: str) -> str:
        """An anchor `word-word` that nothing else has, which links find by the name too."""
        wanted = "-".join(filter(None, map(slugify, words))) or "part"
        every = chain([wanted], (f"{wanted}-{at}" for at in count(2)))
        anchor = next(anchor for anchor in every if anchor not in self._titles)
        self._titles[anchor] = title
        self._names.setdefault(name, anchor)
        return anchor

    def _section(self, level: int, appendix: bool) -> str:
        """1, 1.1, ... or A, A.1, ...; deeper headings have no number."""
        if level == 1:
            self._parts = 0
            self._letters += appendix
            self._sections += not appendix
        elif level == 2:
            self._parts += 1
        section = chr(ord("A") + self._letters - 1) if self._letters else str(self._sections)
        return {1: section, 2: f"{section}.{self._parts}"}.get(level, "")

    def _linked(self, study: str, match: re.Match[str]) -> str:
        """A Markdown link with what it leads to."""
        words, path, name, value = match.groups()
        target = slugify(unquote(name or ""))
        notebook = Path(path).stem if path else study
        if path and self._pages is not None:
            at = f"#{target}" if target else ""
            page = self._pages.get(notebook)
            return f"[{words}]({page}{at})" if page else words
        section = slugify(notebook)
        local = "-".join(filter(None, (section, target)))
        elsewhere = (section if value else None,) if path else (target, self._names.get(target))
        linked = next((at for at in (local, *elsewhere) if at in self._titles), None)
        if linked is None:
            self._dead += [] if value else [match[0]]
            return words or name
        return f"[{words if value else self._titles[linked]}](#{linked})"


def _index(nb: Any) -> str:
    """A line a topic: its page, the command that measures it, its tables and figures."""
    floats: dict[str, list[str]] = {}
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if "number" in press(output):
                floats.setdefault(press(cell).study, []).append(f"[](#{press(output).anchor})")
    lines = ["| Page | Command | Shows |", "|:--|:--|:--|"]
    for origin in (press(c) for c in nb.cells if press(c).get("role") == "origin"):
        link = f"[{origin.study}]({origin.page})" if origin.page else origin.study
        shown = ", ".join(floats.get(origin.study, ["its claims"]))
        lines.append(f"| {link} | `python -m study {origin.study}` | {shown} |")
    return "\n".join(lines)


def _neighbours(resources: Any) -> dict[str, str]:
    """Pages of the notebooks in the same folder."""
    folder = resources.get("metadata", {}).get("path")
    return {p.stem: f"{p.stem}.html" for p in Path(folder).glob("*.ipynb")} if folder else {}


def markdown_of(cell: Any) -> Iterator[tuple[Any, str, bool]]:
    """Where Markdown stands in a cell and its outputs: a holder, its key, and whether in one line.

    Of a claim, a table and a figure that is what they say of themselves.
    """
    if cell.cell_type == "markdown":
        yield cell, "source", press(cell).get("role") in ("heading", "origin")
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        content = data.get(TABLE_MIME) or meaning(output)
        names = [name for name in ("headline", "sentence", "caption", "note") if content.get(name)]
        yield from ((content, name, True) for name in names)
        if MARKDOWN in data and not names:
            yield data, MARKDOWN, False


class Fragments(Preprocessor):
    """All Markdown of a notebook, converted at once: starting pandoc costs more than its work.

    The templates look a text up in `resources.texts`, or in `resources.lines` where it stands in
    one line, as a heading or a caption. `resources["as_source"]` names texts to show unconverted.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources.texts` and `resources.lines`."""
        lines, texts = {press(nb).get("title", ""): None}, {press(nb).get("lead", ""): None}
        for cell in nb.cells:
            for holder, key, one_line in markdown_of(cell):
                (lines if one_line else texts)[holder[key]] = None
        kept, target = resources.get("as_source", {}), resources["target"]
        for name, markdown, convert in (
            ("texts", list(texts), pandoc.convert),
            ("lines", list(lines), pandoc.convert_inline),
        ):
            converted = dict(zip(markdown, convert(markdown, target), strict=True))
            resources[name] = converted | {text: kept[text] for text in markdown if text in kept}
        return nb, resources
