"""The SwiGLU MLP's rivals and races: who computes it, on which problems, and how it is checked."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fusedlib import reference
from fusedlib.bench import timing, turns
from fusedlib.bench.arguments import require_known
from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import Checked
from fusedlib.ops.mlp import function as functional
from measure.mlp_problem import Inputs, SwiGLUProblem, draw
from measure.mlp_rivals import TASK, swiglu_mlp
from measure.racing import rivals, roofline
from measure.racing.cases import Case, grid
from measure.racing.operation import Operation
from measure.racing.race import Race
from measure.racing.rivals import Bound, Workload, rival
from measure.racing.settings import DIRECTIONS

BASELINE = "eager"
ON_REQUEST, SLOW = frozenset({"on request"}), frozenset({"slow to set up"})


def fused(inputs: Inputs, save: str = "gate_up") -> Workload:
    """Our kernels; in fp32 large products split or, in TF32, cuBLAS's; small ones plain PyTorch."""
    rows = torch.cat([inputs.w_gate, inputs.w_up]).detach()
    w_gate_up = rows.requires_grad_(inputs.w_gate.requires_grad)
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}
    return Workload(
        lambda: functional.swiglu_mlp(inputs.x, w_gate_up, inputs.w_down, save=save), leaves,
        path=functional.path_of(inputs.x, w_gate_up, inputs.w_down),
    )  # fmt: skip


rival(TASK, "fused", requires=("triton",), needs_cuda=True)(fused)
rival(
    TASK, "fused-input", requires=("triton",), needs_cuda=True, traits=ON_REQUEST,
    settings="Our kernels, keeping x alone for backward and computing gate and up again",
)(partial(fused, save="input"))  # fmt: skip


def searched(work: Workload, inputs: Inputs) -> Workload:
    """A workload that has run forward and backward once and searched for its fastest kernels there.
    `search_s` of its rows is how long that pass took, with all that it compiled.
    """
    start = perf_counter()
    work.forward().backward(inputs.dy)
    timing.synchronize(inputs.dy.device)
    taken = perf_counter() - start
    work.reset()
    return replace(work, figures={"search_s": taken})


@rival(TASK, "eager")
def eager(inputs: Inputs) -> Workload:
    """Plain PyTorch, an operation at a time."""
    leaves = inputs.leaves()
    return Workload(lambda: reference.swiglu_mlp(**leaves), leaves)


def inductor(inputs: Inputs, *, dynamic: bool = False, mode: str = "default") -> Workload:
    """torch.compile, default mode, fullgraph=True, dynamic=False."""
    leaves = inputs.leaves()
    compiled = torch.compile(reference.swiglu_mlp, fullgraph=True, dynamic=dynamic, mode=mode)
    work = Workload(lambda: compiled(**leaves), leaves)
    return work if mode == "default" else searched(work, inputs)


rival(TASK, "inductor", traits=SLOW)(inductor)
rival(
    TASK, "inductor-searched", label="torch.compile, searched", slot=9, needs_cuda=True,
    settings="torch.compile, mode max-autotune-no-cudagraphs, fullgraph=True, dynamic=False",
    traits=ON_REQUEST,
)(partial(inductor, mode="max-autotune-no-cudagraphs"))  # fmt: skip
rival(
    TASK, "inductor-dynamic", label="torch.compile, any length", slot=16, traits=ON_REQUEST,
    settings="torch.compile, default mode, fullgraph=True, dynamic=True",
)(partial(inductor, dynamic=True))  # fmt: skip


@swiglu_mlp("liger", path="nvidia-triton")
def liger(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Liger's fused silu(gate) · up between cuBLAS products, as its `LigerSwiGLUMLP` does it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gated = LigerSiLUMulFunction.apply(linear(x, w_gate), linear(x, w_up))
    return linear(gated, w_down)


@rival(TASK, "liger-mlp", label="Liger, whole MLP", slot=24, traits=ON_REQUEST)
def liger_mlp(inputs: Inputs) -> Workload:
    """LigerMLPFunction, as `LigerMLP` has it: gate, up and silu(gate) · up are one kernel."""
    try:
        from liger_kernel.ops import LigerMLPFunction
    except ImportError:
        raise Unavailable("this liger-kernel has no LigerMLPFunction: 0.8.5 has") from None
    leaves = inputs.leaves()
    # Its kernels take a batch of sequences.
    x, *weights = (leaves[name] for name in ("x", "w_gate", "w_up", "w_down"))
    work = Workload(
        lambda: LigerMLPFunction.apply(x[None], *weights)[0], leaves, path="nvidia-triton"
    )
    return searched(work, inputs)


@rival(
    TASK, "triton-tf32x3", label="Triton, TF32x3", slot=10, requires=("triton",), needs_cuda=True,
    dtypes=("float32",), traits=ON_REQUEST,
)  # fmt: skip
def triton_tf32x3(inputs: Inputs) -> Workload:
    """PyTorch's lines, each product one Triton kernel, tl.dot with input_precision="tf32x3"."""
    from measure.tf32x3_kernel import Linear

    leaves = inputs.leaves()

    def forward() -> Tensor:
        x, w_gate, w_up, w_down = (leaves[name] for name in ("x", "w_gate", "w_up", "w_down"))
        gated = silu(Linear.apply(x, w_gate)) * Linear.apply(x, w_up)
        y: Tensor = Linear.apply(gated, w_down)
        return y

    return Workload(forward, leaves)


def quack(inputs: Inputs, *, tuned: bool = False) -> Workload:
    """quack.mlp.mlp_func, swiglu, gate and up rows by turns, its tiles as they come."""
    from quack.mlp import mlp_func  # type: ignore[import-not-found]

    rows = torch.stack([inputs.w_gate.detach(), inputs.w_up.detach()], dim=1).flatten(0, 1)
    w_gate_up = rows.requires_grad_(inputs.w_gate.requires_grad)
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}

    def forward() -> Tensor:
        return mlp_func(inputs.x, w_gate_up, inputs.w_down, activation="swiglu", tuned=tuned)

    work = Workload(forward, leaves, alternating=True)
    return searched(work, inputs) if tuned else work


rival(TASK, "quack", label="QuACK", slot=4, traits=SLOW)(quack)
rival(
    TASK, "quack-searched", label="QuACK, searched", slot=5, traits=ON_REQUEST,
    settings="The same with its search for the fastest tiles, two and a half minutes a shape",
)(partial(quack, tuned=True))  # fmt: skip


@rival(TASK, "products", traits=frozenset({"bound"}))
@torch.no_grad()
def products(inputs: Inputs) -> Bound:
    """The problem's matrix products by torch.mm, gate and up packed: what no fusion removes.

    A forward is two products and a backward four (two with frozen weights), each into a tensor that
    exists already. The operands are the problem's own (gate|up, h and their gradients computed
    once, outside the clock): power, and with it the clock, depends on the data.
    """
    weight_gradients = inputs.w_gate.requires_grad
    x, w_down, dy = inputs.x.detach(), inputs.w_down.detach(), inputs.dy
    w_gate_up = torch.cat([inputs.w_gate.detach(), inputs.w_up.detach()])
    gate_up = x @ w_gate_up.mT
    gate, up = gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    h, d_h = silu(gate) * up, dy @ w_down
    d_gate = d_h * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_gate_up = torch.cat([d_gate, d_h * silu(gate)], dim=-1)
    results = {
        "y": torch.empty_like(x), "d_x": torch.empty_like(x),
        "d_w_gate_up": torch.empty_like(w_gate_up), "d_w_down": torch.empty_like(w_down),
    }  # fmt: skip

    def run(direction: str) -> None:
        if direction != "backward":
            torch.mm(x, w_gate_up.mT, out=gate_up)
            torch.mm(h, w_down.mT, out=results["y"])
        if direction != "forward":
            torch.mm(dy, w_down, out=d_h)
            torch.mm(d_gate_up, w_gate_up, out=results["d_x"])
            if weight_gradients:
                torch.mm(dy.mT, h, out=results["d_w_down"])
                torch.mm(d_gate_up.mT, x, out=results["d_w_gate_up"])

    return Bound(run, results)


# --- what is measured ----------------------------------------------------------------------------


def cases(
    shapes: Iterable[str | tuple[int, int, int]], rival_names: Sequence[str], *, dtype: str,
    device: str, repetitions: int, precision: str = "highest",
    launches: Sequence[str] = ("python",), directions: Sequence[str] = DIRECTIONS,
    frozen: bool = False, group: str = "",
) -> list[dict[str, Any]]:  # fmt: skip
    """One case a shape, direction, launch and rival; a backward alone is launched from Python only.

    Args:
        shapes: "tokens·hidden·intermediate", with · or x, or the three numbers.
        rival_names: `all` for every one that is registered.
        frozen: also the backward pass that gives x alone a gradient.
        group: what the shapes are, for the notebook's selections.

    Raises:
        ValueError: a text that is not three whole numbers, an unknown rival, launch or direction.
    """
    require_known("launch", launches, turns.LAUNCHES)
    ways = [(direction, True) for direction in directions] + [("backward", False)] * frozen
    every = grid(
        {"experiment": TASK, "group": group, "device": device, "repetitions": repetitions},
        problem=[
            SwiGLUProblem(*sizes(shape), dtype, direction, trained, precision).fields()
            for shape in shapes for direction, trained in ways
        ],
        launch=launches, provider=rivals.chosen(TASK, rival_names),
    )  # fmt: skip
    return [c for c in every if c["launch"] == "python" or c["direction"] != "backward"]


def sizes(shape: str | tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens, hidden and intermediate size of a shape as text."""
    if not isinstance(shape, str):
        return shape
    parts = shape.replace("x", "·").split("·")
    if len(parts) != 3 or not all(p.isdecimal() for p in parts):
        raise ValueError(f"a shape is tokens·hidden·intermediate, got {shape!r}")
    tokens, hidden, inner = map(int, parts)
    return tokens, hidden, inner


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    if case["launch"] != "python" and torch.device(case["device"]).type != "cuda":
        raise Unavailable("CUDA graphs need a CUDA GPU")
    rivals.get(TASK, case["provider"]).check_available(case["device"], case["dtype"])


class Setup(Operation):
    """One problem, whose weights may be frozen."""

    def __init__(self, case: Case) -> None:
        inputs = draw(SwiGLUProblem.of(case), case["device"])
        super().__init__(TASK, inputs, reference.swiglu_mlp)

    def check(self, case: Case) -> Checked:
        """Set a rival up and hold y and every gradient that the problem asks for to the truth."""
        inputs = self.inputs if case["weight_gradients"] else self.inputs.frozen()
        return self.checked(rivals.get(TASK, case["provider"]), inputs)


def _work(case: Case) -> dict[str, Any]:
    problem = SwiGLUProblem.of(case)
    return {"flops": problem.flops, "compulsory_bytes": problem.compulsory_bytes}


RACE = Race(
    setup=Setup, available=available, work=_work, rival_fields=("weight_gradients",),
    fields=("tokens", "hidden_size", "intermediate_size", "dtype", "precision", "device"),
    settings=lambda case: roofline.precision_of(case["precision"]),
)  # fmt: skip
