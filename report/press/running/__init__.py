"""From study.toml to executed notebooks: what is run, with which parameters, and what is kept."""
