"""What a process that fails asks of torch, for tests of processes that need no more of it."""


class OutOfMemoryError(RuntimeError):
    pass


class cuda:  # noqa: N801
    @staticmethod
    def is_available() -> bool:
        return False
