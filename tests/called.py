"""What ran: names of the operators that a block of code called, and of the kernels started."""

from torch.utils._python_dispatch import TorchDispatchMode


class Called(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **kwargs or {})


def note_launches(monkeypatch) -> list[str]:
    """Names of the kernels that are started from now on."""
    from fusedlib.launch import Launch

    names = []
    original = Launch.__call__

    def noted(self, *matrices):
        names.append(self.kernel.__name__)
        return original(self, *matrices)

    monkeypatch.setattr(Launch, "__call__", noted)
    return names
