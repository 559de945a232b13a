"""What starts kernels: on which devices, how cut, from which binaries, as which operators of torch.

All private names of torch and Triton that the library uses stand in `internals`.
"""
