#!/usr/bin/env bash
# Installs what the tests need into a virtual environment and runs every check; fails when one of them does.
#
#   scripts/test.sh                   everything, in .venv
#   scripts/test.sh tests/cli -k gin  the same, with these arguments for pytest
#   VENV=/path scripts/test.sh        in another virtual environment, made if it is not there
#   WITH_TORCH=1 scripts/test.sh      installs torch and transformers too (gigabytes), for the parity tests
#   REMIXER_T5X_DATA=/path ...        a folder with real data, for the tests that read it
#   TEST_WORKERS=4 ...                pytest processes, 2 unless said
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/environment.sh
EXTRAS='test,dev'
if [[ "${WITH_TORCH:-0}" == 1 ]]; then EXTRAS='test,dev,hf'; fi
prepare_environment "$EXTRAS"

FAILED=()
check() {
    local name="$1"
    shift
    say "$name"
    local start=$SECONDS
    if "$@"; then
        echo "$name passed in $((SECONDS - start)) s"
    else
        FAILED+=("$name")
    fi
}

export PYTHONPATH="$PWD:$PWD/tasks${PYTHONPATH:+:$PYTHONPATH}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
if [[ -z "${REMIXER_T5X_DATA:-}" ]]; then
    say 'REMIXER_T5X_DATA is not set: tests on real data will be skipped'
fi
check 'lint (ruff)' "$VENV/bin/ruff" check .
check 'types (mypy)' "$VENV/bin/mypy"
check 'import directions (import-linter)' "$VENV/bin/lint-imports" --no-cache --no-logo
check 'tests (pytest)' "$VENV/bin/python" -m pytest -q -n "${TEST_WORKERS:-2}" --durations=10 "$@"

if (( ${#FAILED[@]} )); then
    say "FAILED: $(IFS=,; echo "${FAILED[*]}")"
    exit 1
fi
say 'all checks passed'
