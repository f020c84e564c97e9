# shellcheck shell=bash
# Sourced by the launch scripts: `split_arguments "$@"` fills OPTIONS and COMMAND, `run` and `ask` obey DRY_RUN=1.

DRY_RUN="${DRY_RUN:-0}"
# What remixer-t5x exits with: a user's mistake, which starting again does not mend; another process that was lost; and
# SIGTERM, with the state saved.
MISTAKE=2
# shellcheck disable=SC2034 # (read by those who source this)
LOST=75 TERMINATED=143

fail() {
    echo "error: $*" >&2
    exit "$MISTAKE"
}

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
    (( ${#COMMAND[@]} )) || fail "no command given; end with -- and what to run, as in: -- train --gin_file=experiments/quickstart.gin"
}

# Words as bash would read them again.
quoted() {
    local text
    printf -v text '%q ' "$@"
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
