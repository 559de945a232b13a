"""Study 09: where the memory of a whole model goes, counted, watched and traded for time."""
