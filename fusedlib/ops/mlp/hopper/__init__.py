"""Both fused kernels for Hopper, by warps with fixed roles; `fusedlib.launch` starts them.

What `fusedlib.ops.mlp.tiles` is to other cards, for large even sizes in half precision: `route` has
the table. Importing it fails where Triton's Gluon, which is experimental, is another than that of
3.6 and 3.7.
"""

from fusedlib.ops.mlp.hopper.kernel import backward_launch, forward_launch

__all__ = ["backward_launch", "forward_launch"]
