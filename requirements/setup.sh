#!/bin/sh
# Sets up $VENV for `make`: says what it does while it does it, and stops with a sentence where it cannot go on.
set -eu

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "$PYTHON is not Python 3.11 or later; name one that is: make PYTHON=python3.12 ..."

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" || fail "'$PYTHON -m venv' failed (on Debian: apt-get install python3-venv)"
fi

if "$VENV/bin/python" -c "import torch; assert torch.__version__ == '$TORCH+cpu'" 2>/dev/null; then
    say "torch $TORCH+cpu is there"
else
    say "installing torch $TORCH+cpu (about 200 MB)"
    # --no-deps: its dependencies are in the lock. The plain index has no +cpu builds, a mirror may have them.
    pip install --quiet --no-deps "torch==$TORCH+cpu" 2>/dev/null || {
        say "not in the index that pip is set up for; trying PyTorch's CPU wheel index"
        pip install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu"
    } || fail "no torch $TORCH+cpu for $("$VENV/bin/python" --version) was found in either index"
fi

say "installing the locked CPU build of vLLM and its dependencies (about 500 MB, a few minutes)"
pip install --quiet --no-deps --progress-bar off -r requirements/cpu.txt -r requirements/dev.txt ||
    fail "the lock could not be installed: see pip's message above"

say "installing inpage itself"
pip install --quiet --no-deps --no-build-isolation --editable . || fail "inpage could not be installed: see above"
say "done"
