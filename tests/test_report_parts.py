"""The parts of the report's pipeline, one by one."""

import re
import shutil
from pathlib import Path

import pytest
import typst

from press.pages import pandoc, svg
from study import paths

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
