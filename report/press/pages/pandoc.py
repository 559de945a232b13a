r"""Markdown with TeX maths to HTML with MathML or to Typst, many fragments in one call of pandoc.

The dialect is JupyterLab's: GitHub's Markdown and `$...$`. HTML tags show as text, comments vanish,
pictures become links, so nothing is ever loaded from a network.
"""

import re
from collections.abc import Sequence

import pypandoc

TARGETS = ("html", "typst")
_FORMAT = "gfm+tex_math_dollars-tex_math_gfm-emoji-footnotes-gfm_auto_identifiers+raw_attribute"
_PARTS = re.compile(
    r"(?P<fence>^ {0,3}(?P<mark>`{3,}|~{3,})[^\n]*\n.*?(?:^ {0,3}(?P=mark)[`~]*[ \t]*$|\Z))"
    r"|(?P<code>(?<!`)(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<escaped>\\\$)"
    r"|(?P<display>\$\$.+?\$\$)"
    r"|(?P<inline>\$(?![\s$])[^$\n]*?(?<![\s\\])\$(?!\d))",
    re.DOTALL | re.MULTILINE,
)
_PICTURE = re.compile(r"(?<!\\)!(?=\[)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"(?<!\\)<(?=[a-zA-Z/!?])(?!(?:https?:|mailto:)[^\s<>]*>)")
_TYPST_MATH = re.compile(r"(?<!\\)\$(?:\\.|[^$\\])*\$", re.DOTALL)
_UNITS = "ms|µs|ns|s|min|GB|GiB|MB|MiB|KiB|B|GB/s|TB/s|TFLOP/s|GFLOP/s|MHz|GHz|W|°C|%|steps?|GPUs?"
_POWER = re.compile(r"(?<=\d) × (?=10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹])")
_UNIT = re.compile(rf"(?:(?<=\d)|(?<=\d\*\*)) (?=(?:{_UNITS})(?![\w/]))")


def convert(fragments: Sequence[str], target: str) -> list[str]:
    """Each fragment of Markdown as `target`, one of `TARGETS`."""
    if not fragments:
        return []
    prepared = [prepare(fragment) for fragment in fragments]
    mark = "<!--fusedlib-fragment-->" if target == "html" else "//fusedlib-fragment"
    glue = f"\n\n```{{={target}}}\n{mark}\n```\n\n"
    parts = _pandoc(glue.join(prepared), target).split(mark)
    if len(parts) != len(prepared):  # a fragment left something open
        parts = [_pandoc(fragment, target) for fragment in prepared]
    return [_mended(part.strip("\n"), target) for part in parts]


def convert_inline(fragments: Sequence[str], target: str) -> list[str]:
    """Like `convert` for a heading or a caption: one line, without its paragraph."""
    lines = [" ".join(fragment.split()) for fragment in fragments]
    # A paragraph, whatever a line begins with: "#", "1." and "-" do not start a block.
    guarded = [re.sub(r"^(\d*)(#|[-+*>.)](?=\s))", r"\1\\\2", line) for line in lines]
    return [_unwrapped(part) for part in convert(guarded, target)]


def prepare(text: str) -> str:
    """Markdown that pandoc renders as JupyterLab does; see the functions below for what differs."""
    done, at = [], 0
    for part in _PARTS.finditer(text):
        done += [_text(text[at : part.start()]), _part(part)]
        at = part.end()
    return "".join([*done, _text(text[at:])])


def _part(part: re.Match[str]) -> str:
    if part["fence"]:
        # No language: pandoc's highlighting needs a style of its own in each target.
        return re.sub(r"^( {0,3})([`~]+)[^\n]*", r"\1\2", part[0], count=1)
    if part["display"]:
        return f"$${_math(part[0][2:-2])}$$"
    if part["inline"]:
        return f"${_math(part[0][1:-1])}$"
    return part[0]


def _text(text: str) -> str:
    return with_units(_TAG.sub(r"\\<", _COMMENT.sub("", _PICTURE.sub("", text))))


def with_units(text: str) -> str:
    """A text whose numbers stay on one line with their units."""
    text = _POWER.sub("\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}", text)
    return _UNIT.sub("\N{NO-BREAK SPACE}", text)


def _math(tex: str) -> str:
    r"""TeX that pandoc's writers get right: `\!`, `\;` and `\:` become wrong widths in Typst."""
    tex = re.sub(r"(?<!\\)\\!", "", tex)
    tex = re.sub(r"(?<!\\)\\[;:]", r"\\,", tex)
    return tex.strip()


def _pandoc(text: str, target: str) -> str:
    options = ["--wrap=none", "--columns=100000"]
    if target == "html":
        options.append("--mathml")
    converted: str = pypandoc.convert_text(text, target, format=_FORMAT, extra_args=options)
    return converted


def _mended(part: str, target: str) -> str:
    if target == "html":
        part = re.sub(r"<table[^>]*>", '<div class="scroll" tabindex="0"><table>', part)
        return part.replace("</table>", "</table></div>")
    return _TYPST_MATH.sub(lambda match: _typst_math(match[0]), part)


def _typst_math(formula: str) -> str:
    """Names that pandoc 3.9 writes and Typst 0.15 has dropped; bars in pairs as fences."""
    formula = re.sub(r"\b(dot|times|plus)\.circle\b", r"\1.o", formula).replace(" sect ", " inter ")
    if formula.count(r"\|") % 2 == 0:
        formula = re.sub(r"\\\| ([^|&,;\n]+?) \\\|", r"lr(|\1|)", formula)
    return formula


def _unwrapped(part: str) -> str:
    match = re.fullmatch(r"<p>(.*)</p>", part.strip(), re.DOTALL)
    return match[1] if match and "<p>" not in match[1] else part.strip()
