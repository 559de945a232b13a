"""The operations, a room each: `mlp`, `linear`, `norm`, `rope`, `loss`; `qkv` for patched models.

In each: `function` (public; checks operands, chooses kernels or plain PyTorch), `module` (public),
`operator` (what torch.compile and other watchers see), `kernels`. Beside them stands what they
share.
"""
