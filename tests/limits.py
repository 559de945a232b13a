"""How long tests and what they start may take: limits against hanging alone.

Each is ten times what a machine with two slow cores needs, or more. The inner one ends first, so
that its message, which says what hung, is the one that people read. The outermost is pytest's own,
in `pyproject.toml`.
"""

INTERPRETED_TEST_S = 1200
"""Seconds for one test of a file that runs in Triton's interpreter, in a process of its own."""
PROCESS_S = 1800
"""Seconds for a process that a test starts, and for whatever else a test waits for."""
TEST_S = 3600
"""Seconds for one test; `timeout` in `pyproject.toml`."""
