"""Study 06: whole training steps by size, context, precision, mode, MLP and optimizer."""
