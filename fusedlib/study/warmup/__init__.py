"""Study 01, warm-up: its tables, figures and sentences, each a pure function of the rows."""
