"""A card that is made up, a kernel that PyTorch plays, and a clock that is told what to say."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from fusedlib.kernels import autotune, swiglu_configs
from fusedlib.kernels.autotune import candidates, store, trials
from fusedlib.kernels.launch import Launch
from fusedlib.kernels.swiglu_configs import Config

CARD = ("NVIDIA L4", (8, 9))
DEFAULT = swiglu_configs.FORWARD[89]
FIRST, SECOND, *_ = candidates.FORWARD[80]
TOKENS, HIDDEN, INNER = 100, 32, 48
CUT = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps")


class Kernel:
    """Plays the forward kernel; `faults` says what goes wrong at which configuration."""

    __name__ = "_swiglu_fwd_kernel"
    arg_names = ("x", "w_gate_up", "h", "gate_up", "SAVE", *CUT)

    def __init__(self, faults=None, source="source"):
        self.faults, self.cache_key = faults or {}, source
        self.running = None

    def __getitem__(self, programs):
        return self.run

    def run(self, x, w_gate_up, h, gate_up, **constants):
        self.running = tuple(constants[k] for k in CUT)
        fault = self.faults.get(self.running)
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        gate_up.copy_(x @ w_gate_up.mT)
        gate, up = gate_up.chunk(2, dim=1)
        h.copy_(torch.nn.functional.silu(gate) * up)
        if fault in ("wrong", "nan"):
            h[-1, -1] = float("nan") if fault == "nan" else h.abs().max() * 2

    def warmup(self, *arguments, grid, **constants):
        return SimpleNamespace(n_spills=24 * (self.faults.get(self.running) == "spills"))


def cut_of(config: Config) -> tuple[int, ...]:
    return tuple(config.launch()[k] for k in CUT)


class Clock:
    """ms by configuration, 1 where nothing is said; counts what it was asked."""

    def __init__(self, monkeypatch, kernel: Kernel, ms: dict[Config, float]):
        self.kernel, self.ms = kernel, {cut_of(c): t for c, t in ms.items()}
        self.asked = 0
        monkeypatch.setattr(trials, "milliseconds", self)

    def __call__(self, call) -> float:
        call()
        self.asked += 1
        return self.ms.get(self.kernel.running, 1.0)


def play_card(monkeypatch, folder: Path) -> None:
    """A process that sees CARD and keeps its choices in a folder that is not there yet."""
    monkeypatch.setenv("FUSEDLIB_CACHE", str(folder))
    monkeypatch.delenv("FUSEDLIB_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune, "card", lambda device: CARD)
    monkeypatch.setattr(autotune, "architecture", lambda device: 89)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    another_process(monkeypatch)


def another_process(monkeypatch) -> None:
    monkeypatch.setattr(autotune, "_CHOSEN", {})
    monkeypatch.setattr(store, "_said", set())


def matrices(tokens=TOKENS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16):
    shapes = (tokens, hidden), (2 * inner, hidden), (tokens, inner), (tokens, 2 * inner)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def choose(kernel: Kernel, called_with=None, variant=None, default=DEFAULT) -> Config:
    def make(config: Config | None = None) -> Launch:
        config = config or default
        constants = {"SAVE": True} | (variant or {})
        return Launch(kernel, config, (1, 1, 1), ([1, 1], [1, 1]), (), constants)

    return autotune.tuned(make, called_with or matrices()).config


def tiles(folder: Path) -> dict:
    return json.loads((folder / store.NAME).read_text(encoding="utf-8"))["tiles"]
