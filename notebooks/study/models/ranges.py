"""Names for what runs inside a Transformer, for `torch.profiler` and for `nsys` alike.

Inside `named_ranges(model)` every module opens a range while it runs, and so do the steps of its
attention: `embedding`, `block 3`, `block 3/attention`, `block 3/attention/softmax`, `norm`,
`output`. A range is a `record_function`, and with CUDA an NVTX range of the same name.

In the forward pass ranges nest as calls do. The backward pass knows no modules: there each
autograd node, for as long as it runs, opens the range in whose forward it was made. So a module's
backward is many ranges of one name instead of one long one: the engine records a node's own time
around its hooks, and a range that outlived the node would overlap it, which no viewer can nest.

Nothing is added to the graph and no operation is changed.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Steps of the attention by the function that is called; "matmul" by what came before.
STEPS = {
    "mul": "scale", "ones": "mask", "triu": "mask", "masked_fill": "mask", "softmax": "softmax",
    "to": "softmax", "scaled_dot_product_attention": "sdpa",
}  # fmt: skip
_NAMED = "fusedlib.range"  # under this key of a node's metadata stands its range


class Range:
    """A range around what is done inside; opened and closed by hand in one thread, also a hook."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._nvtx = torch.cuda.is_available()

    def open(self, *_: Any) -> None:
        """Begin the range."""
        self._record = torch.profiler.record_function(self.name)
        self._record.__enter__()
        if self._nvtx:
            torch.cuda.nvtx.range_push(self.name)

    def close(self, *_: Any) -> None:
        """End it."""
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        self._record.__exit__(None, None, None)

    __enter__, __exit__ = open, close


@contextmanager
def named_ranges(model: nn.Module) -> Iterator["Tracer"]:
    """Ranges of all modules of `model` while inside; eager models only.

    Yields the tracer, whose `within` names functions that are no modules, such as the loss.
    """
    tracer = Tracer()
    wrapped = []
    try:
        for name, module in model.named_modules():
            if name and not isinstance(module, nn.ModuleList):
                tracer.wrap(module, _local(name))
                wrapped.append(module)
        with tracer:
            yield tracer
    finally:
        for module in wrapped:
            del module.forward  # the class's own is found again


def _local(name: str) -> str:
    """`blocks.3` -> `block 3`, `blocks.3.attention` -> `attention`."""
    *parents, last = name.split(".")
    return f"block {last}" if parents and parents[-1] == "blocks" else last


class Tracer(TorchFunctionMode):
    """Knows in which range the forward pass is, and names each new autograd node after it."""

    def __init__(self) -> None:
        super().__init__()
        self._path: list[str] = []
        self._softmax_seen = False

    def wrap(self, module: nn.Module, local: str) -> None:
        """Let a module's forward run in a range of its caller's name and its own."""
        forward = module.forward

        @functools.wraps(forward)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            self._softmax_seen = False
            with self.within(local):
                return forward(*args, **kwargs)

        module.forward = ranged

    @contextmanager
    def within(self, local: str) -> Iterator[None]:
        """A range below the one that is open, for the forward pass and what it makes."""
        self._path.append(local)
        try:
            with Range("/".join(self._path)):
                yield
        finally:
            self._path.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func` in the range of its step, and name the nodes it makes."""
        step = self._step(func.__name__)
        if step is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self.within(step):
                out = func(*args, **(kwargs or {}))
        path = [*self._path, step] if step else self._path
        if path:
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    _name_nodes(tensor.grad_fn, "/".join(path))
        return out

    def _step(self, function: str) -> str | None:
        """The step of the attention that a function is, None outside and between them."""
        if not self._path or self._path[-1] != "attention":
            return None
        function = function.strip("_")
        if function == "matmul":
            return "values" if self._softmax_seen else "scores"
        step = STEPS.get(function)
        self._softmax_seen |= step == "softmax"
        return step


def _name_nodes(node: Any, name: str) -> None:
    """Give the range to a node and to those behind it that have none, weights' own left out."""
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if at is None or hasattr(at, "variable") or _NAMED in at.metadata:
            continue
        at.metadata[_NAMED] = name
        around = Range(name)
        at.register_prehook(around.open)
        at.register_hook(around.close)
        waiting += [following for following, _ in at.next_functions]
