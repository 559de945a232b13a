"""Environment variables that are set for a while."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from unittest import mock


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """These variables are set while the block runs; those that are None are not."""
    given = {name: value for name, value in values.items() if value is not None}
    with mock.patch.dict(os.environ, given):
        for name in {*values} - {*given}:
            os.environ.pop(name, None)
        yield
