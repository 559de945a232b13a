"""Who is measured: one decorated function a rival.

A provider takes the problem's inputs, sets itself up, and returns a `Workload`: a callable without
arguments that gives y, and the leaves whose gradients a backward pass must fill. Everything else
(tests, sweeps, tables, colours) goes through `PROVIDERS` and names nobody.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusedlib import reference
from fusedlib.bench.machine import version_of
from fusedlib.bench.problems import DTYPES, Inputs
from fusedlib.bench.results import Unavailable

# Where the distribution is called otherwise than the package that is imported.
DISTRIBUTIONS = {"liger_kernel": "liger-kernel", "quack": "quack-kernels"}


@dataclass(frozen=True)
class Workload:
    """One provider, ready to run.

    `forward` gives y; `leaves` are its operands, by the reference's names. Packed gate and up rows
    go by the name `w_gate_up`: gate rows above up rows, or a gate row and an up row by turns where
    `alternating`.
    """

    forward: Callable[[], Tensor]
    leaves: Mapping[str, Tensor]
    alternating: bool = False

    def reset(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves.values():
            leaf.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """`d_` and the name of each operand that wants a gradient, packed rows gate above up.

        Raises:
            ValueError: an operand received no gradient.
        """
        found = {}
        for name, leaf in self.leaves.items():
            if not leaf.requires_grad:
                continue
            if leaf.grad is None:
                raise ValueError(f"no gradient arrived at {name}")
            found[f"d_{name}"] = leaf.grad.detach()
        if self.alternating and "d_w_gate_up" in found:
            rows = found["d_w_gate_up"]
            found["d_w_gate_up"] = torch.cat([rows[0::2], rows[1::2]])
        return found


@dataclass(frozen=True)
class Provider:
    """A registered rival: its name, its set-up, what it cannot do without, and how it is set."""

    name: str
    build: Callable[[Inputs], Workload]
    requires: tuple[str, ...]
    needs_cuda: bool
    dtypes: tuple[str, ...]
    capability: tuple[int, int]
    settings: str

    def check_available(self, device: torch.device | str, dtype: str) -> None:
        """Whether it can run at all on this device in this dtype; costs no set-up.

        Raises:
            Unavailable: a package is missing, the device is no CUDA GPU or too old, or the dtype
                is not taken.
        """
        for package in self.requires:
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"the package {package} is not installed")
        kind = torch.device(device).type
        if self.needs_cuda and kind != "cuda":
            raise Unavailable(f"needs a CUDA GPU, the inputs are on {kind}")
        if dtype not in self.dtypes:
            raise Unavailable(f"takes {', '.join(self.dtypes)}, not {dtype}")
        if self.needs_cuda and torch.cuda.get_device_capability(device) < self.capability:
            least = "{}.{}".format(*self.capability)
            raise Unavailable(f"needs compute capability {least} or later")

    def set_up(self, inputs: Inputs) -> Workload:
        """The workload on these inputs.

        Raises:
            Unavailable: as `check_available`.
        """
        self.check_available(inputs.x.device, str(inputs.x.dtype).removeprefix("torch."))
        return self.build(inputs)

    def version(self) -> str:
        """Versions of the packages behind it; torch's for those that need nothing else."""
        packages = [DISTRIBUTIONS.get(p, p) for p in self.requires or ("torch",)]
        return ", ".join(f"{p} {version_of(p)}" for p in packages)


PROVIDERS: dict[str, Provider] = {}


def provider(
    name: str, *, requires: tuple[str, ...] = (), needs_cuda: bool = False,
    dtypes: tuple[str, ...] = tuple(DTYPES), capability: tuple[int, int] = (0, 0),
) -> Callable[[Callable[[Inputs], Workload]], Callable[[Inputs], Workload]]:  # fmt: skip
    """Register a rival under `name`.

    The first line of its docstring says in its rows how it was set.

    Raises:
        ValueError: the name is taken.
    """

    def register(build: Callable[[Inputs], Workload]) -> Callable[[Inputs], Workload]:
        if name in PROVIDERS:
            raise ValueError(f"there is a provider named {name!r} already")
        told = (build.__doc__ or "").partition("\n")[0].rstrip(".")
        PROVIDERS[name] = Provider(name, build, requires, needs_cuda, dtypes, capability, told)
        return build

    return register


def get(name: str) -> Provider:
    """The provider of that name.

    Raises:
        ValueError: unknown, with the list of known ones.
    """
    if name not in PROVIDERS:
        raise ValueError(f"unknown provider {name!r}; known: {', '.join(sorted(PROVIDERS))}")
    return PROVIDERS[name]


@provider("eager")
def eager(inputs: Inputs) -> Workload:
    """Plain PyTorch, an operation at a time."""
    leaves = inputs.leaves()
    return Workload(lambda: reference.swiglu_mlp(**leaves), leaves)


@provider("inductor")
def inductor(inputs: Inputs) -> Workload:
    """torch.compile, default mode, fullgraph=True, dynamic=False."""
    return _compiled(inputs, mode="default")


@provider("inductor-max", needs_cuda=True)
def inductor_max(inputs: Inputs) -> Workload:
    """torch.compile, mode max-autotune-no-cudagraphs, fullgraph=True, dynamic=False."""
    return _compiled(inputs, mode="max-autotune-no-cudagraphs")


def _compiled(inputs: Inputs, mode: str) -> Workload:
    leaves = inputs.leaves()
    compiled = torch.compile(reference.swiglu_mlp, fullgraph=True, dynamic=False, mode=mode)
    return Workload(lambda: compiled(**leaves), leaves)


@provider("liger", requires=("liger_kernel",), needs_cuda=True)
def liger(inputs: Inputs) -> Workload:
    """Liger's fused silu(gate) · up between cuBLAS products, as its `LigerSwiGLUMLP` does it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    leaves = inputs.leaves()

    def forward() -> Tensor:
        gate = nn.functional.linear(leaves["x"], leaves["w_gate"])
        up = nn.functional.linear(leaves["x"], leaves["w_up"])
        return nn.functional.linear(LigerSiLUMulFunction.apply(gate, up), leaves["w_down"])

    return Workload(forward, leaves)


@provider(
    "quack", requires=("quack",), needs_cuda=True, dtypes=("bfloat16", "float16"),
    capability=(9, 0),
)  # fmt: skip
def quack(inputs: Inputs) -> Workload:
    """quack.mlp.mlp_func, swiglu, gate and up rows by turns, tuned from 1024 tokens on."""
    from quack.mlp import mlp_func  # type: ignore[import-not-found]

    rows = torch.stack([inputs.w_gate.detach(), inputs.w_up.detach()], dim=1).flatten(0, 1)
    w_gate_up = rows.requires_grad_(inputs.w_gate.requires_grad)
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}

    # Its search takes seconds a shape; with few tokens the launches decide, not the tiles.
    tuned = inputs.x.shape[0] >= 1024

    def forward() -> Tensor:
        return mlp_func(inputs.x, w_gate_up, inputs.w_down, activation="swiglu", tuned=tuned)

    return Workload(forward, leaves, alternating=True)


@provider("fused", requires=("triton",), needs_cuda=True)
def fused(inputs: Inputs) -> Workload:
    """Our kernels; in fp32 large products split or, in TF32, cuBLAS's; small ones plain PyTorch."""
    return _fused(inputs, "gate_up")


@provider("fused (input)", requires=("triton",), needs_cuda=True)
def fused_input(inputs: Inputs) -> Workload:
    """Our kernels, keeping x alone for backward and computing gate and up again."""
    return _fused(inputs, "input")


def _fused(inputs: Inputs, save: str) -> Workload:
    from fusedlib.functional import swiglu_mlp

    rows = torch.cat([inputs.w_gate, inputs.w_up]).detach()
    w_gate_up = rows.requires_grad_(inputs.w_gate.requires_grad)
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}
    return Workload(lambda: swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), leaves)
