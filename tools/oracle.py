"""The library beside itself as it was at a commit: bits, launches, host time, signatures.

    python tools/oracle.py export FOLDER [COMMIT]       write the old package, as `fusedlib_before`
    python tools/oracle.py bits FOLDER [-k NAME]        results, gradients and launches are the same
    python tools/oracle.py times FOLDER                 the host's microseconds, old and new in turn
    python tools/oracle.py signatures FOLDER            of everything public

With TRITON_INTERPRET=1 `bits` runs the kernels on a CPU, and `times` starts none. It needs the
checkout's `tests` and `tests/laws` on PYTHONPATH. It goes when issue 65 closes.
"""

import argparse
import importlib
import inspect
import itertools
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

BEFORE, COMMIT = "fusedlib_before", "9aff2c3b"
ROOT = Path(__file__).parents[1]


def export(folder: Path, commit: str) -> None:
    """Write the package of a commit under its other name."""
    packed = subprocess.run(
        ["git", "archive", commit, "fusedlib"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as files:
        for member in files.getmembers():
            if member.name.endswith(".py"):
                text = files.extractfile(member).read().decode()  # type: ignore[union-attr]
                path = folder / member.name.replace("fusedlib", BEFORE, 1)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.replace("fusedlib", BEFORE))


def launch_class(library: ModuleType) -> Any:
    """Where it is defined, before and after."""
    try:
        return importlib.import_module(f"{library.__name__}.launch.launch").Launch
    except ModuleNotFoundError:
        return importlib.import_module(f"{library.__name__}.launch").Launch


@contextmanager
def launches(library: ModuleType, *, start: bool = True) -> Iterator[list[Any]]:
    """Kernel, grid, numbers and constants of all that is launched; or nothing starts."""
    cls, noted = launch_class(library), []
    call = cls.__call__

    def noting(self: Any, *matrices: Any) -> Any:
        constants = sorted(self.constants.items())
        noted.append((self.kernel.__name__, self.programs, self.scalars, constants))
        return call(self, *matrices)

    cls.__call__ = noting if start else lambda self, *matrices: None
    try:
        yield noted
    finally:
        cls.__call__ = call


def bits(before: ModuleType, after: ModuleType, chosen: str) -> int:
    """How many cases differ; prints each."""
    import operations
    import test_laws
    import torch

    def alike(a: Any, b: Any) -> bool:  # NaN where the other has NaN
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tables = [operations.operations(lib) | operations.more_calls(lib) for lib in (before, after)]
    differ = tried = 0
    for name, operation in tables[1].items():
        if chosen not in name:
            continue
        more = operation.more_gpu_sizes if device == "cuda" else operation.more_sizes
        many = 6 if device == "cuda" else 2
        for dtype, sizes in itertools.product(operation.dtypes, ({}, *more[:many])):
            if max({**operation.gpu_sizes, **sizes}.values()) > 100_000:
                continue
            case = test_laws.Case(operation, device, dtype, **sizes)
            old = case.with_operands()
            old.operation = replace(operation, call=tables[0][name].call)
            found = []
            for library, each in ((before, old), (after, case)):
                with test_laws.tuned(operation, library), launches(library) as started:
                    steps = [each.named_step() for _ in range(2)]  # again by what was prepared
                found.append((steps, started))
            pairs = zip(found[0][0], found[1][0], strict=True)
            wrong = [n for old, new in pairs for n in new if not alike(old[n], new[n])]
            wrong += ["launches"] * (found[0][1] != found[1][1])
            tried, differ = tried + 1, differ + bool(wrong)
            print(end="." if tried % 80 else f". {name}\n", flush=True)
            if wrong:
                print(f"{name}, {dtype}, {sizes or 'its sizes'}: {', '.join(wrong)}", flush=True)
                if "launches" in wrong:
                    print("  before", *found[0][1], sep="\n    ")
                    print("  after", *found[1][1], sep="\n    ")
    print(f"{tried} cases, {differ} differ", flush=True)
    return differ


def calls(library: ModuleType, device: str) -> dict[str, Callable[[], Any]]:
    """Twelve calls whose time the host sets."""
    import torch

    half, n, h, i, v = torch.bfloat16, 128, 1024, 2816, 4096

    def new(*shape: int, dtype: Any = half, learned: bool = True) -> Any:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_(learned)

    x, weight, residual = new(1, n, h), new(h), new(1, n, h)
    gate_up, down, fp32 = new(2 * i, h), new(h, i), new(n, h, dtype=torch.float32)
    q, k = new(1, 16, n, 64), new(1, 4, n, 64)
    cos, sin = new(1, n, 64, learned=False), new(1, n, 64, learned=False)
    hidden, head = new(n, h), new(v, h)
    target = torch.randint(0, v, (n,), device=device)
    square = new(h, h, dtype=torch.float32)
    forward: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: library.rms_norm(x, weight),
        "rms_norm of a sum": lambda: library.rms_norm(x, weight, residual=residual),
        "rope": lambda: library.rope(q, k, cos, sin),
        "swiglu_mlp": lambda: library.swiglu_mlp(x, gate_up, down),
        "linear": lambda: library.linear(fp32, square),
        "linear_cross_entropy": lambda: library.linear_cross_entropy(hidden, head, target),
        "linear_log_probs": lambda: library.linear_log_probs(hidden, head, target),
    }

    def both(call: Callable[[], Any]) -> Callable[[], Any]:
        leaves = x, weight, residual, gate_up, down, fp32, q, k, hidden, head, square

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            results = call()
            results = results if isinstance(results, tuple) else (results,)
            torch.autograd.backward(results, [torch.ones_like(y) for y in results])

        return step

    def without_graph(call: Callable[[], Any]) -> Callable[[], Any]:
        def step() -> None:
            with torch.no_grad():
                call()

        return step

    named = {f"{name}, no graph": without_graph(call) for name, call in forward.items()}
    named |= {f"{name}, both": both(call) for name, call in forward.items()}
    if device == "cuda":
        for name in ("rms_norm of a sum", "rope", "swiglu_mlp", "linear_cross_entropy"):
            named[f"{name}, compiled"] = both(torch.compile(forward[name]))
    return named


def times(before: ModuleType, after: ModuleType) -> None:
    """Least microseconds a call of 60 rounds, old and new in turn."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    libraries = before, after
    nothing_starts = nullcontext if device == "cuda" else partial(launches, start=False)
    with nothing_starts(before), nothing_starts(after):
        pairs = zip(*(calls(library, device).items() for library in libraries), strict=True)
        print(f"{'':40s} {'before':>9s} {'after':>9s}   us, least of 60")
        for (name, one), (_, other) in pairs:
            for call in (one, other):
                for _ in range(5):
                    call()
            least = [float("inf")] * 2
            for turn in range(60):
                order = ((0, one), (1, other)) if turn % 2 else ((1, other), (0, one))
                for index, call in order:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(10):
                        call()
                    least[index] = min(least[index], (time.perf_counter() - start) / 10)
            old, new = (1e6 * t for t in least)
            mark = "  SLOWER" if new > old + max(0.1 * old, 5) else ""
            print(f"{name:40s} {old:9.1f} {new:9.1f}{mark}", flush=True)


def signatures(library: ModuleType) -> dict[str, str]:
    """Of everything public, methods too."""
    found = {}
    for module in (library, importlib.import_module(f"{library.__name__}.bench")):
        for name in module.__all__:
            value = getattr(module, name)
            members = [(name, value)]
            if inspect.isclass(value):
                members += [(f"{name}.{n}", m) for n, m in vars(value).items() if n[0] != "_"]
            for label, member in members:
                with suppress(TypeError, ValueError):
                    text = str(inspect.signature(member))
                    found[label] = text.replace(library.__name__, "fusedlib")
    return found


def main() -> int:
    """The number of differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("export", "bits", "times", "signatures"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("commit", nargs="?", default=COMMIT)
    parser.add_argument("-k", default="", dest="chosen")
    given = parser.parse_args()
    if given.what == "export":
        export(given.folder, given.commit)
        return 0
    sys.path[:0] = [str(given.folder), *map(str, (ROOT / "tests/laws", ROOT / "tests"))]
    warnings.simplefilter("ignore")
    before, after = importlib.import_module(BEFORE), importlib.import_module("fusedlib")
    if given.what == "bits":
        return min(bits(before, after, given.chosen), 100)
    if given.what == "times":
        times(before, after)
        return 0
    old, new = signatures(before), signatures(after)
    changed = [n for n in old.keys() | new.keys() if old.get(n) != new.get(n)]
    for name in sorted(changed):
        print(f"{name}\n  before {old.get(name)}\n  after  {new.get(name)}")
    print(f"{len(new)} signatures, {len(changed)} changed")
    return len(changed)


if __name__ == "__main__":
    sys.exit(main())
