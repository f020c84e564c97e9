# shellcheck shell=bash
# Sourced by the launch scripts with their arguments. Handles --help; `split_arguments "$@"` sets OPTIONS and COMMAND;
# `run` and `ask` respect DRY_RUN=1.

DRY_RUN="${DRY_RUN:-0}"
# Exit codes of remixer-t5x: 2 for a user error, which a restart does not fix; 134 if JAX aborts (SIGABRT) because
# another process was lost or did not connect; 143 if the run saved a checkpoint after SIGTERM.
USER_ERROR=2
# shellcheck disable=SC2034 # (used by the scripts that source this file)
LOST=134 TERMINATED=143

fail() {
    echo "error: $*" >&2
    exit "$USER_ERROR"
}

# Resolves a path relative to the folder from which the script was called.
given_path() {
    if [[ "$1" == /* ]]; then echo "$1"; else echo "$OLDPWD/$1"; fi
}

# check_number OPTION VALUE [MINIMUM]: fails unless the value is an integer from MINIMUM (default 1) to 999999999, without
# leading zeros.
check_number() {
    local minimum="${3:-1}"
    if [[ ! "$2" =~ ^(0|[1-9][0-9]{0,8})$ ]] || (( $2 < minimum )); then
        fail "$1 must be an integer from $minimum to 999999999, got '$2'; pass $1=$minimum"
    fi
}

# --help before `--` prints the header comment of the script.
for word in "$@"; do
    case "$word" in
        --) break ;;
        --help | -h)
            sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//; p}' "$(given_path "$0")"
            exit
            ;;
    esac
done

# Splits the arguments at `--` into OPTIONS of the script and COMMAND, the arguments of remixer-t5x.
split_arguments() {
    OPTIONS=()
    COMMAND=()
    while (( $# )); do
        if [[ "$1" == '--' ]]; then
            shift
            COMMAND=("$@")
            return
        fi
        if [[ "$1" == '--dry_run' ]]; then
            DRY_RUN=1
        else
            OPTIONS+=("$1")
        fi
        shift
    done
}

need_command() {
    (( ${#COMMAND[@]} )) || fail "a command must follow --, got none; for example, pass -- train --gin_file=experiments/python_docs.gin"
}

# Quotes words for bash.
quoted() {
    local word text=''
    for word in "$@"; do
        [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
        text+="$word "
    done
    printf '%s' "${text% }"
}

# Runs a command, or prints it in a dry run.
run() {
    if [[ "$DRY_RUN" == 1 ]]; then
        echo "+ $(quoted "$@")"
    else
        "$@"
    fi
}

# ask DEFAULT COMMAND...: prints the output of the command; in a dry run, prints DEFAULT, and the command to stderr.
ask() {
    local default="$1"
    shift
    if [[ "$DRY_RUN" == 1 ]]; then
        echo "+ $(quoted "$@")" >&2
        echo "$default"
    else
        "$@"
    fi
}

# Returns the exit code of a child. A trapped signal interrupts `wait`, possibly just before the child ends, so `wait` is
# called again. If it returns 127 or -1, bash no longer knows the exit code, and the code of the signal is returned.
wait_for() {
    local code again=0
    while true; do
        code=0
        wait "$1" || code=$?
        kill -0 "$1" 2> /dev/null || break
    done
    if (( code > 128 )); then
        wait "$1" 2> /dev/null || again=$?
        (( again < 0 || again == 127 )) || code=$again
    fi
    return "$code"
}

# make_wheel FOLDER: builds a reproducible wheel of this checkout in FOLDER/dist, from a copy of the files that git tracks
# or does not ignore, because setuptools would include files of older builds in the checkout.
make_wheel() {
    local python
    python="$(find_python)" || return
    copy_files "$1" || return
    run env SOURCE_DATE_EPOCH=315532800 "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        "--wheel-dir=$1/dist" "$1"
}

# copy_files FOLDER: copies the files that git tracks or does not ignore.
copy_files() {
    # This shell must not expand variables in the quoted program.
    # shellcheck disable=SC2016
    run bash -c 'git ls-files -z --cached --others --exclude-standard --deduplicate | tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory="$1"' bash "$1"
}
