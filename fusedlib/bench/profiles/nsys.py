"""The same step for Nsight Systems: the command, and the process that it runs."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fusedlib import paths
from fusedlib.bench.profiles import keep
from fusedlib.bench.profiles.work import Work
from fusedlib.bench.results import Unavailable
from fusedlib.bench.timing import synchronize

Case = Mapping[str, Any]
_OPTIONS = ("model", "context_length", "precision", "attention", "provider", "batch_size")


def target(case: Case) -> list[str]:
    """The command that runs one case without measuring it."""
    options = [(f"--{name.replace('_', '-')}", str(case[name])) for name in _OPTIONS]
    return ["-m", "fusedlib.bench.profiles", *(word for pair in options for word in pair)]


def command(case: Case) -> list[str]:
    """nsys with what it should record: one warm step, its kernels and its ranges.

    The recording starts at `cudaProfilerStart`, which the process calls once it is warm.
    """
    output = paths.traces_dir() / keep.path_of(case).name.removesuffix(".json.gz")
    return [
        "nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop", "--force-overwrite=true", f"--output={_relative(output)}",
        "python", *target(case),
    ]  # fmt: skip


def shown(case: Case) -> str:
    """The command as one types it in the repository's folder."""
    return shlex.join(command(case))


def status() -> str:
    """Whether nsys is here, in a sentence."""
    found = shutil.which("nsys")
    if not found:
        return "unavailable here: `nsys` is not installed"
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
    return f"installed here: {done.stdout.strip() or found}"


def launch(case: Case) -> int:
    """Run a case under nsys and give back its exit status.

    Raises:
        Unavailable: nsys is not installed.
    """
    if not shutil.which("nsys"):
        raise Unavailable(
            "nsys is not installed; it comes with the CUDA toolkit or from "
            "https://developer.nvidia.com/nsight-systems. On this machine use --trace instead"
        )
    words = [sys.executable if word == "python" else word for word in command(case)]
    paths.traces_dir().mkdir(parents=True, exist_ok=True)
    return subprocess.run(words, cwd=paths.ROOT).returncode


def run(case: Case) -> None:
    """Warm up, then one step in the range that nsys records, with all names."""
    work = Work(case)
    work.warm_up()
    on_cuda = work.device.type == "cuda"
    if on_cuda:
        torch.cuda.profiler.start()
    work.named_step()
    synchronize(work.device)
    if on_cuda:
        torch.cuda.profiler.stop()


def _relative(path: Any) -> str:
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)
