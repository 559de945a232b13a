"""Triton kernels around the SwiGLU MLP, and the study that measures them.

Importing this package imports neither a notebook tool nor a plotting library; the study lives in
`fusedlib.study`, the measuring side in `fusedlib.bench`.
"""

__version__ = "0.1.0"
