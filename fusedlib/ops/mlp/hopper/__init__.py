"""Both fused kernels for Hopper: `kernel` by warps with fixed roles, started by `launch`.

What `swiglu` is to other cards, from 65 tokens on, for even sizes in half precision. Importing it
fails where Triton's Gluon, which is experimental, is another than that of 3.6 and 3.7.
"""

from fusedlib.ops.mlp.hopper.kernel import backward_launch, forward_launch

__all__ = ["backward_launch", "forward_launch"]
