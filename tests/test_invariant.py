"""`fusedlib.batch_invariant`: what it changes comes back. Its bits are a law: tests/laws."""

from contextlib import nullcontext

import pytest
import torch

import fusedlib
from fusedlib import launch
from fusedlib.invariant import is_batch_invariant

TOLD = "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"


def told():
    """What torch is told of its products."""
    matmul = torch.backends.cuda.matmul
    return [(getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in TOLD]


def test_blocks_in_blocks_and_those_that_raise_end_where_they_began():
    with pytest.raises(KeyError), fusedlib.batch_invariant():
        with fusedlib.batch_invariant():
            pass
        assert is_batch_invariant()
        raise KeyError
    assert not is_batch_invariant()


class Products:
    """torch.backends.cuda.matmul of a machine that refuses some settings."""

    def __init__(self, refused):
        before = {name: True for each in TOLD for name in (each, f"{each}_split_k")}
        vars(self).update(before, refused=refused)

    def __setattr__(self, name, value):
        if name == self.refused:
            raise RuntimeError(f"torch refuses {name}")
        allowed, split = value
        vars(self).update({name: allowed, f"{name}_split_k": split})


@pytest.mark.parametrize("refused", ["cublaslt", *TOLD, ""])
def test_a_block_leaves_all_as_it_was_also_where_it_cannot_begin(monkeypatch, refused):
    chosen = ["cublas"]

    def library(name=None):
        if name and name == refused:
            raise RuntimeError(f"torch was built without {name}")
        chosen.extend([name] * (name is not None))
        return chosen[-1]

    outside = launch.prepared("a call", lambda: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    monkeypatch.setattr(torch.backends.cuda, "matmul", Products(refused))
    before = told()
    refuses = pytest.raises(RuntimeError, match=refused) if refused else nullcontext()
    with refuses, fusedlib.batch_invariant():
        assert (told(), chosen[-1]) == ([(False, False)] * 2, "cublaslt")
    assert (told(), chosen[-1]) == (before, "cublas")
    assert not is_batch_invariant()
    assert launch.prepared("a call", lambda: object()) is outside


def test_what_was_prepared_outside_is_there_again_and_nothing_of_it_inside():
    outside = launch.prepared("a call", lambda: object())
    with fusedlib.batch_invariant():
        inside = launch.prepared("a call", lambda: object())
        assert inside is not outside
    assert launch.prepared("a call", lambda: object()) is outside
    with fusedlib.batch_invariant():
        assert launch.prepared("a call", lambda: object()) is inside
    launch.forget()
    with fusedlib.batch_invariant():
        assert launch.prepared("a call", lambda: object()) is not inside


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_torch_is_told_what_it_was_told_before():
    matmul = torch.backends.cuda.matmul
    before = told(), torch.backends.cuda.preferred_blas_library()
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        for _ in range(2):
            with fusedlib.batch_invariant():
                assert told() == [(False, False)] * 2
            assert told() == [(False, True), before[0][1]]
            assert torch.backends.cuda.preferred_blas_library() == before[1]
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0][0]
