"""Study 09, memory of a model: tables, figures and sentences, each a pure function of the rows."""
