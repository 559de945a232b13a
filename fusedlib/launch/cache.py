"""What calls keep for the next ones like them: plans, launches, tensor maps."""

from collections.abc import Hashable
from typing import TypeVar

Value = TypeVar("Value")


class BoundedCache(dict[Hashable, Value]):
    """A dict that is emptied when it is full; varying sequence lengths make an entry each."""

    most = 4096

    def __setitem__(self, key: Hashable, value: Value) -> None:
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
