"""What tests ask of a deck or a page: its words, what it loads, what a browser cuts off."""

import html as markup
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import limits

SCREEN, PHONE = (1280, 720), (500, 844)  # chromium's windows are no narrower than 500
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_MEASURE = """<script>
const past = (a, b) => a > b + 1;
document.fonts.ready.then(() => setTimeout(() => {
  const problems = [];
  for (const slide of document.querySelectorAll(".slide")) {
    const stage = slide.querySelector(".stage"), all = stage.getBoundingClientRect();
    for (const part of stage.querySelectorAll("h1, h2, h3, p, li, td, svg, figcaption, .text")) {
      const box = part.getBoundingClientRect();
      const below = past(box.bottom, all.bottom) || past(all.top, box.top);
      const out = below || past(box.right, all.right);
      const cut = part.matches(".text") && past(part.scrollHeight, part.clientHeight);
      const wide = part.matches(".text") && past(part.scrollWidth, part.clientWidth);
      if (out || cut || wide) problems.push(slide.id + " " + part.tagName);
    }
    if (past(stage.scrollWidth, innerWidth)) problems.push(slide.id + " is wider than the window");
  }
  document.title = JSON.stringify(problems);
}, 300));
</script></body>"""


def pages(pdf: bytes) -> int:
    """Pages of a PDF that Typst made."""
    return len(re.findall(rb"/Type\s*/Page\b", pdf))


def words(html: str) -> str:
    """The text that a page shows, with plain blanks."""
    body = re.sub(r"<(style|script|title)\b.*?</\1>", "", html, flags=re.DOTALL)
    text = markup.unescape(re.sub(r"<(?!/?(strong|em|code)\b)[^>]*>", " ", body))
    text = re.sub(r"<[^>]*>|\N{WORD JOINER}", "", text)
    return " ".join(text.split())


def loads(html: str) -> list[str]:
    """What a browser would ask for outside the file; where links lead is the reader's choice."""
    attributes = r'(?:src|srcset|href|poster|data|action)="(?!#|data:)[^"]*"'
    rules = (
        rf'{attributes}|url\((?!["\']?(?:#|data:))[^)]*\)|@import|<(?:iframe|object|embed|base)\b'
    )
    return re.findall(rules, re.sub(r"<a\b[^>]*>", "", html))


def overflowing(html: str, folder: Path, size: tuple[int, int]) -> list[str]:
    """The parts of slides that a browser's window of this size cuts off; skips without one."""
    if BROWSER is None:
        pytest.skip("no chromium is here to measure the slides in; apt-get install chromium")
    page = folder / "measured.html"
    page.write_text(html.replace("</body>", _MEASURE), encoding="utf-8")
    shown = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
         f"--window-size={size[0]},{size[1]}", "--virtual-time-budget=3000", "--dump-dom",
         page.as_uri()],
        capture_output=True, text=True, check=True, timeout=limits.PROCESS_S,
    ).stdout  # fmt: skip
    problems: list[str] = json.loads(markup.unescape(re.findall("<title>(.*?)</title>", shown)[0]))
    return problems
