"""Source code with its words marked for colouring by the page's own style sheet."""

import html

from pygments import lex  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]
from pygments.token import Comment, Keyword, Number, Operator, String, Token  # type: ignore[import-untyped]

# Few classes, so that the style sheet can give each a sufficient contrast in both themes.
_CLASSES = (
    (Comment, "c"),
    (String, "s"),
    (Number, "n"),
    (Keyword, "k"),
    (Operator.Word, "k"),
    (Token.Name.Function, "f"),
    (Token.Name.Class, "f"),
)


def highlighted(source: str) -> str:
    """HTML of Python source; magics and anything else that is not Python stays as it is."""
    parts = []
    for token, text in lex(source, PythonLexer(stripnl=False, ensurenl=False)):
        name = next((name for kind, name in _CLASSES if token in kind), None)
        escaped = html.escape(text)
        parts.append(f'<span class="{name}">{escaped}</span>' if name else escaped)
    return "".join(parts)
