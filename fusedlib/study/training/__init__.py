"""Study 10, training on MNIST: its tables, figures and sentences, pure functions of rows."""
