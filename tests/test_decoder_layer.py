"""Decoder layers as a whole in Triton's interpreter, in a process of its own."""

from interpreter import passed_in_the_interpreter


def test_in_the_interpreter():
    """What fails there is shown here."""
    assert passed_in_the_interpreter("interpreted/decoder_layer.py") > 25
