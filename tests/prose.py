"""Finds measured numbers in prose: those a row holds are interpolated from it, never typed."""

import re

GENERATED = re.compile(r"<!-- claims:begin -->.*?<!-- claims:end -->", re.DOTALL)
# A README line that ends with this states what a machine must have, not what was measured on it.
REQUIREMENT = "<!-- requirement -->"

_TIME = r"ns|[µμu]s|ms|s|secs?|seconds?(?!-order)|milliseconds?|microseconds?|min|minutes?|hours?"
_BYTES = r"[kKMGTP]i?B"
_RATE = r"[kMGTP]?FLOP/s|[kMGTP]FLOP[sS]?|tok(?:en)?s?/s|it/s|samples/s"
_PHYSICAL = r"W|watts?|[kMG]Hz|°C"
_MORE = r"faster|slower|quicker|smaller|larger|bigger|less|more|fewer|higher|lower|as"
_NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_END = r"(?:$|[.,;:!?)\]|])"

_MEASURED = [
    re.compile(rf"{_NUMBER}[\s‑-]?(?:{_TIME}|{_BYTES}|{_RATE}|{_PHYSICAL})(?![\w_^])"),
    re.compile(rf"{_NUMBER}\s?(?:%|‰|percent|per cent)"),
    re.compile(rf"{_NUMBER}x\b"),
    # "3× faster" and "3×." are claims; "64×64", "4×d" and "4 × d_model" are products.
    re.compile(rf"{_NUMBER}×(?!\s*\d)(?![A-Za-z(])"),
    re.compile(rf"{_NUMBER}\s×\s*(?:{_MORE}|{_END})"),
    re.compile(rf"{_NUMBER}\s(?:times|fold)\s(?:{_MORE})\b"),
    re.compile(rf"{_NUMBER}[-‑]fold\b"),
    re.compile(rf"\b(?:factor|speed-?up|ratio) (?:of|is|was) {_NUMBER}"),
    re.compile(r"^\s*\|(?:.*\|)?\s*-?\d+\.\d+\s*\|", re.MULTILINE),
]
# A version such as 2.13.0 is no decimal; one of four digits or more was read off an instrument.
_DECIMAL = re.compile(r"(?<![\w.])\d+\.\d+(?!\w|\.\d)")
# A method's own constant, not a measurement.
_HARMLESS = re.compile(r"95\s?(?:%|per cent) (?:confidence |bootstrap )*(?:interval|band)")
_LINKS = re.compile(r"https?://\S+|\]\([^)]*\)|\barXiv:\S+|\bdoi:\S+", re.IGNORECASE)


def _plain(text: str) -> str:
    """Markdown and LaTeX reduced to what a reader sees."""
    text = _LINKS.sub(" ", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    text = re.sub(r"\\(?:text|mathrm|mathbf|operatorname)\{([^}]*)\}", r"\1", text)
    text = text.replace(r"\times", " × ").replace(r"\mu", "µ").replace(r"\%", "%")
    text = re.sub(r"\\[,;:! ]|~|&nbsp;|&thinsp;|[\u00a0\u2009\u202f]", " ", text)
    text = re.sub(r"[$*`{}]", "", text).replace("µ s", "µs")
    return _HARMLESS.sub("interval", text)


def measured_numbers(markdown: str) -> list[str]:
    """The passages of a text that state a measured number, in the order they stand."""
    text = _plain(markdown)
    found = {m.start(): m.group().strip() for rule in _MEASURED for m in rule.finditer(text)}
    for match in _DECIMAL.finditer(text):
        if len(match.group().replace(".", "").lstrip("0")) >= 4:
            found.setdefault(match.start(), match.group())
    return [found[start] for start in sorted(found)]


def readme_prose(text: str) -> str:
    """A README without its generated block and its lines of requirements."""
    text = GENERATED.sub("", text)
    return "\n".join(line for line in text.splitlines() if not line.endswith(REQUIREMENT))
