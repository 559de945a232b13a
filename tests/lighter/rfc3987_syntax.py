"""Not there for processes that tests start: importing it takes longer than all else that a runner
imports, and jsonschema, which does without, would check with it what no notebook holds."""

raise ImportError("left out by the tests")
