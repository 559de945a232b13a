"""Study 04, memory: its tables, figures and sentences, each a pure function of the rows."""
