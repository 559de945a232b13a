"""Calls of the MLP at many lengths on a card that is played, and what Triton would compile then.

Run in a process of its own, without Triton's interpreter:
    python lengths_played.py ARCHITECTURE PROCESSORS HIDDEN INNER DTYPE LENGTH ...
prints one JSON object. Operands are of torch's meta device and say that they are on a GPU, so that
shapes and routes are the real ones, and nothing is computed. No kernel is compiled: Triton is asked
for the key under which it would be, at every launch.
"""

import contextlib
import json
import sys
from types import SimpleNamespace

import torch

torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda _: 0

import triton  # noqa: E402
from torch.nn import Parameter  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

import fusedlib.functional as functional  # noqa: E402

CARD = torch.device("cuda", 0)


class Paper(torch.Tensor):
    """A matrix on the played card: a shape, a dtype, and an address that is asked for never."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: CARD)

    def get_device(self):
        return 0

    def data_ptr(self):
        return 256

    def new_empty(self, shape):
        return paper(shape, self.dtype)

    def view(self, *shape):
        return paper((self.numel() // shape[-1], shape[-1]), self.dtype)


def paper(shape, dtype, strides=None):
    made = (
        torch.empty(shape, dtype=dtype, device="meta")
        if strides is None
        else torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    )
    return made.as_subclass(Paper)


class Driver:
    """As much of a driver as Triton asks before it compiles."""

    def __init__(self, arch):
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def play(arch: int, processors: int) -> None:
    triton.runtime.driver.set_active(Driver(arch))
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"  # measured: nothing is tuned
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=processors
    )
    functional._PLAIN = frozenset((Paper, torch.Tensor, Parameter))
    from fusedlib.kernels import binaries, cublas_plan, few_tokens_plan

    torch.mm = lambda a, b: paper((a.shape[0], b.shape[1]), a.dtype)
    cublas_plan.linear = lambda a, b: paper((a.shape[0], b.shape[0]), a.dtype)
    few_tokens_plan._allocator = lambda device: (
        lambda shape, strides, dtype: paper(shape, dtype, strides)
    )
    binaries.ahead = lambda key, compiled: None
    binaries._loaded = lambda made: binaries.Binary(lambda *_: None, ())


class Noted:
    """Every launch by its own key, and by the key that Triton has for it."""

    def __init__(self):
        from fusedlib.kernels import launch

        self.keys, self.lengths, self._seen = {}, 0, []
        triton.knobs.runtime.jit_cache_hook = self.hook
        original = launch.Launch._start
        noted = self

        def start(self, *matrices):
            noted.ask(self, matrices)
            original(self, *matrices)

        launch.Launch._start = start

    def hook(self, *, key, fn, **_):
        self._seen.append((fn.name, key))
        return True  # do not compile

    def ask(self, launch, matrices):
        self._seen.clear()
        launch.compiled(*matrices)
        [asked] = self._seen
        self.keys.setdefault(launch.binary_key(*matrices), set()).add(asked)


def main() -> None:
    arch, processors, hidden, inner = map(int, sys.argv[1:5])
    dtype = getattr(torch, sys.argv[5])
    play(arch, processors)
    noted = Noted()
    from fusedlib.kernels import ahead

    weights = [
        paper(shape, dtype).requires_grad_() for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    for tokens in map(int, sys.argv[6:]):
        for save, in_place in (("gate_up", True), ("gate_up", False), ("input", True)):
            x = paper((tokens, hidden), dtype).requires_grad_()
            y = functional.swiglu_mlp(x, *weights, save=save)
            for wants in ((x, *weights), (x,), (weights[1],))[: 1 if in_place else 3]:
                torch.autograd.grad(y, wants, paper(y.shape, dtype), retain_graph=not in_place)
        with torch.no_grad():
            functional.swiglu_mlp(x, *weights)
    listed = ahead.binaries_of(hidden, inner, dtype, CARD)
    answer = {
        "listed": [each.name for each in listed.values()],
        "not listed": [str(key) for key in noted.keys.keys() - listed.keys()],
        "met": [listed[key].name for key in noted.keys if key in listed],
        "of Triton": len(set.union(*noted.keys.values())),
        "shared wrongly": [str(key) for key, asked in noted.keys.items() if len(asked) != 1],
        "plans": len(functional._PLANS),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
