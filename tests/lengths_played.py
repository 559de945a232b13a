"""Calls of the MLP at many lengths on a card that is played, and what Triton would compile then.

Run in a process of its own, without Triton's interpreter:
    python lengths_played.py TASK ...
prints one JSON object for each task. A process forks for each, which imports torch no more. Tasks:
    ["calls", ARCHITECTURE, PROCESSORS, HIDDEN, INNER, DTYPE, [LENGTH, ...], [LENGTH, ...]]
    ["broken", ...]     a kernel is specialised on lengths
    ["warm", ...]       compiles in earnest, by `warm_up`, then makes the calls
Operands are of torch's meta device and say that they are on a GPU, so that shapes and routes are
the real ones, and nothing is computed. Calls compile nothing: at every launch Triton is asked for
the key under which it would.
"""

import contextlib
import json
import os
import sys
from types import SimpleNamespace

import torch

torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda _: 0

import triton  # noqa: E402
from torch.nn import Parameter  # noqa: E402

import fusedlib.ops.mlp.function as functional  # noqa: E402
from fusedlib import op  # noqa: E402
from played_driver import play_driver  # noqa: E402

CARD = torch.device("cuda", 0)


class Paper(torch.Tensor):
    """A matrix on the played card: a shape, a dtype, and an address that is asked for never."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: CARD)

    def get_device(self):
        return 0

    def data_ptr(self):
        return 256

    def new_empty(self, *shape, **_):
        return paper(shape[0] if isinstance(shape[0], tuple) else shape, self.dtype)

    def sum(self, _):
        return paper(self.shape[1:], self.dtype)

    def __getitem__(self, _):
        return paper(self.shape[1:], self.dtype)

    def __add__(self, _):
        return self

    def view(self, *shape):
        return paper((self.numel() // shape[-1], shape[-1]), self.dtype)


def paper(shape, dtype, strides=None):
    made = (
        torch.empty(shape, dtype=dtype, device="meta")
        if strides is None
        else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    )
    return made.as_subclass(Paper)


def play(arch: int, processors: int) -> None:
    play_driver(arch)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.mem_get_info = lambda device=None: (0, 0)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=processors
    )
    op.PLAIN_TYPES = frozenset((Paper, torch.Tensor, Parameter))
    from fusedlib.ops.matmul import function as matmul
    from fusedlib.ops.mlp import few_tokens, plan, products

    by_rows = lambda a, b, _=None: paper((a.shape[0], b.shape[0]), a.dtype)  # noqa: E731
    by_columns = lambda a, b, _=None: paper((a.shape[0], b.shape[1]), a.dtype)  # noqa: E731
    over_tokens = lambda a, b: paper((a.shape[1], b.shape[1]), a.dtype)  # noqa: E731
    plain = products.Products(
        *[by_rows] * 2, *[by_columns] * 2, *[over_tokens] * 2
    )  # fmt: skip
    plan.TORCH_PRODUCTS = plan.TORCH_FP32_PRODUCTS = plain
    for module in (plan, few_tokens, matmul):
        module.allocator = lambda device: lambda shape, strides, dtype: paper(shape, dtype, strides)


def ask_triton() -> set:
    """Keys under which Triton would compile what is launched from now on; nothing is compiled."""
    from fusedlib import launch

    asked, start = set(), launch.Launch._start

    def hook(*, key, fn, **_):
        asked.add((fn.name, key))
        return True  # do not compile

    def noted(self, *matrices):
        self.compiled(0, *matrices)
        start(self, *matrices)

    launch.compile_in_background = lambda key, compiled: None
    launch.load_kernel = lambda binary: (lambda *_: None, ())
    triton.knobs.runtime.jit_cache_hook = hook
    launch.Launch._start = noted
    return asked


def call(weights, tokens):
    """Training by both modes, graphs retained or not, of all gradients or some; inference."""
    (_, hidden), dtype = weights[0].shape, weights[0].dtype
    if (
        functional.path_of(paper((tokens, hidden), dtype), *weights)
        == functional.route.PLAIN_PYTORCH
    ):
        return
    for save, in_place in (("gate_up", True), ("gate_up", False), ("input", True)):
        x = paper((tokens, hidden), dtype).requires_grad_()
        y = functional.swiglu_mlp(x, *weights, save=save)
        for wants in ((x, *weights), (x,), (weights[1],))[: 1 if in_place else 3]:
            torch.autograd.grad(y, wants, paper(y.shape, dtype), retain_graph=not in_place)
    with torch.no_grad():
        functional.swiglu_mlp(x, *weights)


def calls(weights, first, others) -> dict:
    """How many binaries calls of the first lengths want, and how many more those of others."""
    asked, counts = ask_triton(), []
    for lengths in (first, others):
        for tokens in lengths:
            call(weights, tokens)
        counts.append(len(asked))
    return {"first": counts[0], "more": counts[1] - counts[0]}


def specialise() -> None:
    """Forget one `do_not_specialize`."""
    from fusedlib.ops.mlp import kernels as swiglu

    for parameter in swiglu._swiglu_bwd_kernel.params:
        parameter.do_not_specialize = False


def warm(weights, lengths, others) -> dict:
    """What `warm_up` compiles, what it says, and what is compiled after it."""
    import fusedlib
    from fusedlib.patch import warm_up as warm

    compiled = []
    hook = lambda *, fn, **_: compiled.append(fn.name) or False  # noqa: E731
    triton.knobs.runtime.jit_post_compile_hook = hook
    warm.has_kernels = lambda device: True
    module = fusedlib.SwiGLUMLP(weights[1].shape[0], weights[1].shape[1], device="meta")
    module.weights = lambda: weights
    few = fusedlib.warm_up(module, tokens=range(1, 9), progress=False)
    some = len(compiled)
    first = fusedlib.warm_up(torch.nn.Sequential(module, module), weights[0].dtype)
    by_then = len(compiled)
    second = fusedlib.warm_up(module, progress=False)
    for tokens in (*lengths, *others):
        call(weights, tokens)
    return {
        "few": [len(few.names), some], "names": first.names, "compiled": by_then,
        "again": [len(second.names), len(compiled) - by_then],
    }  # fmt: skip


def found(task, arch, processors, hidden, inner, dtype, *lengths) -> dict:
    play(arch, processors)
    if task == "broken":
        specialise()
    shapes = (2 * inner, hidden), (hidden, inner)
    weights = [paper(shape, getattr(torch, dtype)).requires_grad_() for shape in shapes]
    return (warm if task == "warm" else calls)(weights, *lengths)


if __name__ == "__main__":
    for task in sys.argv[1:]:
        if (child := os.fork()) == 0:
            print(json.dumps(found(*json.loads(task))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{task} failed")
