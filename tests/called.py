"""What ran: names of the operators that a block of code called."""

from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **kwargs or {})
