"""`make slides`: a deck from the recorded rows alone, as one HTML file and as PDF.

It holds at most fifteen slides: a title with the question, the method, the studies in the order of
the report, advice, and limits. A study's slide shows its question, its first figure and all its
headline claims. Where there are more studies than slides left for them, the last ones stand two on
a slide, each with its first headline claim. No word about a result is written here: sentences,
numbers and verdicts are the claims', everything else but the method is the report's.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import typst

from fusedlib.bench import paths
from press import headlines
from press.headlines import Stated
from press.report import html, pandoc, svg
from press.report.combine import combine
from press.report.model import Abstract, Block, Document, Figure, Heading, Origin, ReportError
from press.report.render import sections
from press.running import config
from press.running.products import write_whole
from press.style import INK, PAPER_INK

MOST = 15
"""Slides of a deck."""

Slide = dict[str, Any]
"""Its `kind`; Markdown; figures."""

_TEMPLATE = "slides.typ"
_REFERENCE = re.compile(r"\[((?:Table|Figure|Section) [\w.]+)\]\(#[^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_METHOD = (
    ("Case", "A notebook lists what is measured. `notebooks/study.toml` says in which sizes."),
    ("Check", "Its output and every gradient that the problem asks for are held against a "
     "reference in higher precision. What misses is *wrong*, and gets no time."),
    ("Race", "All rivals take turns on one card and in one process: the same function, the same "
     "precision, the same gradients. Every sample is kept."),
    ("Row", "Each measured case is a row of a recording, with machine, versions and commit beside "
     "it. What could not run is a row with the reason."),
    ("Claim", "An author writes a sentence. A program computes its numbers from the rows of each "
     "recording, and decides whether it holds there."),
    ("Slide", "Numbers are medians over recordings, brackets their range. Below each claim stand "
     "its verdict and its name: the notebook, and the claim in it."),
)  # fmt: skip


def write(products: Path, out_dir: Path) -> list[Path]:
    """Write `slides.html` and `slides.pdf`; the same notebooks give the same bytes.

    Args:
        products: a folder with the executed notebooks, as `recording.executed` leaves them.
        out_dir: gets the two files.

    Raises:
        ReportError: see below, or a notebook cannot be read.
        WriteError: a file cannot be written.
    """
    document = combine(sections(config.load(), products))
    deck = slides(document, headlines.stated(products))
    title = html.plain_text(document.title)
    text, printed = page(deck, title), compiled(deck, title)
    return [
        write_whole(out_dir / "slides.html", text),
        write_whole(out_dir / "slides.pdf", printed),
    ]


def slides(document: Document, stated: Iterable[Stated]) -> list[Slide]:
    """The deck of a report.

    Args:
        document: the report as it is made from the recorded rows.
        stated: every claim of its notebooks.

    Raises:
        ReportError: the report lacks something that the deck shows, or has too many studies.
    """

    def first(wanted: Callable[[Block], bool], name: str) -> Any:
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            if wanted(block):
                return following if isinstance(block, Heading) else block
        raise ReportError(f"the report has no {name}; report/report.ipynb makes it")

    blocks, claims = document.blocks, [claim for claim in stated if claim.headline]
    origins = [at for at, block in enumerate(blocks) if isinstance(block, Origin)]
    studies = [_study(blocks[at - 1 :], claims) for at in origins]
    overview = first(lambda b: isinstance(b, Figure), "figure")
    abstract = first(lambda b: isinstance(b, Abstract), "abstract")
    advice = first(lambda b: getattr(b, "name", "") == "advice", "table “advice”")
    limits = first(
        lambda b: isinstance(b, Heading) and (b.level, b.text) == (1, "Limits"), "section “Limits”"
    )
    places = MOST - 4
    if len(studies) > 2 * places:
        raise ReportError(
            f"{len(studies)} studies do not fit on {MOST} slides, two on each; raise MOST in "
            "report/press/slides.py"
        )
    alone = min(len(studies), 2 * places - len(studies))
    shared = [studies[at : at + 2] for at in range(alone, len(studies), 2)]
    return [
        {"kind": "title", "heading": document.title, "lead": document.lead, "figure": overview,
         "caption": overview.caption, "text": abstract.text.split("\n\n")[0]},
        {"kind": "method", "heading": "The way of one number", "steps": _METHOD,
         "example": next(filter(None, map(_example, claims)), "")},
        *({"kind": "study", **study} for study in studies[:alone]),
        *({"kind": "pair", "parts": [{**s, "claims": s["claims"][:1]} for s in two]}
          for two in shared),
        {"kind": "advice", "heading": "What to do with it", "note": advice.caption,
         "columns": [names[-1] for names in advice.columns], "rows": advice.rows},
        {"kind": "limits", "heading": "What this does not show",
         "points": re.split(r"^[-*] ", limits.text, flags=re.MULTILINE)[1:]},
    ]  # fmt: skip


def page(deck: Sequence[Slide], title: str) -> str:
    """The deck as one HTML file that loads nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.TEMPLATES),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("slides.html.j2").render(
        slides=_converted(deck, "html"),
        title=title,
        drawn=lambda figure: svg.inline(figure.svg, f"f{figure.number}", figure.alt),
        fonts=html.font_faces(),
        style=(paths.TEMPLATES / "slides.css").read_text(encoding="utf-8"),
        script=(paths.TEMPLATES / "slides.js").read_text(encoding="utf-8"),
    )


def compiled(deck: Sequence[Slide], title: str) -> bytes:
    """The deck as PDF, a page a slide; text is set smaller where it would not fit.

    Raises:
        ReportError: a slide's text does not fit however small; the message names the slide.
    """
    with tempfile.TemporaryDirectory(prefix="fusedlib-slides-") as name:
        folder = Path(name)

        def saved(figure: Figure) -> dict[str, str]:
            path = folder / f"{figure.number}.svg"
            path.write_text((figure.svg or "").replace(INK, PAPER_INK), encoding="utf-8")
            return {"file": path.name, "alt": figure.alt}

        content = {"title": title, "slides": _converted(deck, "typst")}
        (folder / "deck.json").write_text(json.dumps(content, default=saved), encoding="utf-8")
        shutil.copyfile(paths.TEMPLATES / _TEMPLATE, folder / _TEMPLATE)
        try:
            made: bytes = typst.compile(str(folder / _TEMPLATE), ignore_system_fonts=True)
        except RuntimeError as error:
            raise ReportError(f"Typst cannot set the slides: {str(error)[:400]}") from error
    return made


def _study(blocks: Sequence[Block], claims: Sequence[Stated]) -> dict[str, Any]:
    """A study's title, question and headline claims, from its heading on, and its first drawing.

    What awaits rows has nothing to draw: without claims there is no drawing.
    """
    heading, origin, *rest = blocks
    assert isinstance(heading, Heading) and isinstance(origin, Origin)
    own = takewhile(lambda b: not (isinstance(b, Heading) and b.level == 1), rest)
    told = [
        {"sentence": _with_bold_numbers(claim),
         "verdict": f"{_verdict(claim)} · `{claim.study}/{claim.name}`"}
        for claim in claims if claim.study == origin.name
    ]  # fmt: skip
    figure = next((b for b in own if told and isinstance(b, Figure) and b.svg), None)
    return {"title": heading.text, "heading": origin.question, "claims": told, "figure": figure,
            "caption": figure.caption if figure else ""}  # fmt: skip


def _recorded(claim: Stated) -> list[dict[str, Any]]:
    """The verdicts of the recorded machines that measured it."""
    return [v for v in claim.verdicts if v["measured"] and not v["own"]]


def _verdict(claim: Stated) -> str:
    told = _recorded(claim)
    named = [f"{v['text']} on the {v['label']}" for v in told]
    return ", ".join(named if len(told) > 1 else [v["text"] for v in told]) or "not recorded yet"


def _numbers(claim: Stated) -> list[str]:
    """The computed values that are numbers, and no names, as the sentence has them."""
    numbers = [text for text in claim.numbers.values() if re.search(r"\d", text)]
    return sorted(numbers, key=claim.sentence.find)


def _with_bold_numbers(claim: Stated) -> str:
    """A sentence whose computed numbers stand out; code and maths stay as they are."""
    numbers = sorted(_numbers(claim), key=len, reverse=True)
    either = "|".join(map(re.escape, numbers)) or "(?!)"
    pattern = rf"`[^`]*`|\$[^$]*\$|(?<![\w.,·])(?P<number>{either})(?![\w·]|[.,]\d)"

    def bold(found: re.Match[str]) -> str:
        whole = found[0].replace("–", "–\N{WORD JOINER}")
        return f"**{whole}**" if found["number"] else found[0]

    return re.sub(pattern, bold, claim.sentence)


def _example(claim: Stated) -> str:
    """Where a claim's first number comes from; nothing if it has none."""
    numbers, told = _numbers(claim), _recorded(claim)
    rows = " and ".join(f"`report/results/{v['machine']}`" for v in told)
    if not numbers or not told:
        return ""
    return (
        f"For instance **{numbers[0]}**: computed from rows in {rows} by the claim "
        f"`{claim.study}/{claim.name}`, which {_verdict(claim)}."
    )


def _converted(deck: Sequence[Slide], target: str) -> Any:
    """The deck with its Markdown, which is every string, as `target`; links are only text."""
    texts: dict[str, str] = {}

    def mapped(value: Any, done: dict[str, str] | None) -> Any:
        if isinstance(value, str):
            texts.setdefault(value, _LINK.sub(r"\1", _REFERENCE.sub(r"\1 of the paper", value)))
            return done[value] if done else value
        if isinstance(value, dict):
            return {key: mapped(entry, done) for key, entry in value.items()}
        return [mapped(v, done) for v in value] if isinstance(value, list | tuple) else value

    mapped(deck, None)
    converted = pandoc.convert_inline(list(texts.values()), target)
    return mapped(deck, dict(zip(texts, converted, strict=True)))
