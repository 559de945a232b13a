"""Study 06's tables, figures and sentences from its rows."""
