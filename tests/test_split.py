"""The split products in Triton's interpreter, in a process of its own."""

from interpreter import passed_in_the_interpreter


def test_in_the_interpreter():
    """What fails there is shown here. Alone it takes 20 s of a core."""
    assert passed_in_the_interpreter("split_interpreted.py") > 60
