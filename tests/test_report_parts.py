"""The parts of the report's pipeline, one by one."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
import typst

from measure.recording import paths
from press.pages import pandoc, svg
from press.pages.html import highlighted
from press.pages.outputs import last_lines, plain, press, where_it_holds
from press.pages.preprocessors import parts
from press.pages.typst_filters import soft
from report_sample import numbered
from report_sample import text as md


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("1/3\r2/3\r3/3\r\nend", "3/3\nend"),
        ("a\x00b\x07c", "abc"),
        ("\n\n x \n\n", " x "),
    ],
)
def test_plain(given: str, expected: str) -> None:
    assert plain(given) == expected


def test_last_lines_keep_the_cause() -> None:
    shown = last_lines("\n".join(map(str, range(100)))).split("\n")
    assert shown == ["…", *map(str, range(86, 100))]
    assert last_lines("one") == "one"


def test_headings_are_found_outside_of_code_only() -> None:
    source = "# A b\ntext\n```\n# no\n```\n## C `d` ##\n\n    # code\n"
    pieces = list(parts(source))
    assert pieces[0] == (1, "A b") and pieces[2] == (2, "C `d`")
    assert [level for level, _ in pieces] == [1, 0, 2, 0]
    assert "# no" in pieces[1][1] and "# code" in pieces[3][1]
    assert list(parts("```\nopen\n## no")) == [(0, "```\nopen\n## no")]
    fenced = "```\na = 1\n# \nb = 2\n```"
    assert list(parts(f"{fenced}\n# \nend")) == [(0, fenced), (0, "end")]


@pytest.mark.parametrize(
    ("line", "heading"), [("## C# and F#", "C# and F#"), ("## C # ##", "C #"), ("# F#  ", "F#")]
)
def test_a_heading_ends_with_its_own_signs(line: str, heading: str) -> None:
    assert [text for _, text in parts(line)] == [heading]


@pytest.mark.parametrize(
    ("word", "pieces"),
    [
        ("sdpa_kernel(SDPBackend.CUDNN_ATTENTION):",
         ["sdpa_kernel(", "SDPBackend.", "CUDNN_ATTENTION):"]),
        ('torch.set_float32_matmul_precision("high")',
         ["torch.", "set_float32_matmul_precision(", '"high")']),
        ("0" * 40, ["0" * 32, "0" * 8]),
        ("torch.compile(model)", ["torch.compile(model)"]),
    ],
)  # fmt: skip
def test_a_very_long_word_breaks_behind_its_signs(word: str, pieces: list[str]) -> None:
    """A table had "SDPBackend.C" and "UDNN_ATTENTION"."""
    assert soft(word).split("\N{ZERO WIDTH SPACE}") == pieces


def test_anchors_are_given_out_once() -> None:
    cells = [md("## Limits") for _ in range(3)] + [md("## 漢字")]
    notebook = numbered(nbformat.v4.new_notebook(cells=cells))
    anchors = [press(cell).anchor for cell in notebook.cells]
    assert anchors == ["limits", "limits-2", "limits-3", "part"]


def test_many_fragments_come_back_apart() -> None:
    fragments = ["one", "", "# *two*", "```\nopen", "- a\n- b"]
    html = pandoc.convert(fragments, "html")
    assert len(html) == 5 and html[0] == "<p>one</p>" and html[1] == ""
    assert "<li>b</li>" in html[4]
    assert len(pandoc.convert(fragments, "typst")) == 5
    assert pandoc.convert([], "html") == []


@pytest.mark.parametrize("line", ["# not a heading", "1. first", "- item", "> quote", "+ plus"])
def test_a_caption_is_one_line_whatever_it_begins_with(line: str) -> None:
    (html,) = pandoc.convert_inline([line], "html")
    assert not re.search(r"<(h1|ol|ul|blockquote|p)\b", html)
    assert re.sub(r"&gt;", ">", html) == line


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (r"$a\!b\;c$", r"$ab\,c$"),
        (r"`a\!b $x\;$`", r"`a\!b $x\;$`"),
        ("took 5 ms and 3 steps", "took 5\N{NO-BREAK SPACE}ms and 3\N{NO-BREAK SPACE}steps"),
        ("a 5 mss", "a 5 mss"),
        ("```python\nx\n```", "```\nx\n```"),
        ("![alt](https://x/y.png)", "[alt](https://x/y.png)"),
        ("![alt](local.png) !", "[alt](local.png) !"),
        (r"costs \$5 or $6", r"costs \$5 or $6"),
        ("<script>x</script> <!-- y -->z", r"\<script>x\</script> z"),
    ],
)
def test_prepare(given: str, expected: str) -> None:
    assert pandoc.prepare(given) == expected


TEX = [
    r"\sum_{i=1}^n \prod_j \int_0^1 f(x)\,dx", r"\frac{a}{b}\sqrt{n}\hat{s}\tilde{x}\bar{T}\vec v",
    r"\left(\frac{1}{2}\right) \lfloor x \rfloor \lceil y \rceil \lvert z \rvert \|v\|_2",
    r"\begin{pmatrix}a & b\\c & d\end{pmatrix}",
    r"f(x)=\begin{cases}1 & x>0\\0 & x \le 0\end{cases}",
    r"\mathrm{fl}(a+b) = (a+b)(1+\delta), \quad |\delta| \le u", r"\mathbb{R}^{m\times n}",
    r"\alpha\beta\gamma\epsilon\varepsilon\lambda\mu\sigma\phi\varphi\Omega",
    r"\approx \ne \ll \in \subseteq S \cup T \cap U \to",
    r" \infty \cdot \odot \otimes \oplus \pm \propto",
    r"\underbrace{a+b}_{n} \overline{x} \text{if } \operatorname{softmax}(QK^\top)V \mathbf{W}",
    r"x \leftarrow y \Rightarrow z \mapsto w \forall \exists \partial \nabla \ldots \cdots \dots",
    r"\max_i \min_j \log_2 \exp \lim_{n\to\infty} O(n^2) \mathcal{O}(u) 2^{-24} \times 10^{-8}",
]  # fmt: skip


def test_ordinary_formulas_survive_both_ways(tmp_path: Path) -> None:
    formulas = [f"$${tex}$$" for tex in TEX]
    html, converted = (pandoc.convert(formulas, target) for target in pandoc.TARGETS)
    assert all("<math" in shown and "$$" not in shown for shown in html)
    shutil.copy(paths.TEMPLATES / "fusedlib_typst" / "report.typ", tmp_path)
    main = tmp_path / "main.typ"
    main.write_text("\n\n".join(['#import "report.typ": *', *converted]), encoding="utf-8")
    assert typst.compile(str(main), ignore_system_fonts=True).startswith(b"%PDF")


SVG = (
    '<?xml version="1.0"?><!DOCTYPE svg><svg width="10pt" height="5pt" viewBox="0 0 10 5">'
    "<metadata>x</metadata><script>evil()</script>"
    '<defs><clipPath id="c"><rect/></clipPath><path id="g" d="M0 0"/></defs>'
    '<g clip-path="url(#c)" style="stroke: #010203"><use xlink:href="#g"/></g></svg>'
)


def test_inline_svg_has_its_own_ids_and_no_extras() -> None:
    one, two = svg.inline(SVG, "one", 'a < "b"'), svg.inline(SVG, "two", "b")
    ids = [re.findall(r'id="([^"]+)"', text) for text in (one, two)]
    assert not set(ids[0]) & set(ids[1])
    for pieces, text in zip(ids, (one, two), strict=True):
        assert set(re.findall(r"#([\w-]+)[\")]", text)) <= set(pieces)
    assert "a &lt; &quot;b&quot;</title>" in one and 'viewBox="0 0 10 5"' in one
    assert "evil" not in one and "metadata" not in one and "#010203" not in one
    with pytest.raises(ValueError, match="not an SVG"):
        svg.inline("<p>no</p>", "x", "y")


def test_highlighted_code_keeps_every_character() -> None:
    source = 'def f(x):  # <&>\n    return "ä" if x else 1\n%magic ?\n'
    html = highlighted(source)
    import html as escape

    assert escape.unescape(re.sub(r"</?span[^>]*>", "", html)) == source
    assert '<span class="k">' in html and '<span class="c1">' in html


# --- what is said below a claim ------------------------------------------------------------------


def standing(machine: str, text: str, measured: int = 1, held: int = 1, **more: object) -> dict:
    label = machine.upper() if machine != "me" else machine
    common = {
        "machine": machine, "label": label, "own": machine == "me", "errors": [], "parts": 0,
        "contrary": 0,
    }  # fmt: skip
    return {**common, "text": text, "measured": measured, "held": held, "count": "", **more}


NOT = ("not measured; on a large GPU ...", 0, 0)
FAILED = {"errors": ["2026-11-25: KeyError: 'fused'"]}


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ([standing("h2", "holds in 2 of 2 recordings", 2, 2), standing("me", *NOT)],
         [("holds in 2 of 2 recordings on the H2", False)]),
        ([standing("me", "holds in 1 of 1 recording"), standing("h2", "holds in 1 of 2", 2, 1)],
         [("holds in 1 of 2 on the H2", True), ("holds in 1 of 1 recording here", False)]),
        ([standing("h2", *NOT), standing("h1", "does not hold", 1, 0), standing("me", *NOT)],
         [("does not hold on the H1", True)]),
        ([standing("h2", *NOT), standing("h1", *NOT), standing("me", *NOT)],
         [("not measured", False)]),
        ([standing("me", *NOT)], [("not measured", False)]),
        ([standing("h2", "error in the claim: KeyError", 0, 0, **FAILED), standing("me", *NOT)],
         [("error in the claim: KeyError on the H2", True)]),
        ([standing("h2", "holds in a recording of 3 of its 4 cases", 0, 0, parts=1)],
         [("holds in a recording of 3 of its 4 cases on the H2", False)]),
        ([standing("h2", "holds in 1 of 1, partly ... not", parts=2, contrary=1)],
         [("holds in 1 of 1, partly ... not on the H2", True)]),
        ([standing("h2", "does not hold (“A step of `small` is slow.”)", 1, 0)],
         [("does not hold (“A step of small is slow.”) on the H2", True)]),
        ([standing("h2", "error in the claim: no `rows`", 0, 0, **FAILED)],
         [("error in the claim: no `rows` on the H2", True)]),
        ([standing("published", "holds in the published tables")],
         [("holds in the published tables", False)]),
    ],
)  # fmt: skip
def test_below_a_claim_stands_where_it_holds_and_loudly_where_not(every, expected) -> None:
    assert where_it_holds({"standings": every}) == expected
    reworded = {"standings": every, "first": "It is twice as fast."}
    assert where_it_holds(reworded) == [
        *expected, ("first stated as “It is twice as fast.”", False),
    ]  # fmt: skip
