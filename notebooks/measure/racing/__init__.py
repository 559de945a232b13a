"""What studies race with: cases, the registry of rivals, races and sweeps, rooflines.

A rival is one decorated function (`rivals`); a study lists its cases, flat dictionaries (`cases`).
`race` holds every rival against the reference (`operation`) and times those that are right in
turns, by `fusedlib.bench`; `sustained` does so at the card's power limit, with energy. `sweep`
measures single cases, `fresh` in processes of their own. Whatever becomes of a case it gives a row.
`roofline` measures what the device can reach at all.
"""
