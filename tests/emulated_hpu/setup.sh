#!/bin/sh
# Sets up $VENV with the real vLLM 0.26.0, the checkout $VLLM_GAUDI and the emulated device, for `make test-gaudi`.
set -eu

say() { printf 'test-gaudi: %s\n' "$*"; }
fail() { printf 'test-gaudi: %s\n' "$*" >&2; exit 1; }
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

[ -n "${VLLM_GAUDI:-}" ] ||
    fail "name a checkout of vllm-gaudi's tag v0.26.0: make test-gaudi VLLM_GAUDI=<checkout>"
[ -d "$VLLM_GAUDI/vllm_gaudi" ] || fail "$VLLM_GAUDI is no checkout of vllm-gaudi: it has no folder vllm_gaudi"

if [ ! -x "$VENV/bin/python" ]; then
    say "creating $VENV"
    "$PYTHON" -m venv "$VENV" || fail "'$PYTHON -m venv' failed"
    echo '*' > "$VENV/.gitignore"
fi

wanted() { cat requirements/gaudi-test.txt pyproject.toml; }  # the entry points are in the latter
if ! wanted | cmp -s - "$VENV/installed.txt"; then
    say "installing torch $TORCH+cpu (about 200 MB)"
    pip install --quiet --no-deps "torch==$TORCH+cpu" 2>/dev/null ||
        pip install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$TORCH+cpu" ||
        fail "no torch $TORCH+cpu was found"
    say "installing the lock (about 500 MB, a few minutes)"
    pip install --quiet --no-deps --progress-bar off -r requirements/gaudi-test.txt ||
        fail "the lock could not be installed: see pip's message above"
    pip install --quiet --no-deps --no-build-isolation --editable . || fail "inpage could not be installed: see above"
    wanted > "$VENV/installed.txt"
fi

"$VENV/bin/python" tests/emulated_hpu/install.py "$VLLM_GAUDI"
