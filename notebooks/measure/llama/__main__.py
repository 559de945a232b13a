"""Profiles for TensorBoard: a settled step of some arms."""

import argparse
from pathlib import Path

import torch

from fusedlib.bench import timing
from fusedlib.bench.attempt import Attempt, free_memory
from measure.llama import cases
from measure.llama.arms import BASELINE, alone, require_possible
from measure.llama.models import tokens
from measure.llama.races import few_threads
from measure.llama.trainer import LlamaTrainer
from measure.profiler import profiling
from measure.racing.cases import Case
from measure.recording import paths

SHOWN = (BASELINE, "liger", "inductor", "fused")


def profile(case: Case, folder: Path) -> None:
    """Write a trace of an arm's settled step of forward, backward and AdamW into a folder."""
    require_possible(case)
    model, call = alone(case)
    ids = tokens(case["model"], case["batch_size"], case["context_length"], case["device"])
    program = LlamaTrainer(model, call, ids, optimizer=True)
    for _ in range(3):
        program.issue()
    timing.synchronize(program.device)
    written = torch.profiler.tensorboard_trace_handler(str(folder))
    options = {"profile_memory": True, "with_stack": True, "on_trace_ready": written}
    with profiling(program.device, **options):
        program.issue()


def main() -> None:
    """One trace an arm under `report/build/tensorboard`, and how to open them."""
    large = torch.cuda.is_available()
    model, batch, context = ("Llama-3.2-1B", 4, 2048) if large else ("two layers", 2, 128)
    folder = paths.build_dir() / "tensorboard"
    for case in cases("step", SHOWN, model=model, batch_size=batch, context_length=context):
        with few_threads(case):
            tried = Attempt.at(profile, case, folder / case["provider"])
        print(f"{case['provider']}: {tried.status} {tried.reason or ''}", flush=True)
        free_memory()
    print(
        f"tensorboard --logdir {folder}\n"
        "(pip install tensorboard torch-tb-profiler; the .json files also open in ui.perfetto.dev)"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m measure.llama", description=main.__doc__).parse_args()
    main()
