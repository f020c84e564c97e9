# Defines `say` and `prepare_environment EXTRAS [WHEEL]` for the other scripts. `prepare_environment` creates the
# virtual environment $VENV and installs the wheel, or by default this checkout, with the extra `train`, EXTRAS and the
# locked versions for the Python of $VENV, unless the environment is up to date.

VENV="${VENV:-.venv}"

say() { printf '\n== %s\n' "$*"; }

# Prints the newest supported Python on PATH or in pyenv. TensorFlow has no wheels for Python 3.14.
find_python() {
    local candidate minor
    local candidates=()
    for minor in ${PYTHON_MINORS:-13 12 11}; do
        candidates+=("python3.$minor" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"3.$minor".*/bin/python)
    done
    candidates+=(python3)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo 'error: no Python 3.11, 3.12 or 3.13 found; install one, or set PYTHON=/path/to/python' >&2
    return 2
}

# Prints the lock file for the Python of $VENV.
lock_file() {
    if "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        echo requirements-py311.lock
    else
        echo requirements.lock
    fi
}

prepare_environment() {
    local extras="train${1:+,$1}" wheel="${2:-}" python stamp wanted lock
    if [[ ! -x "$VENV/bin/python" ]]; then
        python="$(find_python)"
        say "creating the virtual environment $VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
    fi
    lock="$(lock_file)"
    stamp="$VENV/.remixer_t5x_stamp"
    if [[ -n "$wheel" ]]; then
        wanted="$(cat "$wheel" "$lock" <(echo "$extras") | cksum)"
    else
        wanted="$(cat pyproject.toml setup.py "$lock" <(echo "$extras $PWD") | cksum)"
    fi
    # An environment that was installed with these extras before is reused, even if more were added.
    if grep -qxF "$wanted" "$stamp" 2>/dev/null; then
        say "$VENV is up to date"
        return
    fi
    say "installing remixer_t5x[$extras] into $VENV with the versions in $lock (takes minutes the first time)"
    if [[ -n "$wheel" ]]; then
        pip_install "$wheel[$extras]"
        # pip does not replace a package of the same version, although its code may differ.
        pip_install --no-deps --force-reinstall "$wheel"
        # Only the last wheel is installed.
        echo "$wanted" > "$stamp"
    else
        pip_install -e ".[$extras]"
        echo "$wanted" >> "$stamp"
    fi
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$(lock_file)" "$@"
}
