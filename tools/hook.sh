#!/bin/sh
# Run a tool of the environment that `make setup` made, or of the one that is active: hook.sh TOOL ...
# A hook is shared by all working trees of a repository, and so is the environment of the first.
PATH="$(git rev-parse --git-common-dir)/../.venv/bin:$PATH" exec "$@"
