"""What surrounds a call: autocast, a compiler, whoever watches operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusedlib.launch.internals import dispatch_mode_count, function_mode_count, tracing_state
from fusedlib.ops.arguments import autocast_enabled as autocast_enabled

MOST_COMPILED_TOKENS = 1024  # whose formulas Inductor compiles: see `left_to_compiler`
PLAIN_TYPES = frozenset((Tensor, Parameter))


def is_plain_eager(*operands: Tensor) -> bool:
    """True if nothing between this call and its tensors would see an operator: no compiler, no
    tracer, no mode, no subclass.
    """
    return (
        not torch.compiler.is_dynamo_compiling()
        and not dispatch_mode_count()
        and not function_mode_count()
        and tracing_state() is None
        and PLAIN_TYPES.issuperset(map(type, operands))
    )


def is_distributed(*operands: Tensor | None) -> bool:
    """True if one is a DTensor, which has rules for torch's operators and none for ours."""
    return any(type(operand).__name__ == "DTensor" for operand in operands)


def cast_for_autocast(*operands: Tensor | None) -> Any:
    """The operands in autocast's dtype where it is on, as `torch.nn.functional.linear` has them.

    They stay as they are where one of them is in float64.
    """
    tensors = present(*operands)
    device_type = tensors[0].device.type
    if not autocast_enabled(device_type) or any(t.dtype == torch.float64 for t in tensors):
        return operands
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(t if t is None else t.to(dtype) for t in operands)


def present(*operands: Tensor | None) -> list[Tensor]:
    """The operands that are not None."""
    return [t for t in operands if t is not None]


def left_to_compiler(tokens: int, fewest: int = 0) -> bool:
    """True if a compiler shall have the formula of a norm, a rotation or an MLP of so many tokens.

    Inductor launches what it compiles with less work of the host than an operator takes, which is
    called by way of Python: at 512 tokens a step of 8 layers of Qwen3-0.6B took 15.4 ms for 21.1
    (one H100). At 8,192 it took 34.3 for 32.9, for there the kernels are faster; nothing between
    was measured. A number of tokens that the compiler keeps open gets the operator, and no guard.
    """
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    few = statically_known_true(tokens <= MOST_COMPILED_TOKENS)
    return few and statically_known_true(tokens >= fewest)
