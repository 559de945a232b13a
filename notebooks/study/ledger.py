"""What one SwiGLU MLP must hold, counted: every tensor from its allocation to its release.

Sizes are multiples of three units, so that a limit can be read off them: F = tokens · intermediate,
D = tokens · hidden and W = hidden · intermediate elements. The weights (3 W), x and dy are there
before the step; "over base" leaves them out. y is held to the end. Autograd frees what an operation
saved, and its incoming gradient, when that operation's backward is done, latest operation first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from study.allocator import OF_PASS
from study.mlp import SwiGLUProblem
from study.settings import DTYPES, MIB

GRADIENTS = {"d_x", "d_w_gate", "d_w_up", "d_w_gate_up", "d_w_down"}


@dataclass(frozen=True)
class Size:
    """A number of elements in units of F, D and W."""

    inner: int = 0
    hidden: int = 0
    weight: int = 0

    def __add__(self, other: "Size") -> "Size":
        """Unit by unit."""
        return Size(
            self.inner + other.inner, self.hidden + other.hidden, self.weight + other.weight
        )

    def __mul__(self, times: int) -> "Size":
        """Unit by unit."""
        return Size(self.inner * times, self.hidden * times, self.weight * times)

    def mib(self, problem: SwiGLUProblem) -> float:
        """The size in MiB at a problem's shape and dtype."""
        tokens, hidden, inner = problem.tokens, problem.hidden_size, problem.intermediate_size
        elements = tokens * (self.inner * inner + self.hidden * hidden)
        return (elements + self.weight * hidden * inner) * DTYPES[problem.dtype] / MIB

    def __str__(self) -> str:
        """Such as `3 F + D + W`."""
        units = (("F", self.inner), ("D", self.hidden), ("W", self.weight))
        return " + ".join(u if n == 1 else f"{n} {u}" for u, n in units if n) or "0"


F, D, W, NOTHING = Size(inner=1), Size(hidden=1), Size(weight=1), Size()


@dataclass(frozen=True)
class Stage:
    """One operation of the backward pass: what it allocates, and what is freed when it is done."""

    what: str
    new: Mapping[str, Size]
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ledger:
    """What one way of computing the MLP holds.

    `saved` is kept for backward beside x and the weights, `passing` lives during the forward only.
    `otherwise`: the backward in another order, taken where that holds less.
    """

    saved: Mapping[str, Size]
    backward: tuple[Stage, ...]
    passing: Mapping[str, Size] = field(default_factory=dict)
    otherwise: tuple[Stage, ...] = ()

    def at(self, problem: SwiGLUProblem) -> "Ledger":
        """The ledger with the order of the backward that is taken at this shape."""
        if not self.otherwise:
            return self
        orders = (replace(self, backward=o, otherwise=()) for o in (self.backward, self.otherwise))
        return min(orders, key=lambda book: total(book.peak(problem)[1]).mib(problem))

    def kept(self) -> Size:
        """Saved for backward, x and weights left out."""
        return sum(self.saved.values(), NOTHING)

    def moments(self) -> Iterator[tuple[str, dict[str, Size]]]:
        """What is held at once over base, by category, at the forward's end and each stage."""
        live = {"y": D, **self.saved}
        yield "forward", self._by_category({**live, **self.passing})
        for stage in self.backward:
            live.update(stage.new)
            yield stage.what, self._by_category(live)
            if absent := set(stage.ends) - set(live):
                raise ValueError(f"{stage.what} frees {absent}, which nobody holds")
            live = {n: size for n, size in live.items() if n not in stage.ends}
        if left := set(live) - GRADIENTS - {"y"}:
            raise ValueError(f"never freed: {left}")
        yield "end", self._by_category(live)

    def _by_category(self, live: Mapping[str, Size]) -> dict[str, Size]:
        sizes = dict.fromkeys(OF_PASS, NOTHING)
        for name, size in live.items():
            sizes[self._category(name)] += size
        return sizes

    def _category(self, name: str) -> str:
        if name == "y":
            return "output"
        if name in self.saved:
            return "saved"
        return "gradients" if name in GRADIENTS else "temporaries"

    def peak(self, problem: SwiGLUProblem) -> tuple[str, dict[str, Size]]:
        """The moment at which most is held at this shape."""
        moments = self.at(problem).moments()
        return max(moments, key=lambda moment: total(moment[1]).mib(problem))


def total(held: Mapping[str, Size]) -> Size:
    """All categories together."""
    return sum(held.values(), NOTHING)


def _down(*saved: str) -> Stage:
    return Stage("backward of down", {"dh": F, "d_w_down": W}, saved)


def _up_and_gate(free_up: tuple[str, ...], free_gate: tuple[str, ...]) -> tuple[Stage, Stage]:
    return (
        Stage("backward of up", {"d_x": D, "d_w_up": W}, free_up),
        Stage("backward of gate", {"d_x of gate": D, "d_w_gate": W}, (*free_gate, "d_x of gate")),
    )


_UP, _GATE = _up_and_gate(("d_up",), ("d_gate",))
EAGER = Ledger(
    {"gate": F, "silu(gate)": F, "up": F, "h": F},
    (
        _down("h"),
        Stage("backward of ⊙", {"d_silu": F, "d_up": F}, ("dh", "silu(gate)", "up")),
        _UP,
        Stage("backward of silu", {"d_gate": F}, ("gate", "d_silu")),
        _GATE,
    ),
)
# d_gate and d_up are written over gate and up.
LIGER = Ledger(
    {"gate": F, "up": F, "h": F},
    (
        _down("h"),
        Stage("backward of silu ⊙", {}, ("dh",)),
        *_up_and_gate(("up",), ("gate",)),
    ),
)


def _gate_up(frees: str) -> Stage:
    return Stage("backward of gate|up", {"d_x": D, "d_w_gate_up": W * 2}, (frees,))


QUACK = Ledger(
    {"gate|up": F * 2},
    (
        Stage("backward of down", {"d_gate|d_up": F * 2, "h again": F, "d_w_down": W},
              ("gate|up", "h again")),
        _gate_up("d_gate|d_up"),
    ),
    passing={"h": F},
)  # fmt: skip


def _ours(
    saved: Mapping[str, Size], first: tuple[Stage, ...], down: Stage, gate_up: tuple[Stage, ...]
) -> Ledger:
    """One operation to autograd: h is there again at first, the products follow in either order."""
    orders = (*first, down, *gate_up), (*first, *gate_up, down)
    return Ledger(saved, orders[0], passing={"h": F}, otherwise=orders[1])


# d(gate|up) is written over gate|up.
_SAVED = {"gate|up": F * 2}
_DOWN = Stage("backward of down", {"d_w_down": W}, ("h again",))
_H_AGAIN = Stage("h again", {"h again": F})
_BOTH_AGAIN = Stage("gate|up again", {"gate|up again": F * 2, "h again": F})
FUSED = _ours(_SAVED, (_H_AGAIN,), _DOWN, (_gate_up("gate|up"),))
FUSED_INPUT = _ours({}, (_BOTH_AGAIN,), _DOWN, (_gate_up("gate|up again"),))
# What torch's autograd keeps for the same lines with packed weights: fused where no kernel runs.
_PACKED = (
    _down("h"),
    Stage("backward of ⊙", {"d_silu": F, "d_up": F}, ("dh", "silu(gate)")),
    Stage("backward of silu", {"d_gate": F}, ("gate|up", "d_silu")),
    Stage("both halves joined", {"d_gate|d_up": F * 2}, ("d_gate", "d_up")),
    _gate_up("d_gate|d_up"),
)
_PACKED_SAVED = {"gate|up": F * 2, "silu(gate)": F, "h": F}
PLAIN = Ledger(_PACKED_SAVED, _PACKED)
PLAIN_INPUT = Ledger({}, (Stage("forward again", _PACKED_SAVED), *_PACKED), passing=_PACKED_SAVED)


# fp32 in two fp16 parts a factor, as large as the factor, which live as long as their product.
def _split(what: str, gives: dict[str, Size], *factors: Size, frees: tuple[str, ...] = ()) -> Stage:
    parts = {
        f"parts of {name}": size for name, size in zip(what.split(" by "), factors, strict=True)
    }
    return Stage(what, parts | gives, (*parts, *frees))


def _split_ours(saved: Mapping[str, Size], gate_up: str, *first: Stage) -> Ledger:
    dh = _split("dy by w_down", {"dh": F}, D, W)
    epilogue = Stage("epilogue of dh", {"h again": F}, ("dh",))
    down = _split("dy by h", {"d_w_down": W}, D, F, frees=("h again",))
    others = (
        _split("d(gate|up) by w_gate_up", {"d_x": D}, F * 2, W * 2),
        _split("d(gate|up) by x", {"d_w_gate_up": W * 2}, F * 2, D, frees=(gate_up,)),
    )
    return _ours(saved, (*first, dh, epilogue), down, others)


_AGAIN = Stage("gate|up again", {"gate|up again": F * 2, "first h": F}, ("first h",))
SPLIT = _split_ours(_SAVED, "gate|up")
SPLIT_INPUT = _split_ours({}, "gate|up again", _AGAIN)

# Inductor keeps the products' results and what the next product reads, and writes in place.
LEDGERS = {
    "eager": EAGER, "inductor": LIGER, "liger": LIGER, "quack": QUACK,
    "fused": FUSED, "fused-input": FUSED_INPUT,
}  # fmt: skip
_SPLIT = {"fused": SPLIT, "fused-input": SPLIT_INPUT}
_PLAIN = {"fused": PLAIN, "fused-input": PLAIN_INPUT}


def of(rival_name: str, path: str | None = None, dtype: str = "bfloat16") -> Ledger | None:
    """The ledger of a rival by the path that ran, kernels or "plain PyTorch", in fp32 with split
    factors; None where nobody has counted it.
    """
    if isinstance(path, str) and path.startswith("plain"):
        return _PLAIN.get(rival_name, LEDGERS.get(rival_name))
    if dtype == "float32":
        return _SPLIT.get(rival_name, LEDGERS.get(rival_name))
    return LEDGERS.get(rival_name)
