"""What tests ask of a page or a PDF: its pages, its words, what it loads."""

import html as markup
import re


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
