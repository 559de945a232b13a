"""What autograd keeps, storage by storage and part of the model by part, on any device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusedlib.bench.model_memory.births import Births
from fusedlib.bench.model_memory.program import Program

# The parts that `fusedlib.models.activations` names, by the modules' names.
PARTS = {
    "attention_norm": "attention norm", "attention": "attention", "mlp_norm": "mlp norm",
    "mlp": "mlp", "norm": "last norm", "output": "output",
}  # fmt: skip
LOSS = "loss"


def saved_bytes(program: Program) -> dict[str, int]:
    """Bytes that one forward pass keeps by part, `casts` apart; weights and data left out."""
    given = [*program.weights(), *program.others()]
    seen = {t.untyped_storage().data_ptr() for t in given}
    found: Counter[str] = Counter()
    births, held = Births(program.weights()), []
    with _part(program.model) as current:

        def pack(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                held.append(tensor.detach())  # so that no address comes twice
                cast = storage.data_ptr() in births.casts
                found["casts" if cast else current[-1]] += storage.nbytes()

        # There will be no backward. Given back to autograd, a saved output would keep itself.
        with torch.autograd.graph.saved_tensors_hooks(pack, _never), births:
            program.forward()
    return dict(found)


def _never(packed: None) -> Tensor:
    raise AssertionError("no backward runs through a graph that kept nothing")


@contextmanager
def _part(model: nn.Module) -> Iterator[list[str]]:
    """The part that runs now, on top of a stack; outside all of them it is the loss."""
    stack, hooks = [LOSS], []

    def enter(part: str) -> Any:
        return lambda module, inputs: stack.append(part)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        if part := PARTS.get(name.rpartition(".")[2]):
            hooks.append(module.register_forward_pre_hook(enter(part)))
            hooks.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()
