"""A matrix product that shows where its sum over K is kept: a probe, not a fast kernel.

C = A B, with A [m, k], B [k, n] row-major and C [m, n] in fp32. Over blocks of K:

    in the tensor core    acc = mma(A_b, B_b, acc)         the unit's own accumulator over all of K
    promoted              acc = acc + mma(A_b, B_b, 0)     an ordinary fp32 addition a block

Nothing is saved; there is no backward. One program computes one [64, 64] tile of C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_M = BLOCK_N = 64  # the smallest tile that one warp group's MMA takes on sm_90
BLOCK_K = 64
NUM_WARPS = 4
NUM_STAGES = 2  # three stages spill 24 bytes on sm_89


@triton.jit
def _accumulate_kernel(  # type: ignore[no-untyped-def]
    a_ptr,
    b_ptr,
    c_ptr,
    n,
    k,
    one,  # 1.0
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PROMOTE: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    across = n // BLOCK_N
    rows = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % across * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * k + inner[None, :]  # [BLOCK_M, BLOCK_K]
    b_ptrs = b_ptr + inner[:, None] * n + columns[None, :]  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, k, BLOCK_K):
        a = tl.load(a_ptrs)
        b = tl.load(b_ptrs)
        if PROMOTE:
            # The compiler folds acc + dot(a, b) into dot(a, b, acc), but not a fused multiply-add
            # whose factor it cannot know to be 1; multiplying by 1 is exact, so this is an
            # addition.
            acc = tl.fma(tl.dot(a, b, input_precision=PRECISION), one, acc)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * n
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc)


def accumulate_fwd(
    a: torch.Tensor, b: torch.Tensor, *, promote: bool, precision: str = "tf32"
) -> torch.Tensor:
    """Multiply a [m, k] by b [k, n] with the sum over k kept in the tensor core or promoted each K
    block.

    Args:
        a: contiguous, fp16, bf16 or fp32, m a multiple of 64.
        b: contiguous, of a's dtype and device, n a multiple of 64.
        promote: add each K block's product to an fp32 accumulator outside the tensor core.
        precision: for fp32 operands, "tf32" (tensor core) or "ieee" (no tensor core).

    Returns:
        fp32 [m, n]. K blocks hold 64, which divides k, or all of k when k is 16 or 32.
    """
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32, device=a.device)
    _accumulate_kernel[(m // BLOCK_M * (n // BLOCK_N),)](
        a, b, c, n, k, 1.0,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=min(BLOCK_K, k),
        PROMOTE=promote, PRECISION=precision,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return c
