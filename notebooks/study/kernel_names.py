"""What a kernel does, by its name, and a name short enough for a table.

Kernels of cuBLAS, CUTLASS, cuDNN, PyTorch and Inductor name their work; so do the operators that
a CPU's profile consists of. What no rule knows is "other" and is shown as such. Inductor names a
kernel after all operations that it fused: one that only moves or casts is a copy, one with a
softmax among them a softmax, and any other goes by its kind of loop.
"""

import re
from functools import cache

GEMM, ATTENTION, SOFTMAX = "GEMM", "fused attention", "softmax"
ELEMENTWISE, REDUCTION, COPY = "element-wise", "reduction", "copy and cast"
INDEXING, OPTIMIZER, DISPATCH, OTHER = "indexing", "optimizer", "dispatch", "other"
CLASSES = (
    GEMM, ATTENTION, SOFTMAX, ELEMENTWISE, REDUCTION, COPY, INDEXING, OPTIMIZER, DISPATCH, OTHER,
)  # fmt: skip

_MOVES = (
    "_to_copy|_unsafe_view|as_strided|cat|clone|constant_pad_nd|copy|expand|full|permute|select|"
    "slice|split|squeeze|stack|t|transpose|unsqueeze|view|zeros"
)
# The first rule that is found in the name decides: fused attention is made of CUTLASS too, and an
# element-wise kernel's template says whether all it does is copy.
_KERNELS: tuple[tuple[str, str], ...] = (
    (ATTENTION, r"flash|fmha|sdpa|mem_?eff_?attention|compute_dot_do_o|convert_dq_to"),
    (OPTIMIZER, r"multi_tensor_apply|fused_?adam|adamw"),
    (GEMM, r"gemm|nvjet|cutlass|split_?k|gemv|cublas|triton_(mm|bmm|tem)|xmma"),
    (SOFTMAX, r"softmax"),
    (COPY, rf"^triton_(poi|red|per)_fused(_({_MOVES}))+_\d+$"),
    (REDUCTION, r"^triton_(red|per)_"),
    (ELEMENTWISE, r"^triton_(?!poi_fused_(embedding|index|nll_loss)\w*_\d+$)"),
    (
        INDEXING,
        r"embedding|index|gather|scatter|radixsort|\bcub::|nll_loss|krn_partial|segments|grad_weight",
    ),
    (COPY, r"memcpy|memset|copy|fillfunctor|transpose"),
    (REDUCTION, r"reduce|norm"),
    (ELEMENTWISE, r"elementwise|triu_tril|arange|pointwise"),
)
_OPERATORS: tuple[tuple[str, str], ...] = (
    (ATTENTION, r"_?scaled_dot_product\w*|_flash_attention\w*"),
    (OPTIMIZER, r"_foreach_\w+|_fused_\w+"),
    (GEMM, r"mm|bmm|addmm|baddbmm|mv|dot|addmv|mkldnn_linear\w*|_addmm_activation"),
    (SOFTMAX, r"_(log_)?softmax(_backward_data)?"),
    (INDEXING, r"embedding\w*|index\w*|gather|scatter\w*|nll_loss\w*|masked_select"),
    (COPY, r"copy_|_to_copy|cat|contiguous|clone|fill_|zero_|constant_pad_nd"),
    (REDUCTION, r"sum|mean|amax|max|min|prod|norm|var|linalg_vector_norm"),
    (ELEMENTWISE, r"(add|sub|mul|div|neg|exp|log|sqrt|rsqrt|pow|square|silu|sigmoid|tanh|where|"
                  r"masked_fill|addcmul|addcdiv|lerp|triu|tril|reciprocal|bitwise_\w+|eq|ne|lt|gt)"
                  r"(_backward)?_?"),
    (DISPATCH, r"\w+"),  # a view, an allocation, or one that calls others: no work of its own
)  # fmt: skip
_HOST = re.compile(
    r"autograd::|\w+Backward\d*$|torch::|detach|TorchDynamo|AOTDispatcher|Pregraph|\[|Torch-Compiled|Compiled"
)
_KERNEL_RULES = [(kind, re.compile(rule, re.IGNORECASE)) for kind, rule in _KERNELS]
_OPERATOR_RULES = [(kind, re.compile(rf"aten::(?:{rule})")) for kind, rule in _OPERATORS]


@cache
def of_kernel(name: str) -> str:
    """The class of a kernel, copy or fill on a GPU."""
    return next((kind for kind, rule in _KERNEL_RULES if rule.search(name)), OTHER)


@cache
def of_operator(name: str) -> str:
    """The class of an operator on the host, such as `aten::mm`."""
    if name.startswith("aten::"):
        return next((kind for kind, rule in _OPERATOR_RULES if rule.fullmatch(name)), OTHER)
    return DISPATCH if _HOST.match(name) else OTHER


MOST = 72  # characters of a name in a table
_NOISE = [re.compile(pattern) for pattern in (
    r"^void ", r"\(anonymous namespace\)::|<unnamed>::",
    r"::\{lambda\([^()]*\)#\d+\}", r"::operator\(\)\(\)( const)?",
    r"\([^()]*TensorIterator[^()]*\)", r"\([^()]*TensorIterator[^()]*\)",  # one in another
    r"\b(at|native|at_cuda_detail|std|c10|binary_internal|memory|cuda|detail)::",
    r"gpu_kernel_impl(_nocast)?<", r", array<[^<>]*>", r"Trivial\w+<[^<>]*>, ",
    r"TensorList\w*Metadata<[^<>]*>, ", r"\b(\w+), \1, \1, (?=\w+Functor)",
)]  # fmt: skip


@cache
def short_name(name: str) -> str:
    """A kernel's name without arguments, namespaces and what else tells little; the end is cut.

    >>> short_name("void at::native::(anonymous namespace)::softmax<float, 4>(float*, int)")
    'softmax<float, 4>'
    """
    text = _without_arguments(name)
    for noise in _NOISE:
        text = noise.sub("", text)
    text = text.replace(" >", ">").strip()
    return text if len(text) <= MOST else f"{text[: MOST - 1]}…"


def _without_arguments(name: str) -> str:
    """All before the bracket that opens the argument list: the first outside of `<...>`."""
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0 and not name.startswith("(anonymous namespace)", at):
            return name[:at]
    return name
