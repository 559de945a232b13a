"""Compare pages of two builds: their words and anchors, in order; what differs is printed.

    python tools/same_words.py OLD/report.html NEW/report.html

So a change of how pages are made shows that no number of the paper changed. Exit status 1 where
something differs.
"""

import html
import re
import sys
from difflib import unified_diff
from pathlib import Path


def words_and_anchors(page: Path) -> tuple[list[str], list[str]]:
    """What a reader sees of an HTML page, and what links can lead to."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL)
    anchors = re.findall(r'\sid="([^"]+)"', text)
    return html.unescape(re.sub(r"<[^>]+>", " ", text)).split(), anchors


def main(old: str, new: str) -> int:
    """Print how many words and anchors there are, and what differs."""
    same = True
    for name, before, after in zip(
        ("words", "anchors"),
        words_and_anchors(Path(old)),
        words_and_anchors(Path(new)),
        strict=True,
    ):
        print(f"{name}: {len(before)} and {len(after)}, {'equal' if before == after else 'not'}")
        print(*unified_diff(before, after, old, new, lineterm="", n=2), sep="\n", end="")
        same = same and before == after
    return not same


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
