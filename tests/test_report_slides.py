"""The slides: how many, what each shows, and that what does not fit is refused in words."""

import re
from typing import Any

import pandas as pd
import pytest
from nbformat import from_dict
from nbformat.v4 import new_output
from typer.testing import CliRunner

from press import cli, display, replay
from press.pages import ReportError, slides
from press.pages.paper import combined
from press.pages.slides import FusedlibSlidesExporter, FusedlibSlidesPDFExporter
from press.render import Section
from report_sample import code, numbered, outputs_of, text, write
from slides_checks import PHONE, SCREEN, loads, overflowing, pages, words

CARD = {
    "machine": "card", "label": "CARD", "own": False, "held": 2, "measured": 3, "count": "2 of 3",
    "text": "holds in 2 of 3", "errors": [], "parts": 0, "contrary": 0,
}  # fmt: skip
MINE = {
    "machine": "me", "label": "me", "own": True, "held": 1, "measured": 1, "count": "1 of 1",
    "text": "holds here", "errors": [], "parts": 0, "contrary": 0,
}  # fmt: skip
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="200pt" viewBox="0 0 400 200">'
    '<path d="M0 0 L400 200" stroke="#010203"/></svg>'
)


def stated(study: str, name: str = "speed", sentence: str = "", **more: Any) -> Any:
    given = {
        "headline": "Ours is faster",
        "numbers": {"gain": "2.5×", "who": "ours"},
        "standings": [CARD, MINE],
    }
    sentence = sentence or f"In {study} the {name} of ours is 2.5× that of `x = 2.5×`."
    [output] = outputs_of(lambda: display.claim(sentence, "", name, study=study, **given | more))
    return output


def drawing(number: int) -> Any:
    more = {"kind": "figure", "name": f"f{number}", "caption": f"Caption {number}.", "alt": "alt"}
    data = {"image/svg+xml": SVG, "text/plain": "alt"}
    return new_output("display_data", data, metadata={"fusedlib": more})


def shown(*outputs: Any, tag: str = "frame") -> Any:
    return code("show()", *outputs, tags=(tag,))


def report(folder: Any, studies: int, claims: list[Any], *, lacking: str = "") -> Any:
    """The paper of so many studies, each with two figures, made of notebooks in a folder."""
    sections = []
    for at in range(studies):
        own = [c for c in claims if c.metadata.fusedlib.study == name(at)]
        drawn = [drawing(2 * at + 2), drawing(2 * at + 3)]
        path = write(folder / f"{name(at)}.ipynb", text("# S"), shown(*drawn, *own, tag="paper"))
        sections.append(Section(name(at), f"Study {at}", path, None, f"Why {at}?"))
    advice = pd.DataFrame({"if": ["slow"], "then": ["warm up"]})
    parts = {
        "title": text("# What *is* true\n\nVersion 1, rows of card."),
        "abstract": text("Much is claimed.\n\nMore.", "abstract"),
        "figure": shown(drawing(1)),
        "studies": text("s", "studies"),
        "table “advice”": shown(
            *outputs_of(lambda: display.table(advice, "Advice.", "advice")),
        ),
        "section “Limits”": text(
            "## Limits\n\n- One card, see [Table](#advice).\n- One\n  [day](#x)."
        ),
    }
    frame = write(folder / "report.ipynb", *(cell for key, cell in parts.items() if key != lacking))
    return combined([*sections, Section("report", "Report", frame, None)])


def name(at: int) -> str:
    return f"{at:02}_study"


def claims_of(studies: int) -> list[Any]:
    claims = [stated(name(at), n) for at in range(studies) for n in ("speed", "memory")]
    return claims + [stated(name(at), "hidden", headline="") for at in range(studies)]


def page(paper: Any) -> str:
    return FusedlibSlidesExporter().from_notebook_node(paper)[0]


def compiled(paper: Any) -> bytes:
    return FusedlibSlidesPDFExporter().from_notebook_node(paper)[0]


@pytest.mark.parametrize(
    ("studies", "count", "pairs"),
    [(1, 5, 0), (11, 15, 0), (12, 15, 1), (22, 15, 11)],
)
def test_every_study_is_shown_on_fifteen_slides_at_most(tmp_path, studies, count, pairs):
    paper = report(tmp_path, studies, claims_of(studies))
    deck = slides.deck(numbered(from_dict(paper)))
    kinds = [slide["kind"] for slide in deck]
    assert (len(deck), kinds.count("pair")) == (count, pairs)
    shown = [part["heading"] for s in deck[2:-2] for part in s.get("parts", [s])]
    assert shown == [f"Why {at}?" for at in range(studies)]
    assert pages(compiled(paper)) == count
    html = page(paper)
    assert html.count("<section") == count and not loads(html)
    assert html.count("Caption ") == html.count("<figcaption>") == studies + 1
    text = words(html)
    for at in range(studies):
        alone = at < studies - 2 * pairs
        for claim, there in (("speed", True), ("memory", alone), ("hidden", False)):
            assert (f"In {name(at)} the {claim} of ours" in text) == there
            assert (f"holds in 2 of 3 · {name(at)}/{claim}" in text) == there


def test_a_single_notebook_is_refused_in_words(tmp_path):
    path = write(tmp_path / "01.ipynb", text("# One"))
    with pytest.raises(ReportError, match="paper.ipynb"):
        FusedlibSlidesExporter().from_filename(str(path))


@pytest.mark.parametrize("lacking", ["figure", "abstract", "table “advice”", "section “Limits”"])
def test_a_report_that_lacks_what_is_shown_is_refused_in_words(tmp_path, lacking):
    with pytest.raises(ReportError, match=lacking):
        page(report(tmp_path, 0, [], lacking=lacking))


def test_what_does_not_fit_names_its_slide(tmp_path):
    long = [stated(name(1), sentence="word " * 900)]
    with pytest.raises(ReportError, match="Why 1.*too long; shorten its claims"):
        compiled(report(tmp_path, 2, long))


def test_numbers_are_bold_and_code_and_names_are_not(tmp_path):
    numbers = {"a": "2.5×", "b": "1.1–1.2 ms", "c": "ours", "d": "5"}
    sentence = "2.5× and 1.1–1.2 ms, not 12.5× nor `5`, $5$, 1.5, 5·7 or ours, but 5."
    claim = stated(name(0), sentence=sentence, numbers=numbers)
    html = page(report(tmp_path, 1, [claim]))
    bold = re.findall(r"<strong>(.*?)</strong>", html.replace("\N{WORD JOINER}", ""))
    # The example's number, then the sentence's.
    assert [" ".join(b.split()) for b in bold] == ["2.5×", "2.5×", "1.1–1.2 ms", "5"]
    none = [stated(name(0), sentence="Nothing is counted.", numbers={"who": "ours"})]
    assert "<p>Nothing is counted.</p>" in page(report(tmp_path, 1, none))


def test_a_machine_is_named_where_several_measured_and_unmeasured_is_said(tmp_path):
    other = CARD | {"machine": "other", "label": "OTHER", "text": "does not hold"}
    none = [v | {"measured": 0} for v in (CARD, MINE)]
    claims = [stated(name(0), standings=[CARD, other]), stated(name(1), standings=none)]
    shown = words(page(report(tmp_path, 2, claims)))
    assert "holds in 2 of 3 on the CARD, does not hold on the OTHER · 00_study/speed" in shown
    assert "not recorded yet · 01_study/speed" in shown and "holds here" not in shown


def test_a_study_without_recorded_claims_shows_its_question_and_no_empty_axes(tmp_path):
    html = page(report(tmp_path, 2, []))
    assert words(html).count("None of its headline claims rests on recorded rows yet") == 2
    assert html.count("<figure>") == 1 and "Why 1?" in html


def test_links_lead_nowhere_and_say_what_they_named(tmp_path):
    html = page(report(tmp_path, 1, claims_of(1)))
    assert "One card, see Table 1 of the paper." in words(html) and "<a " not in html
    assert "One day." in words(html)


def test_the_first_number_is_followed_to_its_rows(tmp_path):
    deck = slides.deck(numbered(report(tmp_path, 1, claims_of(1))))
    for part in ("**2.5×**", "`report/results/card`", "`00_study/speed`"):
        assert part in deck[1]["example"]


def test_what_a_page_would_load_is_seen():
    assert loads('<a href="#x"></a><link href="data:,"><i style="fill: url(#y)">') == []
    outside = (
        '<img src="https://a">',
        "@font-face { src: url(https://a) }",
        '@import "a"',
        "<iframe>",
    )
    assert [len(loads(text)) for text in outside] == [1] * 4


@pytest.mark.parametrize("size", [SCREEN, PHONE])
def test_long_claims_are_set_smaller_on_the_screen_too(tmp_path, size):
    long = "A long sentence which says at some length what was measured. " * 9
    claims = [stated(name(at), n, long) for at in range(12) for n in ("speed", "memory")]
    html = page(report(tmp_path, 12, claims))
    assert overflowing(html, tmp_path, size) == []
    assert overflowing(html.replace("ready.then(fit)", "ready"), tmp_path, SCREEN) != []


def test_the_command_says_in_one_line_what_stands_in_its_way(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its process
    monkeypatch.setattr(replay, "executed", lambda config, folder, only: None)
    done = CliRunner().invoke(cli.app, ["slides"])
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("fusedlib: the report has no figure")
    assert done.stderr.count("\n") == 1
