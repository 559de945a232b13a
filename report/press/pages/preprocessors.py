"""What happens to a notebook before nbconvert writes it: headings, numbers, links, Markdown.

What a preprocessor finds out stands in `metadata.press` of a cell, an output or the notebook:

    notebook   paper, title, lead; see `press.pages.paper`; dead: its links that lead nowhere
    cell       study and page, of its section; role ("heading", "answer" or "failure") with what
               the role needs
    output     anchor, number; of a picture mime and file
"""

import base64
import re
from collections.abc import Iterator
from itertools import chain, count
from os.path import relpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from nbconvert.preprocessors import Preprocessor
from nbformat.v4 import new_markdown_cell

from press.display import TABLE_MIME
from press.pages import pandoc
from press.pages.outputs import (
    DRAWING,
    MARKDOWN,
    PICTURES,
    is_figure,
    meaning,
    press,
    slugify,
)

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?=[\w#.])([\w/.-]+\.ipynb)?(?:#([^)\s]+))?\)")
_FILE = re.compile(r"(?<!!)(\[[^\]]*\]\()(?=[\w.])([\w/.-]+\.(?!ipynb)\w+)(?=\))")
_ANSWER = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


class Pictures(Preprocessor):
    """The format that is shown of each picture; source for Typst has it as a file beside it."""

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources["outputs"]` for Typst."""
        folder, files = Path(resources.get("output_files_dir") or ""), {}
        for at, cell in enumerate(nb.cells):
            for index, output in enumerate(cell.get("outputs", [])):
                if not is_figure(output):
                    continue
                mime = next(mime for mime in PICTURES if mime in output.data)
                name, data = f"picture-{at}-{index}.{PICTURES[mime]}", output.data[mime]
                files[str(folder / name)] = (
                    data.encode() if mime == DRAWING else base64.b64decode(data)
                )
                press(output).update(mime=mime, file=str(Path(folder.name) / name))
        if resources["target"] == "typst":
            resources["outputs"] = files
        return nb, resources


class Pieces(Preprocessor):
    """Each heading of a Markdown cell and each answer in `<details>` becomes a cell of its own; the
    title is the notebook's.

    HTML in Markdown is shown as text; this much of it the web, JupyterLab and our pages all know:
    pages fold an answer, and paper shows it.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Split cells at headings and answers."""
        cells = []
        for cell in nb.cells:
            if cell.cell_type != "markdown" or "role" in press(cell):
                cells.append(cell)
                continue
            for more, text in _pieces(cell.source):
                metadata = {**cell.metadata, "press": {**press(cell), **more}}
                cells.append(new_markdown_cell(text, metadata=metadata))
        first = press(cells[0]) if cells else {}
        whole = press(nb).get("paper")  # whose first section gave the title
        if first.get("role") == "heading" and first["level"] == 1 and not whole:
            press(nb).title = cells.pop(0).source
        nb.cells = cells
        return nb, resources


def _pieces(text: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Headings, answers and what stands between, each with what it is."""
    between = iter(_ANSWER.split(text))
    for plain in between:
        for level, part in parts(plain):
            yield {"role": "heading", "level": level} if level else {}, part
        if summary := next(between, None):
            yield {"role": "answer", "summary": summary}, next(between).strip("\n")


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

    A link `[picture above](#name)` finds a target of any section, `[table](3_fp32.ipynb#name)` too,
    and `[section](3_fp32.ipynb)` that section; words for readers of notebooks become "Figure 2". A
    link to a notebook keeps its words and leads to its page; one to a file goes on from the folder
    of the notebook that was executed. A link that finds nothing is only its words, and in the paper
    stands in the notebook's `dead`.
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
        here = resources.get("metadata", {}).get("path")
        others = Path(here).glob("*.ipynb") if here else ()
        self._pages = {path.stem: f"{path.stem}.html" for path in others}
        if paper:
            self._pages = press(nb).get("pages", {})
        was = nb.metadata.get("papermill", {}).get("input_path")
        self._dead: list[str] = []
        press(nb).dead = self._dead
        for cell in nb.cells:
            for holder, key, _ in markdown_of(cell):
                holder[key] = _LINK.sub(self._linked, holder[key])
                if here and was and not paper:
                    holder[key] = _FILE.sub(
                        lambda m: m[1] + relpath(Path(was).parent / m[2], here), holder[key]
                    )
        return nb, resources

    def _number(self, cell: Any, *, paper: bool) -> None:
        at = press(cell)
        if at.get("role") == "heading":
            at.level = at.level if paper else max(at.level - 1, 1)
            number = self._section(at.level, at.get("appendix", False))
            at.number = number if paper else ""
            title = f"Section {at.number}" if at.number else cell.source
            at.anchor = self._anchor(cell.source, title)
            if at.level == 1:
                self._names.setdefault(slugify(at.get("study", "")), at.anchor)
        for output in cell.get("outputs", []):
            shown = meaning(output)
            table = TABLE_MIME in output.get("data", {})
            if shown.get("kind") == "claim":
                title, name = "the claim", shown.name
            elif table or is_figure(output):
                kind = "Table" if table else "Figure"
                self._counts[kind] += 1
                press(output).update(number=self._counts[kind], page=at.get("page", ""))
                title, name = f"{kind} {self._counts[kind]}", shown.get("name", "figure")
            else:
                continue
            press(output).anchor = self._anchor(name, title)

    def _anchor(self, name: str, title: str) -> str:
        """An anchor that nothing else has, which links find by the name too."""
        wanted = slugify(name) or "part"
        every = chain([wanted], (f"{wanted}-{at}" for at in count(2)))
        anchor = next(anchor for anchor in every if anchor not in self._titles)
        self._titles[anchor] = title
        self._names.setdefault(wanted, anchor)
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

    def _linked(self, match: re.Match[str]) -> str:
        """A Markdown link with what it leads to."""
        words, path, name = match.groups()
        notebook, target = Path(path or "").stem, slugify(unquote(name or ""))
        if notebook in self._pages:
            page = self._pages[notebook]
            return f"[{words}]({page}{f'#{target}' if target else ''})" if page else words
        linked = self._names.get(target or slugify(notebook))
        if linked is None or (path and slugify(notebook) not in self._names):
            self._dead.append(match[0])
            return words or name or notebook
        return f"[{self._titles[linked]}](#{linked})"


def markdown_of(cell: Any) -> Iterator[tuple[Any, str, bool]]:
    """Where Markdown stands in a cell and its outputs: a holder, its key, and whether in one line.

    Of a claim, a table and a figure that is what they say of themselves.
    """
    if cell.cell_type == "markdown":
        yield cell, "source", press(cell).get("role") == "heading"
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        content = data.get(TABLE_MIME) or meaning(output)
        names = [name for name in ("sentence", "caption", "note") if content.get(name)]
        yield from ((content, name, True) for name in names)
        if MARKDOWN in data and not names:
            yield data, MARKDOWN, False


class Fragments(Preprocessor):
    """All Markdown of a notebook, converted at once: starting pandoc costs more than its work.

    The templates look a text up in `resources.texts`, or in `resources.lines` where it stands in
    one line, as a heading or a caption.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources.texts` and `resources.lines`."""
        lines, texts = {press(nb).get("title", ""): None}, {press(nb).get("lead", ""): None}
        for cell in nb.cells:
            for holder, key, one_line in markdown_of(cell):
                (lines if one_line else texts)[holder[key]] = None
        for name, markdown, convert in (
            ("texts", list(texts), pandoc.convert),
            ("lines", list(lines), pandoc.convert_inline),
        ):
            converted = convert(markdown, resources["target"])
            resources[name] = dict(zip(markdown, converted, strict=True))
        return nb, resources
