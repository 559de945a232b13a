"""The split products in Triton's interpreter, in a process of its own."""

import pytest

from interpreter import passed_in_the_interpreter


@pytest.mark.timeout(600)
def test_in_the_interpreter():
    """What fails there is shown here. Alone it takes 20 s of a core."""
    assert passed_in_the_interpreter("split_interpreted.py", timeout=560) > 60
