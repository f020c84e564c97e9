#!/usr/bin/env bash
# Installs the test requirements into a virtual environment and runs all checks. Fails if any check fails.
#
#   scripts/test.sh                   everything, in .venv
#   scripts/test.sh --quick           lint, types, import directions, one test of each property for each sublayer, and
#                                     one run that trains, saves, resumes and evaluates
#   scripts/test.sh --changed         the tests that changes since the main branch can affect
#   scripts/test.sh --since REV       the tests that changes since a revision can affect
#   scripts/test.sh tests/cli -k gin  everything, with these arguments for pytest
#   scripts/test.sh --random-order-seed 7   files, and the tests of each file, in a random order
#   VENV=/path scripts/test.sh        in another virtual environment, created if missing
#   scripts/test.sh --references      everything, with all reference libraries (gigabytes), in .venv-references with
#                                     Python 3.11; the tests of T5X run if it is on PYTHONPATH (docs/t5x.md)
#   REMIXER_T5X_DATA=/path ...        folder with real data for the tests that require it
#   TEST_WORKERS=4 ...                pytest processes (default: cores + 1, with 4 GB of memory each)
set -euo pipefail
cd "$(dirname "$0")/.."

SELECT=all
REFERENCES=''
CHOSEN=''
SINCE=()
PYTEST=()
while (( $# )); do
    case "$1" in
        --quick) SELECT=quick ;;
        --changed) SELECT=changed ;;
        --references) REFERENCES=1 ;;
        --since)
            if (( $# < 2 )); then echo 'error: --since needs a revision: --since HEAD~1' >&2; exit 2; fi
            SELECT=changed SINCE=(--since "$2")
            shift ;;
        --since=*) SELECT=changed SINCE=(--since "${1#*=}") ;;
        *) PYTEST+=("$1") ;;
    esac
    shift
done

EXTRAS='test,dev,docs'
if [[ -n "$REFERENCES" ]]; then
    EXTRAS+=',forecast,generation,hf,lm-eval'
    VENV="${VENV:-.venv-references}"
    # The lock file for Python 3.11 pins torch.
    PYTHON_MINORS='11'
fi
source scripts/environment.sh
prepare_environment "$EXTRAS"
if [[ -n "$REFERENCES" ]]; then
    # Does not use the lock file, because Beam requires older releases. lm_eval's models import accelerate, and T5X imports
    # the other four packages.
    say 'installing Apache Beam, t5 and what T5X imports'
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        'remixer-t5x[beam]' accelerate fiddle grain tensorboard cached_property
    # t5 requires nightly builds of seqio and TensorFlow Datasets, which would replace the releases.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps t5==0.9.4
fi

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

# If this variable is set, each of about ten processes compiles all modules again, which takes 4 s of CPU time.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$PWD:$PWD/tasks${PYTHONPATH:+:$PYTHONPATH}"
export TF_CPP_MIN_LOG_LEVEL="${TF_CPP_MIN_LOG_LEVEL:-3}"
if [[ -z "${REMIXER_T5X_DATA:-}" ]]; then
    say 'REMIXER_T5X_DATA is not set: tests on real data will be skipped'
fi
case "$SELECT" in
    quick)
        # Only these files are collected, because collecting all others takes longer than the quick tests.
        CHOSEN="$(grep -rl '^@pytest\.mark\.quick' --include='test_*.py' tests)"
        PYTEST+=(-m quick tests/models/sublayers/test_sublayer_contract.py) ;;
    changed)
        say 'tests that the change can affect'
        CHOSEN="$("$VENV/bin/python" scripts/changed_tests.py ${SINCE[@]+"${SINCE[@]}"})" ;;
esac
while IFS= read -r file; do
    if [[ -n "$file" ]]; then PYTEST+=("$file"); fi
done <<< "$CHOSEN"

# One process more than cores is used, because tests wait for disks and other processes for a fifth of the time.
workers() {
    local cores memory
    cores="$(nproc 2>/dev/null || echo 1)"
    memory="$(awk '/^MemAvailable:/ { print int($2 / 4194304) }' /proc/meminfo 2>/dev/null || echo 2)"
    echo $(( memory < 1 ? 1 : memory <= cores ? memory : cores + 1 ))
}

check 'lint (ruff)' "$VENV/bin/ruff" check .
check 'format (ruff)' "$VENV/bin/ruff" format --check .
check 'types (mypy)' "$VENV/bin/mypy"
check 'import directions (import-linter)' "$VENV/bin/lint-imports" --no-cache --no-logo
if [[ "$SELECT" == changed && -z "$CHOSEN" ]]; then
    say 'no test depends on a changed file: no tests were run'
else
    # A crashed worker ends the run, because the file scheduler of pytest-xdist 3.8 hangs after replacing a worker.
    check 'tests (pytest)' "$VENV/bin/python" -m pytest -q -n "${TEST_WORKERS:-$(workers)}" --max-worker-restart=0 --durations=10 ${PYTEST[@]+"${PYTEST[@]}"}
fi

say "finished in $SECONDS s"
if (( ${#FAILED[@]} )); then
    say "FAILED: $(IFS=,; echo "${FAILED[*]}")"
    exit 1
fi
say 'all checks passed'
