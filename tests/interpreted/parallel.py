"""One process's DDP, FSDP2 and DTensors over the interpreted kernels, or on a GPU over the others:
`tests/test_swiglu_parallel.py` runs this file.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fusedlib import SwiGLUMLP, linear_cross_entropy, rms_norm, rope, swiglu_mlp
from fusedlib.ops.mlp.route import runs_fused_kernels

DEVICE = sys.argv[1]
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
# Gradients of this loss are near 1e-6, and bf16 weights move by 2⁻⁹ of themselves or not at all.
RATE = 0.1 if DEVICE == "cpu" else 1e4


def blocks() -> nn.Sequential:
    """Two MLPs, the second recomputing."""
    torch.manual_seed(0)
    made = SwiGLUMLP(48, 80), SwiGLUMLP(48, 80, save="input")
    return nn.Sequential(*made).to(DEVICE, DTYPE)


def trained(model: nn.Module, bare: nn.Module, x: Tensor) -> list[Tensor]:
    """Weights after two steps of SGD, wherever they lie."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in bare.parameters()]


def check_dtensors(mesh: DeviceMesh) -> None:
    """Every operation takes DTensors, as sequence parallelism gives them, and so do gradients."""
    x, weight, labels = torch.randn(5, 16), torch.randn(32, 16) / 4, torch.arange(5, device=DEVICE)
    heads, tables = torch.randn(1, 2, 5, 16), torch.randn(1, 5, 16)
    calls = (
        (lambda x, w, _: rms_norm(x, w[0], residual=x)[0], x, weight),
        (lambda q, t, _: rope(q, q, t.detach(), t.detach())[0], heads, tables),
        (linear_cross_entropy, x, weight),
        (lambda *given: linear_cross_entropy(*given, reduction="none"), x, weight),
        (lambda x, w, _: swiglu_mlp(x, (w, w), w.t()), x, weight),
    )
    for call, *operands in calls:
        operands = [t.to(DEVICE, DTYPE) for t in operands]
        leaves = [t.clone().requires_grad_() for t in operands]
        own = [distribute_tensor(t, mesh).requires_grad_() for t in operands]
        wanted, result = call(*leaves, labels), call(*own, distribute_tensor(labels, mesh))
        for loss in (wanted, result):
            loss.sum().backward()
        pairs = [
            (result, wanted),
            *((t.grad, leaf.grad) for t, leaf in zip(own, leaves, strict=True)),
        ]
        for actual, value in pairs:
            if value is not None:
                close = 1e-3 if DEVICE == "cpu" else 0.05
                torch.testing.assert_close(actual.full_tensor(), value, rtol=close, atol=close)


def main() -> None:
    x = torch.randn(37, 48, device=DEVICE).to(DTYPE)
    assert runs_fused_kernels(x.device, x.dtype)
    with tempfile.TemporaryDirectory() as folder:
        backend = "gloo" if DEVICE == "cpu" else "nccl"
        dist.init_process_group(
            backend, rank=0, world_size=1, init_method=f"file://{folder}/meeting"
        )
        plain, first, second = blocks(), blocks(), blocks()
        start = [p.detach().clone() for p in plain.parameters()]
        wanted = trained(plain, plain, x)
        ddp = trained(DistributedDataParallel(first, gradient_as_bucket_view=True), first, x)
        mesh = init_device_mesh(DEVICE, (1,))
        for block in second:
            fully_shard(block, mesh=mesh)
        fsdp = trained(fully_shard(second, mesh=mesh), second, x)
        check_dtensors(mesh)
        dist.destroy_process_group()
    assert not any(torch.equal(a, b) for a, b in zip(start, wanted, strict=True))
    for name, actual in (("DDP", ddp), ("FSDP2", fsdp)):
        torch.testing.assert_close(actual, wanted)
        print(f"{name} trains as the bare module")
    print("DTensors are computed by torch")


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "localhost")
    main()
    sys.stdout.flush()
    os._exit(0)  # as apply_parallel.py: threads of gloo may abort the interpreter's end
