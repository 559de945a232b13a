"""Study 07 from its rows: what a T × T matrix costs in time and memory, and what does without."""
