"""No kernel is started on a grid larger than CUDA's, whatever the sizes."""

import pytest
import torch

from fusedlib.launch.config import Config
from fusedlib.launch.launch import Launch
from fusedlib.ops.linear.split import parts
from fusedlib.ops.linear.split import product as split_product
from fusedlib.ops.loss import kernels as loss_kernels
from fusedlib.ops.mlp import tiles as swiglu
from fusedlib.ops.mlp.few_tokens import kernels as few_tokens
from fusedlib.ops.norm import kernels as norm_kernels
from fusedlib.ops.rope import kernels as rope_kernels
from interpreter import passed_in_the_interpreter

MANY = 9_000_000  # more blocks of 128 than a grid has programs along y and z


def test_in_the_interpreter():
    assert passed_in_the_interpreter("test_grids.py") > 15


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(*shape):
    x, weight, rstd = meta(*shape), meta(shape[-1]), meta(shape[0])
    norm_kernels.rms_norm_fwd(x, weight, x, 1e-6, True)
    norm_kernels.rms_norm_bwd(x, x, x, weight, rstd, True, True)


def rotations(batch, heads, tokens, head_dim):
    cos = meta(1, tokens, head_dim)
    rope_kernels.rope_fwd(*[meta(batch, heads, tokens, head_dim)] * 2, cos, cos, None, None)


def losses(rows, vocabulary):
    logits = meta(rows, loss_kernels.row_stride(vocabulary, 4))[:, :vocabulary]
    target, one = meta(rows, dtype=torch.int64), meta()
    operands = logits, target, None, None, one, meta(rows), None
    loss_kernels.cross_entropy_rows(*operands, loss_kernels.Settings(), gradient=True)
    loss_kernels.fill_scaled(logits, logits, one, one)


def mlps(tokens, hidden, inner):
    device = torch.device("cpu")
    for product in (False, True):
        variant = swiglu.Variant(product, True, True, False)
        swiglu.bwd_launch(device, tokens, hidden, inner, variant)
    few_tokens.down_launch(device, tokens, hidden, inner)
    few_tokens.gradients_launch((True, True, True), device, tokens, hidden, inner)


def split_factors(rows, columns):
    for by_columns in (False, True):
        source = meta(rows, columns)
        parts.FactorSplitter(source.device, source, by_columns)(source)


def split_products(m, n, k):
    split_product._launch(torch.device("meta"), (m, n, k, 1024), (False, False))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("launcher", "sizes"),
    [
        *[(norms, s) for s in ((MANY, 8), (3, MANY))],
        *[(rotations, s) for s in ((MANY, 2, 3, 8), (2, MANY, 3, 8), (2, 3, MANY, 8))],
        *[(rotations, (70_000, 8, 1, 16))],
        *[(losses, s) for s in ((MANY, 5), (3, MANY))],
        *[(mlps, s) for s in ((MANY, 64, 64), (300, MANY, 64), (300, 64, MANY), (3, 64, MANY))],
        *[(split_factors, s) for s in ((MANY, 300), (300, MANY))],
        *[(split_products, s) for s in ((MANY, 300, 256), (300, MANY, 256), (300, 300, 4096))],
    ],
)
def test_no_grid_is_larger_than_cuda_starts(device, monkeypatch, launcher, sizes):
    grids, make = [], Launch.__init__

    def noted(self, kernel, config, programs, *others):
        grids.append(programs)
        make(self, kernel, config, programs, *others)

    monkeypatch.setattr(Launch, "__init__", noted)
    monkeypatch.setattr(Launch, "__call__", lambda self, *matrices: None)
    launcher(*sizes)
    assert grids
    for programs in grids:
        assert programs[0] < 2**31 and max(programs[1:]) < 2**16, programs


@pytest.mark.interpreter
def test_a_grid_that_is_larger_is_refused(device):
    for programs in ((2**31, 1, 1), (1, 2**16, 1), (1, 1, 2**16)):
        with pytest.raises(ValueError, match=r"a grid of \(.*\) programs is more than CUDA's"):
            Launch(rope_kernels._rope_kernel, Config(num_warps=4), programs, (), (), {})
    Launch(rope_kernels._rope_kernel, Config(num_warps=4), (2**31 - 1, 2**16 - 1, 1), (), (), {})
