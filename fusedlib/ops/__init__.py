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
dtypes and settings (`fusedlib.op.call_prepared`).
"""
