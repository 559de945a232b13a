#!/bin/sh
# Make or refresh the virtual environment. Called by make: setup.sh PYTHON CHOICE VENV PURPOSE
# CHOICE is `default` when nobody named a Python: a finished environment of another one then stays.
# With VENV empty nothing is made: the Python given must have what PURPOSE needs.
# A stamp, written last, says what is installed, so an interrupted install never counts as done.
set -eu

python=$1
choice=$2
venv=$3
purpose=$4
CDPATH= cd "$(dirname "$0")/.."
stamp="$venv/.fusedlib-installed"

fail() {
    printf 'fusedlib: %s\n' "$@" >&2
    exit 2
}

case $PWD in
*:*) fail "$PWD has a ':' in its name, at which Python parts the names of folders; move it to one without" ;;
esac

wanted=$(cat pyproject.toml notebooks/pyproject.toml report/pyproject.toml constraints.txt | cksum)
if [ -n "$venv" ] && [ "$choice" = default ] && [ -f "$stamp" ] &&
    [ "$(cut -d' ' -f2- "$stamp")" = "$wanted" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

command -v "$python" >/dev/null 2>&1 || fail "there is no Python called '$python'; say make PYTHON=... with a Python 3.11 or newer"

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>&1) ||
    fail "'$python' does not run: $version"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    newer=
    for name in python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1 && "$name" -c '' 2>/dev/null; then
            newer="$newer $name"
        fi
    done
    fail "$python is Python $version; 3.11 or newer is needed" \
        "${newer:+here are:$newer; say make PYTHON=${newer##* }}"
}

if [ -z "$venv" ]; then
    exec "$python" tools/doctor.py --quiet --for "$purpose"
fi

wanted="$version $wanted"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] &&
    "$venv/bin/python" -c '' 2>/dev/null; then
    exit 0
fi

"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python cannot make virtual environments: its modules venv and ensurepip are missing" \
        "on Debian and Ubuntu: apt install python${version%.*}-venv" \
        "or use packages that are there already: make VENV= PYTHON=$python"

# Only what this script made is ever removed or changed.
unfinished="$venv/.fusedlib-unfinished"
if [ ! -f "$stamp" ] && [ ! -f "$unfinished" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
    fail "$venv exists and was not made by make; choose another folder with make VENV=..." \
        "or use it as it is, if it is an environment: make VENV= PYTHON=$venv/bin/python"
fi

began=$(date +%s)
# What an interrupted install left, or another Python made, is not built upon.
if [ ! -f "$stamp" ] || [ "$(cut -d' ' -f1 "$stamp")" != "$version" ]; then
    echo "fusedlib: making the environment $venv with Python $version; about 2.5 GB, minutes" >&2
    rm -rf "$venv"
    mkdir -p "$venv" && : >"$unfinished" || fail "$venv cannot be made"
    "$python" -m venv "$venv" || fail "$python could not make $venv (see above)"
else
    echo "fusedlib: a pyproject.toml or constraints.txt changed, refreshing $venv" >&2
    : >"$unfinished"
    rm "$stamp"
fi

log="$venv/install.log"
trap 'echo "fusedlib: interrupted; the next make starts the install again" >&2; exit 130' INT
trap 'exit 143' TERM
if ! PIP_RETRIES="${PIP_RETRIES:-2}" "$venv/bin/python" -m pip install --disable-pip-version-check \
    -c constraints.txt -e '.[dev]' -e notebooks -e report >"$log" 2>&1; then
    grep -v '^WARNING: Location' "$log" | tail -n 12 >&2
    if grep -qiE 'connection|name resolution|timed out|unreachable|No matching distribution|ProxyError|SSLError' "$log"; then
        fail "pip could not fetch the packages; is a package index reachable from here?" \
            "without a network, use a Python that has them: make VENV= PYTHON=/path/to/python"
    fi
    fail "pip could not install the packages; its full output is in $log"
fi
# Hooks are a convenience: without git, or where it has hooks of its own elsewhere, there are none.
if [ -e .git ] && ! hooks=$("$venv/bin/python" -m pre_commit install 2>&1); then
    echo "fusedlib: no hooks before commits (${hooks:-pre-commit does not run}); make lint checks the same" >&2
fi
if [ -e .git ]; then
    git config filter.notebook.clean "sh tools/hook.sh python tools/strip_notebook.py" ||
        echo "fusedlib: git does not strip notebooks of their outputs (see above)" >&2
fi
printf '%s\n' "$wanted" >"$stamp.new"
mv "$stamp.new" "$stamp"
rm "$unfinished"
echo "fusedlib: environment ready after $(($(date +%s) - began)) s" >&2
