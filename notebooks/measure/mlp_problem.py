"""What is measured: a shape, a dtype and a direction, with the work and traffic they imply."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusedlib.bench.arguments import require_known, require_least
from measure.racing.cases import Case
from measure.racing.settings import DIRECTIONS, DTYPES

PRECISIONS = ("highest", "high")
PLAIN_PATH = "plain PyTorch"
"""`path` of a row whose rival ran no kernel of ours."""


@dataclass(frozen=True)
class SwiGLUProblem:
    """One SwiGLU MLP: y = (silu(x Wgᵀ) ⊙ (x Wuᵀ)) Wdᵀ.

    Args:
        direction: "forward", "backward" (of a forward outside the clock) or "forward+backward".
        weight_gradients: False freezes the weights; x alone then receives a gradient.
        precision: torch's setting for fp32 products, "highest" (IEEE) or "high" (TF32).
    """

    tokens: int
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    direction: str = "forward+backward"
    weight_gradients: bool = True
    precision: str = "highest"

    def __post_init__(self) -> None:
        sizes = ("tokens", "hidden_size", "intermediate_size")
        require_least(1, **{name: getattr(self, name) for name in sizes})
        require_known("dtype", self.dtype, DTYPES)
        require_known("direction", self.direction, DIRECTIONS)
        require_known("precision", self.precision, PRECISIONS)

    @classmethod
    def of(cls, case: Case) -> "SwiGLUProblem":
        """The problem that a case or a row speaks of."""
        return cls(
            int(case["tokens"]), int(case["hidden_size"]), int(case["intermediate_size"]),
            str(case["dtype"]), case.get("direction", "forward+backward"),
            bool(case.get("weight_gradients", True)), case.get("precision") or "highest",
        )  # fmt: skip

    def fields(self) -> dict[str, Any]:
        """The fields of a case; `precision` is None where no fp32 product is asked for."""
        return asdict(self) | {"precision": self.precision if self.dtype == "float32" else None}

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
        """Floating-point operations of the matrix products, a multiply-add as two.

        Three products forward, six backward (one for the input and one for the weight of each;
        three with frozen weights), each 2 · tokens · hidden · intermediate. The activation's
        O(tokens · intermediate) and whatever a rival computes twice do not count.
        """
        product = 2 * self.tokens * self.hidden_size * self.intermediate_size
        backward = 6 if self.weight_gradients else 3
        count = {"forward": 3, "backward": backward, "forward+backward": 3 + backward}
        return product * count[self.direction]

    @property
    def compulsory_bytes(self) -> int:
        """Fewest bytes through device memory: each input read once, each result written once.

        Forward x, 3 weights, y; backward x, 3 weights, dy, dx, 3 gradients; both together x,
        3 weights, dy, y, dx, 3 gradients. Frozen weights have no gradients.
        """
        weights = 3 * self.hidden_size * self.intermediate_size
        activations = self.tokens * self.hidden_size
        passes = 2 if self.weight_gradients else 1
        count = {
            "forward": weights + 2 * activations,
            "backward": passes * weights + 3 * activations,
            "forward+backward": passes * weights + 4 * activations,
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

    def frozen(self) -> "Inputs":
        """The same values, in the same memory, where x alone wants a gradient."""
        return replace(
            self, w_gate=self.w_gate.detach(), w_up=self.w_up.detach(), w_down=self.w_down.detach()
        )


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
