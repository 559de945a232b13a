"""Study 07's measuring: causal attention with the T × T matrix in memory, and without it."""
