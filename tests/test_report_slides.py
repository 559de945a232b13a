"""The slides: how many, what each shows, and that what does not fit is refused in words."""

import re

import pytest
from typer.testing import CliRunner

from press import cli, recording, slides
from press.headlines import Stated
from press.report.model import (
    Abstract,
    Document,
    Figure,
    Heading,
    Origin,
    Prose,
    ReportError,
    Table,
)
from slides_checks import PHONE, SCREEN, loads, overflowing, pages, words

CARD = {
    "machine": "card", "label": "CARD", "own": False, "held": 2, "measured": 3, "count": "2 of 3",
    "text": "holds in 2 of 3", "errors": [],
}  # fmt: skip
MINE = {
    "machine": "me", "label": "me", "own": True, "held": 1, "measured": 1, "count": "1 of 1",
    "text": "holds here", "errors": [],
}  # fmt: skip
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="200pt" viewBox="0 0 400 200">'
    '<path d="M0 0 L400 200" stroke="#010203"/></svg>'
)


def stated(study: str, name: str = "speed", sentence: str = "", **known) -> Stated:
    given = {"headline": True, "numbers": {"gain": "2.5×", "who": "ours"}, "verdicts": [CARD, MINE]}
    sentence = sentence or f"In {study} the {name} of ours is 2.5× that of `x = 2.5×`."
    return Stated(study, study.title(), name, sentence, **given | known)


def drawing(number: int) -> Figure:
    return Figure(f"f{number}", number, f"f{number}", f"Caption {number}.", "alt", SVG)


def report(studies: int, *, limits: str = "Limits") -> Document:
    """A report of so many studies, each with two figures."""
    blocks = [Abstract("Much is claimed.\n\nMore."), drawing(1)]
    for at in range(studies):
        blocks += [Heading(1, f"Study {at}", f"s{at}", str(at)), Origin(name(at), f"Why {at}?", "")]
        blocks += [drawing(2 * at + 2), drawing(2 * at + 3)]
    blocks += [
        Heading(1, "What to do", "do"),
        Table("t", 7, "advice", "Advice.", None, (("if",), ("then",)), 0, ("left",) * 2,
              (("slow", "warm up"),)),
        Heading(1, limits, "limits"),
        Prose("- One card, see [Table 7](#t).\n- One\n  [day](#x)."),
    ]  # fmt: skip
    return Document("What *is* true", "Version 1, rows of card.", tuple(blocks))


def name(at: int) -> str:
    return f"{at:02}_study"


def deck_of(studies: int) -> list[slides.Slide]:
    claims = [stated(name(at), n) for at in range(studies) for n in ("speed", "memory")]
    hidden = [stated(name(at), "hidden", headline=False) for at in range(studies)]
    return slides.slides(report(studies), [*hidden, *claims])


@pytest.mark.parametrize(
    ("studies", "count", "pairs"),
    [(1, 5, 0), (8, 12, 0), (10, 14, 0), (11, 15, 0), (12, 15, 1), (13, 15, 2), (22, 15, 11)],
)
def test_every_study_is_shown_on_fifteen_slides_at_most(studies, count, pairs):
    deck = deck_of(studies)
    kinds = [slide["kind"] for slide in deck]
    assert (len(deck), kinds.count("pair")) == (count, pairs)
    shown = [part["heading"] for s in deck[2:-2] for part in s.get("parts", [s])]
    assert shown == [f"Why {at}?" for at in range(studies)]
    assert pages(slides.compiled(deck, "T")) == count
    html = slides.page(deck, "T")
    assert html.count("<section") == count and not loads(html)
    assert html.count("Caption ") == html.count("<figcaption>") == studies + 1
    text = words(html)
    for at in range(studies):
        alone = at < studies - 2 * pairs
        for claim, there in (("speed", True), ("memory", alone), ("hidden", False)):
            assert (f"In {name(at)} the {claim} of ours" in text) == there
            assert (f"holds in 2 of 3 · {name(at)}/{claim}" in text) == there


def test_more_studies_than_fit_are_refused_in_words():
    with pytest.raises(ReportError, match="23 studies do not fit on 15 slides"):
        deck_of(23)


@pytest.mark.parametrize("lacking", ["figure", "abstract", "table “advice”", "section “Limits”"])
def test_a_report_that_lacks_what_is_shown_is_refused_in_words(lacking):
    whole = report(1, limits="Bounds" if "Limits" in lacking else "Limits")
    gone = {"figure": Figure, "abstract": Abstract, "table “advice”": Table}.get(lacking, Origin)
    document = Document("T", "", tuple(b for b in whole.blocks if not isinstance(b, gone)))
    with pytest.raises(ReportError, match=lacking):
        slides.slides(document, [])


def test_what_does_not_fit_names_its_slide():
    document = report(2)
    long = [stated(name(1), sentence="word " * 900)]
    with pytest.raises(ReportError, match="Why 1.*too long; shorten its claims"):
        slides.compiled(slides.slides(document, long), "T")


def test_numbers_are_bold_and_code_and_names_are_not():
    numbers = {"a": "2.5×", "b": "1.1–1.2 ms", "c": "ours", "d": "5"}
    sentence = "2.5× and 1.1–1.2 ms, not 12.5× nor `5`, $5$, 1.5, 5·7 or ours, but 5."
    document = report(1)
    claim = stated(name(0), sentence=sentence, numbers=numbers)
    html = slides.page(slides.slides(document, [claim]), "T")
    bold = re.findall(r"<strong>(.*?)</strong>", html.replace("\N{WORD JOINER}", ""))
    # The example's number, then the sentence's.
    assert [" ".join(b.split()) for b in bold] == ["2.5×", "2.5×", "1.1–1.2 ms", "5"]
    none = [stated(name(0), sentence="Nothing is counted.", numbers={"who": "ours"})]
    assert "<p>Nothing is counted.</p>" in slides.page(slides.slides(document, none), "T")


def test_a_machine_is_named_where_several_measured_and_unmeasured_is_said():
    document = report(2)
    other = CARD | {"machine": "other", "label": "OTHER", "text": "does not hold"}
    none = [v | {"measured": 0} for v in (CARD, MINE)]
    claims = [stated(name(0), verdicts=[CARD, other]), stated(name(1), verdicts=none)]
    text = words(slides.page(slides.slides(document, claims), "T"))
    assert "holds in 2 of 3 on the CARD, does not hold on the OTHER · 00_study/speed" in text
    assert "not recorded yet · 01_study/speed" in text and "holds here" not in text


def test_a_study_without_recorded_claims_shows_its_question_and_no_empty_axes():
    html = slides.page(slides.slides(report(2), []), "T")
    assert words(html).count("None of its headline claims rests on recorded rows yet") == 2
    assert html.count("<figure>") == 1 and "Why 1?" in html


def test_links_lead_nowhere_and_say_what_they_named():
    deck = deck_of(1)
    html = slides.page(deck, "T")
    assert "One card, see Table 7 of the paper." in words(html) and "<a " not in html
    assert "One day." in words(html)


def test_the_first_number_is_followed_to_its_rows():
    deck = deck_of(1)
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


def test_the_same_deck_gives_the_same_bytes():
    made = [deck_of(12) for _ in range(2)]
    assert slides.page(made[0], "T") == slides.page(made[1], "T")
    assert slides.compiled(made[0], "T") == slides.compiled(made[1], "T")


@pytest.mark.parametrize("size", [SCREEN, PHONE])
def test_long_claims_are_set_smaller_on_the_screen_too(tmp_path, size):
    document = report(12)
    long = "A long sentence which says at some length what was measured. " * 9
    claims = [stated(name(at), n, long) for at in range(12) for n in ("speed", "memory")]
    html = slides.page(slides.slides(document, claims), "T")
    assert overflowing(html, tmp_path, size) == []
    assert overflowing(html.replace("ready.then(fit)", "ready"), tmp_path, SCREEN) != []


def test_the_command_says_in_one_line_what_stands_in_its_way(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSEDLIB_BUILD", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the command sets it for its process
    monkeypatch.setattr(recording, "executed", lambda config, folder: None)
    done = CliRunner().invoke(cli.app, ["slides"])
    assert done.exit_code == 2 and list(tmp_path.iterdir()) == []
    assert done.stderr.startswith("fusedlib: the report has no figure")
    assert done.stderr.count("\n") == 1
