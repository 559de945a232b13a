"""The operations, a room each: `kernels`, `function`, `module`; `norm` is the model of the others.

What `_prepare` of an operation asks before it chooses a kernel, in this order:

| asked                        | otherwise                                                      |
|------------------------------|----------------------------------------------------------------|
| do the operands go together? | an error that names the operand, its shape, what is allowed    |
| autocast?                    | operands in its dtype, as torch's own operation has them       |
| a dtype of the kernels?      | plain PyTorch: float64, where it is exact                      |
| `left_to_compiler`?          | the formula, where Inductor joins few tokens with what is near |
| `has_kernels` of the device? | plain PyTorch: a CPU, an older GPU, no Triton                  |
| `is_transformed`?            | plain PyTorch, for a kernel would drop a tangent silently      |
| `is_distributed`?            | plain PyTorch, whose operators have rules for a DTensor        |
| is it plain eager code?      | the registered operator, for compilers, modes and subclasses   |

All is decided without reading a value, and kept for the next call with the same shapes, strides,
dtypes and settings (`fusedlib.op.call_prepared`): a check of anything else belongs where it runs.

| to change                  | go to                                                              |
|----------------------------|--------------------------------------------------------------------|
| an activation of the MLP   | `mlp/activation.py`, and `activate` and `slope` of `mlp/kernels.py`|
| tiles of the MLP           | the end of `mlp/kernels.py`, by architecture; all gradients of few |
|                            | tokens `blocks.py`; Hopper's kernels with roles `mlp/hopper.py`    |
| tiles of any other kernel  | constants at the top of its `function.py`, of qkv its `kernels.py` |
| which kernels a call takes | `mlp/route.py`, elsewhere `_prepare` of its `function.py`          |
| the dtypes of kernels      | `HALF_DTYPES` in `arguments.py`; KERNEL_DTYPES are those and fp32  |
| a check of operands        | `_check` of its `function.py`, `check_mlp` of the MLP              |
| FLOPs of an operator       | `_flops` of its `function.py`; what is no product has none         |
| a family of models         | `../patch/families.py`, and a class in `../patch/modules.py`       |

`fusedlib/tuning.py` lists the numbers that choose or cut; CONTRIBUTING.md has what else goes along.
"""
