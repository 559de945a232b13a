"""The words that a PDF shows, as Typst sets them: no reader of PDF is needed to look."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import typst

# Each run of text is noted where it is set, whatever markup it came from.
_NOTED = """#show text: it => { [#metadata(it.text)<printed>]; it }
"""


@contextmanager
def printed() -> Iterator[list[str]]:
    """The text of each PDF that is made in the block, without blanks and joiners.

    What Typst refuses is no PDF.
    """
    texts: list[str] = []
    compile_ = typst.compile

    def compile_and_read(main: Path, **options: Any) -> bytes:
        compiled = compile_(main, **options)
        source = main.read_text(encoding="utf-8")
        if "report.with(" in source:
            noted = source.replace("#show: report.with(", f"{_NOTED}#show: report.with(", 1)
            main.write_text(noted, encoding="utf-8")
            runs = json.loads(typst.query(main, "<printed>", field="value"))
            texts.append(re.sub(r"[\s\u200b\u2060]", "", "".join(runs)))
        return compiled

    with mock.patch.object(typst, "compile", compile_and_read):
        yield texts
