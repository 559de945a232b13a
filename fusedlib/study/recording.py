"""What claims rest on: the analysis of a notebook without its measuring, and the cases to record.

`make record` measures exactly these cases as one more recording of this machine.
"""

import contextlib
import io
import json
import os
from pathlib import Path

from fusedlib.study import claims
from fusedlib.study.claims import Claim
from fusedlib.study.display import STATIC

MEASURE = "measure"


def claims_of(notebook: Path) -> list[Claim]:
    """The claims that a notebook states over the rows there are; its measuring cells are left out.

    Raises:
        Exception: whatever a cell raises.
    """
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    before = len(claims.CLAIMS)
    namespace: dict[str, object] = {"__name__": "__main__"}
    static = os.environ.get(STATIC)
    os.environ[STATIC] = "1"
    try:
        for at, cell in enumerate(cells):
            tags = cell["metadata"].get("tags", [])
            if cell["cell_type"] != "code" or MEASURE in tags:
                continue
            code = compile("".join(cell["source"]), f"{notebook.name}[{at}]", "exec")
            with contextlib.redirect_stdout(io.StringIO()):
                exec(code, namespace)
        return claims.CLAIMS[before:]
    finally:
        del claims.CLAIMS[before:]
        os.environ.pop(STATIC) if static is None else os.environ.update({STATIC: static})


def cases_of(stated: list[Claim]) -> set[str]:
    """Ids of the cases that claims rest on."""
    return {str(case) for claim in stated for case in claim.selection["case"].unique()}
