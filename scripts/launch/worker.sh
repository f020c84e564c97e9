#!/usr/bin/env bash
# One host of a slice; tpu_vm.sh calls it over ssh. The command outlives the connection, and keeps its log, process id
# and exit code in $RUN_DIR (~/remixer_t5x_run).
#
#   worker.sh install EXTRAS          makes .venv with the package and these extras, and a Python if there is none
#   worker.sh start -- ARGUMENTS      starts `remixer-t5x ARGUMENTS`, unless one is running
#   worker.sh follow                  prints the log until the command ends
#   worker.sh status                  one line: `running`, `exited CODE` or `absent`
#   worker.sh stop                    SIGTERM: the run saves its state and ends; after $STOP_SECONDS (300) it is killed
set -euo pipefail
cd "$(dirname "$0")/../.."

RUN_DIR="${RUN_DIR:-$HOME/remixer_t5x_run}"
PYTHON_TO_GET=3.12

install() {
    source scripts/environment.sh
    if [[ ! -x "$VENV/bin/python" ]] && ! find_python > /dev/null 2>&1; then
        # The images of TPU VMs have Python 3.10.
        python3 -m pip install --quiet --user uv
        python3 -m uv venv --quiet --seed --python "$PYTHON_TO_GET" "$VENV"
    fi
    prepare_environment "$1"
}

# A process of that number that is another program, after a reboot, is not ours.
running() {
    local pid
    pid="$(cat "$RUN_DIR/pid" 2> /dev/null)" || return 1
    [[ ! -e "$RUN_DIR/exit_code" ]] && tr '\0' ' ' < "/proc/$pid/cmdline" 2> /dev/null | grep -q 'worker.sh attend'
}

start() {
    if running; then
        echo 'running already'
        return
    fi
    mkdir -p "$RUN_DIR"
    rm -f "$RUN_DIR/exit_code"
    printf '%s\n' "== $(date -u +%FT%TZ) remixer-t5x $*" >> "$RUN_DIR/log"
    setsid nohup bash scripts/launch/worker.sh attend -- "$@" >> "$RUN_DIR/log" 2>&1 < /dev/null &
    echo $! > "$RUN_DIR/pid"
    echo "started, process $!"
}

# What `start` leaves running: the command, whose end it notes. The signal goes to the whole process group.
attend() {
    local code=0
    trap : TERM
    "${REMIXER_T5X:-${VENV:-.venv}/bin/remixer-t5x}" "$@" || code=$?
    echo "$code" > "$RUN_DIR/exit_code"
}

follow() {
    [[ -e "$RUN_DIR/pid" ]] || return 0
    tail -n "${LINES_BEFORE:-20}" --pid="$(cat "$RUN_DIR/pid")" -F "$RUN_DIR/log"
}

status() {
    if running; then
        echo 'running'
    elif [[ -e "$RUN_DIR/exit_code" ]]; then
        echo "exited $(cat "$RUN_DIR/exit_code")"
    elif [[ -e "$RUN_DIR/pid" ]]; then
        # Killed together with what should have noted its end.
        echo 'exited 137'
    else
        echo 'absent'
    fi
}

stop() {
    local end=$((SECONDS + ${STOP_SECONDS:-300})) group
    running || return 0
    group="-$(cat "$RUN_DIR/pid")"
    kill -TERM -- "$group"
    while running && (( SECONDS < end )); do sleep 1; done
    if running; then kill -KILL -- "$group"; fi
}

action="${1:-}"
shift || true
[[ "${1:-}" == '--' ]] && shift
case "$action" in
    install | start | attend | follow | status | stop) "$action" "$@" ;;
    *)
        echo "error: worker.sh got '$action'; type install, start, follow, status or stop" >&2
        exit 2
        ;;
esac
