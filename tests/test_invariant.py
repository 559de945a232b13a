"""`fusedlib.batch_invariant`: what it changes comes back. Its bits are a law: tests/laws."""

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


def test_a_block_that_cannot_begin_leaves_all_as_it_was(monkeypatch):
    def refused():
        raise RuntimeError("torch was built without cuBLASLt")

    outside = launch.prepared("a call", lambda: object())
    monkeypatch.setattr("fusedlib.invariant._forbid_shared_sums", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(RuntimeError, match="cuBLASLt"), fusedlib.batch_invariant():
        pass
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
