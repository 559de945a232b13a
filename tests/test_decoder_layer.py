"""Decoder layers as a whole in Triton's interpreter, in processes of their own."""

import pytest

from interpreter import passed_in_the_interpreter


@pytest.mark.parametrize("part", ["0/2", "1/2"])
def test_in_the_interpreter(part):
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/decoder_layer.py", part) > 12
