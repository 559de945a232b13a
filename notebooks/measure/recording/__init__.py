"""The recordings of the study: rows on disk, of which machine and code, and where all lies."""
