# shellcheck shell=bash
# Sourced by the launch scripts with their arguments, and answers --help. `split_arguments "$@"` sets OPTIONS and COMMAND;
# `run` and `ask` obey DRY_RUN=1.

DRY_RUN="${DRY_RUN:-0}"
# Exit codes of remixer-t5x: a user's mistake, which a restart does not correct; JAX's abort (SIGABRT)
# after another process was lost or did not connect; and SIGTERM, with the state saved.
MISTAKE=2
# shellcheck disable=SC2034 # (read by those who source this)
LOST=134 TERMINATED=143

fail() {
    echo "error: $*" >&2
    exit "$MISTAKE"
}

# A path as it was given, relative to where the script was called from.
given_path() {
    if [[ "$1" == /* ]]; then echo "$1"; else echo "$OLDPWD/$1"; fi
}

# --help before `--` prints the comment at the top of the script.
for word in "$@"; do
    case "$word" in
        --) break ;;
        --help | -h)
            sed -n '2,${/^#\( \|$\)/!q; s/^# \{0,1\}//; p}' "$(given_path "$0")"
            exit
            ;;
    esac
done

# What stands before `--` goes into OPTIONS, what follows is the command line of remixer-t5x and goes into COMMAND.
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
    (( ${#COMMAND[@]} )) || fail "no command given; end with -- and what to run, as in: -- train --gin_file=experiments/python_docs.gin"
}

# Words as bash would read them again, to be pasted.
quoted() {
    local word text=''
    for word in "$@"; do
        [[ "$word" =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word="${word@Q}"
        text+="$word "
    done
    printf '%s' "${text% }"
}

# Runs a command; in a dry run it is printed instead.
run() {
    if [[ "$DRY_RUN" == 1 ]]; then
        echo "+ $(quoted "$@")"
    else
        "$@"
    fi
}

# ask DEFAULT COMMAND...: what the command prints; in a dry run the command goes to stderr and DEFAULT is the answer.
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

# The exit code of a child. A trapped signal ends `wait` early, also just before the child ends: bash is then asked again.
# Asked about a child that has ended, it may have forgotten the code, and says 127 or -1; the code is then that of SIGTERM.
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

# make_wheel FOLDER: the wheel of this checkout, in FOLDER/dist. It is built from a copy of the files that git knows, also
# changed and new ones, because setuptools would add what an older build has left in the checkout. Equal files make an
# equal wheel.
make_wheel() {
    local python
    python="$(find_python)" || return
    copy_files "$1" || return
    run env SOURCE_DATE_EPOCH=315532800 "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps \
        "--wheel-dir=$1/dist" "$1"
}

# copy_files FOLDER: the files that git knows.
copy_files() {
    # The shell is to expand nothing in this program.
    # shellcheck disable=SC2016
    run bash -c 'git ls-files -z --cached --others --exclude-standard --deduplicate | tar --create --null --ignore-failed-read --files-from=- | tar --extract --directory="$1"' bash "$1"
}
