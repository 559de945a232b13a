"""What the notebooks measure: topics, how they are measured, and the rows that come of it.

A topic is a module with `PROFILES`, `cases(profile, **sizes)` and `measure(race)`; its rows lie in
`report/results/<machine>/<topic>.jsonl`. `run` measures what lacks, `rows` reads, `race` times.
"""
