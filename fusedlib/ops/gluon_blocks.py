"""What kernels in Gluon share: names that releases of Triton spell differently, and tiles' order.

Importing it fails where Gluon, which is experimental, is another than that of Triton 3.6 and 3.7.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fusedlib import compat
from fusedlib.ops import blocks

# Triton 3.7 renamed it.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Triton 3.8 renamed it.
fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
reinterpret = compat.reinterpret(gl.shared_memory_descriptor)
tile_position = gluon.jit(blocks.tile_position.fn)
