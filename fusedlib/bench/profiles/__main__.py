"""One step of one case, for a profiler of your own: `python -m fusedlib.bench.profiles --help`."""

import argparse
import sys
from typing import Any

from fusedlib.bench import machine
from fusedlib.bench.profiles import cases, keep, nsys
from fusedlib.bench.profiles.work import Work, record
from fusedlib.bench.results import Unavailable
from fusedlib.models import transformer


def _options(words: list[str] | None) -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m fusedlib.bench.profiles",
        description="Run one warm training step whose modules, attention and sections are named "
        "ranges, by record_function and NVTX.",
    )
    options.add_argument("--model", default="small", choices=transformer.SIZES)
    options.add_argument("--context-length", type=int, default=256)
    options.add_argument("--precision", default="fp32", choices=cases.PRECISIONS)
    options.add_argument("--attention", default="plain", choices=("plain", "sdpa"))
    options.add_argument("--provider", default="eager", choices=cases.PROVIDERS)
    options.add_argument("--batch-size", type=int, default=transformer.BATCH_SIZE)
    options.add_argument("--device", default=machine.device_type(), choices=("cuda", "cpu"))
    how = options.add_mutually_exclusive_group()
    how.add_argument("--nsys", action="store_true", help="run it under nsys")
    how.add_argument("--show-nsys", action="store_true", help="print that command only")
    how.add_argument("--trace", action="store_true", help="keep a trace for Perfetto")
    return options.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Run one case as the command line says; 0, or 1 with a message on stderr."""
    given = _options(words)
    try:
        [case] = cases.cases(
            [given.model], [given.context_length], [given.precision], attention=given.attention,
            batch_size=given.batch_size, provider=given.provider, device=given.device,
            repetitions=1,
        )  # fmt: skip
        return _done(given, case)
    except (ValueError, Unavailable) as error:
        print(error, file=sys.stderr)
        return 1


def _done(given: argparse.Namespace, case: dict[str, Any]) -> int:
    if given.show_nsys:
        print(nsys.shown(case))
    elif given.nsys:
        return nsys.launch(case)
    elif given.trace:
        return _trace(case)
    else:
        nsys.run(case)
    return 0


def _trace(case: dict[str, Any]) -> int:
    work = Work(case)
    work.warm_up()
    document = record(work.device, work.named_step)
    kept = keep.kept(case, document, most_bytes=None)
    print(keep.path_of(case), f"{kept['trace_kept_mib']:.2f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
