"""What a kernel does, by its name.

Kernels of cuBLAS, CUTLASS, cuDNN, PyTorch and Inductor name their work. What no rule knows is
"other" and is shown as such. Inductor names a kernel after all operations that it fused: one that
only moves or casts is a copy, one with a softmax among them a softmax, and any other goes by its
kind of loop.
"""

import re
from functools import cache

GEMM, SOFTMAX, ELEMENTWISE, OPTIMIZER = "GEMM", "softmax", "element-wise", "optimizer"
REDUCTION, COPY, INDEXING, OTHER = "reduction", "copy and cast", "indexing", "other"

_MOVES = (
    "_to_copy|_unsafe_view|as_strided|cat|clone|constant_pad_nd|copy|expand|full|permute|select|"
    "slice|split|squeeze|stack|t|transpose|unsqueeze|view|zeros"
)
# The first rule that is found in the name decides: an element-wise kernel's template says whether
# all it does is copy.
_RULES = [(kind, re.compile(rule, re.IGNORECASE)) for kind, rule in (
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|adamw"),
    (GEMM, r"gemm|nvjet|cutlass|split_?k|gemv|cublas|triton_(mm|bmm|tem)|xmma"),
    (SOFTMAX, r"softmax"),
    (COPY, rf"^triton_(poi|red|per)_fused(_({_MOVES}))+_\d+$"),
    (REDUCTION, r"^triton_(red|per)_"),
    (ELEMENTWISE, r"^triton_(?!poi_fused_(embedding|index|nll_loss)\w*_\d+$)"),
    (INDEXING, r"embedding|index|gather|scatter|radixsort|\bcub::|nll_loss|krn_partial|segments|"
               r"grad_weight"),
    (COPY, r"memcpy|memset|copy|fillfunctor|transpose"),
    (REDUCTION, r"reduce|norm"),
    (ELEMENTWISE, r"elementwise|triu_tril|arange|pointwise"),
)]  # fmt: skip


@cache
def class_of(name: str) -> str:
    """The class of a kernel, copy or fill on a GPU."""
    return next((kind for kind, rule in _RULES if rule.search(name)), OTHER)
