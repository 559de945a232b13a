"""Source files behind what is measured, for fingerprints: found by their imports, not run."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


def behind(*names: str) -> Iterator[ModuleType]:
    """Modules of ours that these import, themselves first, at whatever depth; none is run."""
    seen: dict[str, ModuleType] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop(0)
        spec = importlib.util.find_spec(name)
        if spec is None or name in seen or spec.origin is None or name == "fusedlib":
            continue
        seen[name] = importlib.util.module_from_spec(spec)
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            waiting += sorted(_imported(node))
    yield from (seen[name] for name in sorted(seen))


def _imported(node: ast.AST) -> Iterator[str]:
    """Modules of ours that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.startswith("fusedlib."))
    elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "fusedlib":
        for name in (f"{node.module}.{alias.name}" for alias in node.names):
            try:
                is_module = importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:
                is_module = False
            yield name if is_module else str(node.module)
