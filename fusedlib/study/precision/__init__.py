"""Study 02, precision and accumulation: tables, figures and sentences from the rows."""
