# Sourced, with the repository root as the working directory: `ensure_environment EXTRA` makes .venv and installs
# dejavu-lab with that extra ("" for none) under constraints.txt, unless that has been done already.
# The variable PYTHON names another interpreter than python3 to make .venv with.

ensure_environment() {
    local extra="${1:-}" python="${PYTHON:-python3}" stamp wanted
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi

    if ! command -v "$python" >/dev/null; then
        echo "error: Python 3.11 or newer is needed, but there is no '$python'; name one with PYTHON=..." >&2
        return 2
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: Python 3.11 or newer is needed, but '$python' is $("$python" -V); name another with PYTHON=..." \
            "(and remove .venv if it holds the old one)" >&2
        return 2
    fi
    if ! [ -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        echo "==> making .venv with $("$python" -V)"
        if ! "$python" -m venv .venv; then
            echo "error: '$python -m venv .venv' failed; Debian and Ubuntu need the package python3-venv for it" >&2
            return 2
        fi
    fi

    stamp=".venv/installed-${extra:-base}"
    # The checkout's path is part of the stamp, since the editable install holds it.
    wanted=$(.venv/bin/python -c 'import hashlib, sys
print(hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[2:]) + sys.argv[1].encode()).hexdigest())' \
        "$PWD" pyproject.toml constraints.txt)
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "==> .venv is up to date (dejavu-lab${extra:+[$extra]})"
        return 0
    fi
    echo "==> installing dejavu-lab${extra:+[$extra]} into .venv (one to three minutes)"
    rm -f "$stamp"
    local verbosity=--quiet
    if [ -t 1 ]; then verbosity=--progress-bar=on; fi
    .venv/bin/python -m pip install --disable-pip-version-check "$verbosity" -c constraints.txt -e ".${extra:+[$extra]}" ||
        return 1
    echo "$wanted" >"$stamp"
}
