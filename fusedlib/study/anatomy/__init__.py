"""Study 05, anatomy of a speed-up: its tables, figures and sentences, pure functions of rows."""
