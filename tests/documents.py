"""What README and CONTRIBUTING name, and which of it does not exist."""

import importlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from measure.recording import paths

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)#\s]+)\)")
EXCERPT = re.compile(r"\A# (\S+\.\w+)\n")
OMISSION = re.compile(r"^\s*\.\.\.\s*$", re.MULTILINE)
# A bare file name; whatever else has a folder of ours in front is a path as well.
FILE = re.compile(r"\.?[\w-]+\.(?:py|md|toml|yml|txt|ipynb|cff|jsonl|html|pdf|css)|\.gitignore")
VARIABLE = re.compile(r"(?:FUSEDLIB_[A-Z]+|FRESH)(?==|$)")
MAKE = re.compile(r"\bmake((?: +[\w.=/:-]+)+)")
PRODUCTS = "report/build"
SHELLS = ("sh", "bash", "console")


def problems(text: str, root: Path = paths.ROOT) -> list[str]:
    """Everything that a document names and that is not there, a sentence each."""
    found = []
    blocks = list(FENCE.finditer(text))
    for block in blocks:
        code = textwrap.dedent(block[3])
        if block[2] in SHELLS:
            found += _commands(code, root)
        elif runs(block):
            continue  # a test runs it
        elif not EXCERPT.match(code):
            found.append(f"a {block[2]} block does not name the file it is quoted from")
        else:
            found += _excerpt(code, root)
    prose = FENCE.sub("", text)
    for span in SPAN.findall(prose):
        found += _span(span, root)
    for target in LINK.findall(prose):
        if "://" not in target and not (root / target).exists():
            found.append(f"the link to {target} leads nowhere")
    return found


def runs(block: re.Match[str]) -> bool:
    """True for a whole program: Python that begins with its imports."""
    return block[2] == "python" and block[3].lstrip().startswith("import ")


def _span(span: str, root: Path) -> Iterator[str]:
    """One text between backticks: a command, a path, a dotted name or a variable."""
    if " " in span:
        yield from _commands(span, root)
    elif variable := VARIABLE.match(span):
        if not re.search(rf"\b{variable[0]}\b", _sources(root)):
            yield f"no source reads {variable[0]}"
    elif re.fullmatch(r"(fusedlib|measure|models|press)(\.\w+)+", span):
        if not _resolves(span):
            yield f"there is no {span}"
    elif _is_path(span, root) and not _exists(span, root):
        yield f"there is no {span}"


def _is_path(span: str, root: Path) -> bool:
    if re.search(r"[<>*$=:]", span) or span.startswith(("!", "/", "-")):
        return False
    first, slash, _ = span.partition("/")
    return bool(FILE.fullmatch(span)) or bool(slash and (root / first).exists())


def _exists(path: str, root: Path) -> bool:
    if path == PRODUCTS:
        return True
    if path.startswith(PRODUCTS + "/"):
        # A product is not in the repository: the code that writes it names it, or its notebook is.
        name = Path(path)
        made = f'"{name.name}"' in _sources(root)
        return made or (root / "notebooks" / f"{name.stem}.ipynb").exists()
    return (root / path).exists()


def _resolves(dotted: str) -> bool:
    """Whether a dotted name is a module of ours or something in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def _commands(text: str, root: Path) -> Iterator[str]:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE)
    settings = makefile.partition(".DEFAULT_GOAL")[0]
    variables = re.findall(r"^([A-Z]+) +[:?]=", settings, re.MULTILINE)
    for words in MAKE.findall(text):
        for word in words.split():
            name, equals, _ = word.partition("=")
            if equals and name not in variables:
                yield f"make knows no variable {name}"
            if not equals and name not in targets:
                yield f"make knows no target {name}"
    for module in re.findall(r"python -m ((?:fusedlib|measure|press)[\w.]*)", text):
        if not _resolves(module):
            yield f"there is no module {module}"


def _excerpt(code: str, root: Path) -> Iterator[str]:
    """A quotation: after each `...` it goes on further down in the same file."""
    name = EXCERPT.match(code)[1]
    if not (root / name).exists():
        yield f"there is no {name} to quote from"
        return
    source, place = _content(root / name), 0
    for part in OMISSION.split(EXCERPT.sub("", code)):
        part = part.strip("\n")
        if not part.strip():
            continue
        at = _place_of(part, source, place)
        if at < 0:
            yield f"{name} does not hold what is quoted from it: {part.strip().splitlines()[0]}"
            return
        place = at + len(part)


def _place_of(part: str, source: str, start: int) -> int:
    """Where a quotation stands from `start` on, as it is or as the body of something; or -1."""
    indented = (textwrap.indent(part, " " * depth) for depth in (0, 4, 8))
    return next((at for text in indented if (at := source.find(text, start)) >= 0), -1)


def _content(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def _sources(root: Path) -> str:
    files = [
        root / "Makefile",
        *sorted(p for f in ("fusedlib", "notebooks", "report") for p in (root / f).rglob("*.py")),
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)
