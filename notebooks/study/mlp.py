"""The SwiGLU MLP as a problem: shapes and inputs, who computes it, and how that is checked.

Who computes it alone is an entry of `TASK`, who makes a module of a network one of `MODULE`; a
plain function of x and three weights is both:

    @swiglu_mlp("mine")
    def mine(x, w_gate, w_up, w_down):
        return linear(silu(linear(x, w_gate)) * linear(x, w_up), w_down)
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from fusedlib import reference
from fusedlib.bench.attempt import Unavailable
from fusedlib.ops.mlp import function as functional
from fusedlib.ops.mlp import route
from fusedlib.ops.mlp.module import SwiGLUMLP
from study import rivals
from study.cases import Case
from study.liger import CUTE, TRITON
from study.models.transformer import SwiGLU, sharing_copy
from study.operation import Operation
from study.rivals import Bound, Task, Workload, rival
from study.settings import DTYPES

PLAIN_PATH = "plain PyTorch"
"""`path` of a row whose rival ran no kernel of ours."""


@dataclass(frozen=True)
class SwiGLUProblem:
    """One SwiGLU MLP: y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ.

    Args:
        direction: "forward", "backward" (of a forward outside the clock) or "forward+backward".
        precision: torch's setting for fp32 products, "highest" (IEEE) or "high" (TF32).
    """

    tokens: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    direction: str = "forward+backward"
    precision: str = "highest"

    @classmethod
    def of(cls, case: Case) -> "SwiGLUProblem":
        """The problem that a case or a row speaks of."""
        return cls(
            int(case["tokens"]), int(case["hidden_size"]), int(case["intermediate_size"]),
            str(case["dtype"]), case.get("direction", "forward+backward"),
            case.get("precision") or "highest",
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """The fields of a case; `precision` is None where no fp32 product is asked for."""
        precision = self.precision if self.dtype == "float32" else None
        return asdict(self) | {"weight_gradients": True, "precision": precision}

    @property
    def shape(self) -> str:
        """tokens·hidden·intermediate, for people."""
        return f"{self.tokens}·{self.hidden_size}·{self.intermediate_size}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch's."""
        return getattr(torch, self.dtype)

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products: three forward and six backward, each 2 · tokens · hidden ·
        intermediate. The activation's and what a rival computes twice do not count.
        """
        product = 2 * self.tokens * self.hidden_size * self.intermediate_size
        return product * {"forward": 3, "backward": 6, "forward+backward": 9}[self.direction]

    @property
    def compulsory_bytes(self) -> int:
        """Fewest bytes through device memory: x, weights, y, dy, dx and gradients, each once."""
        weights = 3 * self.hidden_size * self.intermediate_size
        activations = self.tokens * self.hidden_size
        count = {
            "forward": weights + 2 * activations,
            "backward": 2 * weights + 3 * activations,
            "forward+backward": 2 * weights + 4 * activations,
        }[self.direction]
        return count * DTYPES[self.dtype]


@dataclass(frozen=True)
class Inputs:
    """Leaves of one problem: x (tokens, hidden), weights as in `reference`, dy like y."""

    x: torch.Tensor
    w_gate: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor
    dy: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        """The operands, by name; those that want a gradient require one."""
        return {"x": self.x, "w_gate": self.w_gate, "w_up": self.w_up, "w_down": self.w_down}


def draw(problem: SwiGLUProblem, device: torch.device | str, seed: int = 0) -> Inputs:
    """Random inputs, scaled so that gate, up and y are O(1); the same ones for the same seed."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, leaf: bool = True) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(problem.torch_dtype).requires_grad_(leaf)

    tokens, hidden, inner = problem.tokens, problem.hidden_size, problem.intermediate_size
    return Inputs(
        x=normal(tokens, hidden),
        w_gate=normal(inner, hidden, scale=hidden**-0.5),
        w_up=normal(inner, hidden, scale=hidden**-0.5),
        w_down=normal(hidden, inner, scale=inner**-0.5),
        dy=normal(tokens, hidden, leaf=False),
    )


# --- who computes it ---------------------------------------------------------------------------

TASK = Task[[Inputs], Workload | Bound]("swiglu")
MODULE = Task[[SwiGLU], nn.Module]("mlp")
# How the reference calls the modules' weights.
_OPERANDS = {"gate_proj.weight": "w_gate", "up_proj.weight": "w_up", "down_proj.weight": "w_down"}


def swiglu_mlp(
    name: str, *, path: str | None = None, **options: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:  # fmt: skip
    """Register a function of x, w_gate, w_up and w_down that gives y, as in `fusedlib.reference`,
    as a rival of every study that races a SwiGLU MLP.

    Args:
        path: which code it runs, where its package has several implementations.
    """

    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def alone(inputs: Inputs) -> Workload:
            leaves = inputs.leaves()
            return Workload(lambda: compute(**leaves), leaves, path=path)

        def module(own: SwiGLU) -> nn.Module:
            return FunctionMLP(own, compute)

        for build in (alone, module):
            build.__doc__, build.__module__ = compute.__doc__, compute.__module__
        rival(TASK, name, **options)(alone)
        rival(MODULE, name, **options)(module)
        return compute

    return register


class FunctionMLP(nn.Module):
    """An MLP's own projections, computed by a function of x and their three weights."""

    def __init__(self, own: SwiGLU, compute: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        return self.compute(x, *(p.weight for p in (self.gate_proj, self.up_proj, self.down_proj)))


def compiled(own: SwiGLU, backend: str = "inductor") -> nn.Module:
    """The model's own lines through torch.compile (dynamic=False); all layers share one graph."""
    same = sharing_copy(own)
    same.compile(backend=backend, dynamic=False)
    return same


class FusedMLP(SwiGLUMLP):
    """`fusedlib.SwiGLUMLP`."""

    def __init__(self, own: SwiGLU, save: str = "gate_up") -> None:
        inner, width = own.gate_proj.weight.shape
        super().__init__(width, inner, save=save, device="meta")
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj


rival(MODULE, "eager", settings="The model's own SwiGLU, plain PyTorch")(lambda own: own)
rival(
    MODULE, "inductor", traits=frozenset({"slow to set up"}),
    settings="The model's own lines through torch.compile, dynamic=False, one graph for all layers",
)(compiled)  # fmt: skip
rival(
    MODULE, "fused", requires=("triton",), needs_cuda=True,
    settings="fusedlib.SwiGLUMLP, which runs plain PyTorch where fp32 products are small",
)(FusedMLP)  # fmt: skip
rival(
    MODULE, "fused-input", requires=("triton",), needs_cuda=True, traits=frozenset({"on request"}),
    settings='fusedlib.SwiGLUMLP with save="input"',
)(partial(FusedMLP, save="input"))  # fmt: skip


def path(layer: nn.Module, x: Tensor) -> str | None:
    """Which code of ours a layer runs on x; None for other rivals' layers."""
    if not isinstance(layer, SwiGLUMLP):
        return None
    gate, up = layer.gate_proj.weight, layer.up_proj.weight
    return "kernels" if route.runs_kernels(x, gate, up) else PLAIN_PATH


def stack(name: str, problem: SwiGLUProblem, layers: int, device: str) -> nn.Sequential:
    """That many layers of a rival in the problem's dtype, weights drawn small."""
    sizes, build = (problem.hidden_size, problem.intermediate_size), rivals.get(MODULE, name).build
    factory: dict[str, Any] = {"device": device, "dtype": problem.torch_dtype}
    return nn.Sequential(*(build(SwiGLU(*sizes, **factory)) for _ in range(layers)))


def one_layer(name: str, problem: SwiGLUProblem, inputs: Inputs) -> Workload:
    """A layer with the inputs' weights, to be held against the reference."""
    layer = stack(name, problem, 1, str(inputs.x.device))[0]
    given = inputs.leaves()
    leaves = {_OPERANDS[name]: weight for name, weight in layer.named_parameters()}
    with torch.no_grad():
        for operand, weight in leaves.items():
            weight.copy_(given[operand])
    return Workload(lambda: layer(inputs.x), {"x": inputs.x, **leaves}, path=path(layer, inputs.x))


ON_REQUEST, SLOW = frozenset({"on request"}), frozenset({"slow to set up"})
PACKED = frozenset({"packed"})  # one weight of gate and up, made before the clock starts


def packed(inputs: Inputs) -> dict[str, Tensor]:
    """x, the rows of gate above those of up as one weight, which is made here, and w_down."""
    w_gate_up = torch.cat([inputs.w_gate, inputs.w_up]).detach().requires_grad_()
    return {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}


def fused(inputs: Inputs, save: str = "gate_up") -> Workload:
    """Our kernels, gate and up packed as one weight before the clock starts."""
    leaves = packed(inputs)
    return Workload(
        lambda: functional.swiglu_mlp(**leaves, save=save), leaves,
        path=functional.path_of(**leaves),
    )  # fmt: skip


rival(TASK, "fused", requires=("triton",), needs_cuda=True, traits=PACKED)(fused)


@rival(TASK, "fused-pair", requires=("triton",), needs_cuda=True, traits=ON_REQUEST)
def fused_pair(inputs: Inputs) -> Workload:
    """Our kernels, gate and up two weights, as models and fusedlib.SwiGLUMLP have them."""
    leaves = inputs.leaves()
    x, w_gate, w_up, w_down = leaves.values()
    return Workload(
        lambda: functional.swiglu_mlp(x, (w_gate, w_up), w_down), leaves,
        path=functional.path_of(x, (w_gate, w_up), w_down),
    )  # fmt: skip


rival(
    TASK, "fused-input", requires=("triton",), needs_cuda=True, traits=PACKED | ON_REQUEST,
    settings="Our kernels, keeping x alone for backward and computing gate and up again",
)(partial(fused, save="input"))  # fmt: skip


@rival(TASK, "eager")
def eager(inputs: Inputs) -> Workload:
    """Plain PyTorch, an operation at a time."""
    leaves = inputs.leaves()
    return Workload(lambda: reference.swiglu_mlp(**leaves), leaves)


def packed_lines(x: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The MLP with gate and up packed, an operation at a time."""
    gate, up = linear(x, w_gate_up).chunk(2, -1)
    return linear(silu(gate) * up, w_down)


@rival(TASK, "eager-packed", traits=PACKED | ON_REQUEST)
def eager_packed(inputs: Inputs) -> Workload:
    """Plain PyTorch with gate and up packed as one weight, .chunk(2, -1) of one product."""
    leaves = packed(inputs)
    return Workload(lambda: packed_lines(**leaves), leaves)


@rival(TASK, "inductor", traits=SLOW)
def inductor(inputs: Inputs) -> Workload:
    """torch.compile, default mode, fullgraph=True, dynamic=False."""
    leaves = inputs.leaves()
    compiled = torch.compile(reference.swiglu_mlp, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(**leaves), leaves)


@rival(TASK, "inductor-packed", traits=PACKED | ON_REQUEST)
def inductor_packed(inputs: Inputs) -> Workload:
    """torch.compile, default mode, of plain PyTorch with gate and up packed as one weight."""
    leaves = packed(inputs)
    compiled = torch.compile(packed_lines, fullgraph=True, dynamic=False)
    return Workload(lambda: compiled(**leaves), leaves)


@rival(TASK, "inductor-searched", needs_cuda=True, traits=ON_REQUEST)
def inductor_searched(inputs: Inputs) -> Workload:
    """torch.compile, mode max-autotune-no-cudagraphs, fullgraph=True, dynamic=False."""
    leaves = inputs.leaves()
    compiled = torch.compile(
        reference.swiglu_mlp, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"
    )
    return rivals.searched(Workload(lambda: compiled(**leaves), leaves), inputs.dy)


@swiglu_mlp("liger", path=TRITON)
def liger(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """Liger's fused silu(gate) · up between cuBLAS products, as its `LigerSwiGLUMLP` does it."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gated = LigerSiLUMulFunction.apply(linear(x, w_gate), linear(x, w_up))
    return linear(gated, w_down)


@rival(TASK, "liger-packed", traits=PACKED | ON_REQUEST)
def liger_packed(inputs: Inputs) -> Workload:
    """Liger's kernel for gate and up packed as one weight, in_place=False, as in Megatron."""
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction

    leaves = packed(inputs)

    def forward() -> Tensor:
        gate_up = linear(leaves["x"], leaves["w_gate_up"])
        return linear(LigerFusedGateUpSiLUMulFunction.apply(gate_up, False), leaves["w_down"])

    return Workload(forward, leaves, path=TRITON)


@rival(TASK, "liger-cute", requires=("cutlass",), capability=(9, 0), traits=ON_REQUEST)
def liger_cute(inputs: Inputs) -> Workload:
    """The same with LIGER_KERNEL_IMPL=cutedsl, which takes its CuTe kernel for silu(gate) · up."""
    from liger_kernel.ops.cutedsl.ops import LigerSiLUMulFunction

    leaves = inputs.leaves()

    def forward() -> Tensor:
        x, w_gate, w_up, w_down = (leaves[name] for name in ("x", "w_gate", "w_up", "w_down"))
        return linear(LigerSiLUMulFunction.apply(linear(x, w_gate), linear(x, w_up)), w_down)

    return Workload(forward, leaves, path=CUTE)


@rival(TASK, "liger-mlp", traits=ON_REQUEST)
def liger_mlp(inputs: Inputs) -> Workload:
    """LigerMLPFunction, as `LigerMLP` has it: gate, up and silu(gate) · up are one kernel."""
    try:
        from liger_kernel.ops import LigerMLPFunction
    except ImportError:
        raise Unavailable("this liger-kernel has no LigerMLPFunction: 0.8.5 has") from None
    leaves = inputs.leaves()
    # Its kernels take a batch of sequences.
    x, *weights = (leaves[name] for name in ("x", "w_gate", "w_up", "w_down"))
    return Workload(lambda: LigerMLPFunction.apply(x[None], *weights)[0], leaves, path=TRITON)


def triton_tf32x3(inputs: Inputs, searched: bool = False) -> Workload:
    """PyTorch's lines, each product one Triton kernel, tl.dot with input_precision="tf32x3"."""
    from study.product_kernel import Linear, searched_product, split_product

    leaves, product = inputs.leaves(), searched_product if searched else split_product

    def forward() -> Tensor:
        x, w_gate, w_up, w_down = (leaves[name] for name in ("x", "w_gate", "w_up", "w_down"))
        gated = silu(Linear.apply(x, w_gate, product)) * Linear.apply(x, w_up, product)
        y: Tensor = Linear.apply(gated, w_down, product)
        return y

    work = Workload(forward, leaves)
    return rivals.searched(work, inputs.dy) if searched else work


_fp32: dict[str, Any] = {"requires": ("triton",), "needs_cuda": True, "dtypes": ("float32",)}
rival(TASK, "triton-tf32x3", traits=ON_REQUEST, **_fp32)(triton_tf32x3)
rival(
    TASK, "triton-tf32x3-searched", traits=ON_REQUEST, **_fp32,
    settings="The same, of each product the fastest of eight tiles, by triton.autotune",
)(partial(triton_tf32x3, searched=True))  # fmt: skip


def quack(inputs: Inputs, **settings: bool) -> Workload:
    """quack.mlp.mlp_func, swiglu, gate and up rows by turns."""
    from quack.mlp import mlp_func  # type: ignore[import-not-found]

    rows = torch.stack([inputs.w_gate.detach(), inputs.w_up.detach()], dim=1).flatten(0, 1)
    w_gate_up = rows.requires_grad_()
    leaves = {"x": inputs.x, "w_gate_up": w_gate_up, "w_down": inputs.w_down}

    def forward() -> Tensor:
        return mlp_func(inputs.x, w_gate_up, inputs.w_down, activation="swiglu", **settings)

    return Workload(forward, leaves, alternating=True)


def quack_searched(inputs: Inputs, **settings: bool) -> Workload:
    """quack.mlp.mlp_func as it comes: swiglu, gate and up rows by turns, it searches its tiles."""
    return rivals.searched(quack(inputs, **settings), inputs.dy)


rival(TASK, "quack-searched", traits=PACKED | SLOW)(quack_searched)
rival(
    TASK, "quack", traits=PACKED | SLOW,
    settings="The same with its search off, tuned=False",
)(partial(quack, tuned=False))  # fmt: skip
rival(
    TASK, "quack-recompute", traits=PACKED | ON_REQUEST,
    settings="The same as it comes, with recompute=True: x alone is kept for backward",
)(partial(quack_searched, recompute=True))  # fmt: skip


@rival(TASK, "products", traits=PACKED | {"bound"})
@torch.no_grad()
def products(inputs: Inputs) -> Bound:
    """The problem's matrix products by torch.mm, gate and up packed: what no fusion removes.

    A forward is two products and a backward four, each into a tensor that exists already. The
    operands are the problem's own (gate|up, h and their gradients computed once, outside the
    clock): power, and with it the clock, depends on the data.
    """
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
            torch.mm(dy.mT, h, out=results["d_w_down"])
            torch.mm(d_gate_up.mT, x, out=results["d_w_gate_up"])

    return Bound(run, results)


# --- how it is checked -------------------------------------------------------------------------


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
    if case.get("launch") == "graph" and torch.device(case["device"]).type != "cuda":
        raise Unavailable("CUDA graphs need a CUDA GPU")
    rivals.get(TASK, case["provider"]).check_available(case["device"], case["dtype"])


class Setup(Operation):
    """One problem."""

    def __init__(self, case: Case) -> None:
        inputs = draw(SwiGLUProblem.of(case), case["device"])
        super().__init__(TASK, inputs, reference.swiglu_mlp)


def work(case: Case) -> dict[str, Any]:
    """FLOPs and bytes that a case's problem needs."""
    problem = SwiGLUProblem.of(case)
    return {"flops": problem.flops, "compulsory_bytes": problem.compulsory_bytes}
