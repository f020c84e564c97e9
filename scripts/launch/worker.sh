#!/usr/bin/env bash
# Installs the package and runs a command on one host. gpu_node.sh calls `install`, and tpu_vm.sh calls all actions on every
# host over ssh. The command continues after the connection is closed. Its log, process id and exit code are in $RUN_DIR
# (~/remixer_t5x_run), which hosts must not share.
#
#   worker.sh install EXTRAS [WHEEL]  installs the wheel (default: this checkout) with these extras into .venv, and Python
#                                     if necessary; does nothing while the command runs
#   worker.sh start -- ARGUMENTS      starts `remixer-t5x ARGUMENTS`, unless it is running
#   worker.sh follow                  prints the log until the command ends
#   worker.sh status                  prints `running`, `exited CODE` or `absent`
#   worker.sh stop                    sends SIGTERM, so that the run saves and exits; kills it after $STOP_SECONDS (300)
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/launch/command_line.sh

RUN_DIR="${RUN_DIR:-$HOME/remixer_t5x_run}"
PYTHON_TO_GET=3.12

install() {
    if running; then
        echo 'running already, not installing'
        return
    fi
    source scripts/environment.sh
    if [[ ! -x "$VENV/bin/python" ]] && ! find_python > /dev/null 2>&1; then
        # The images of TPU VMs have Python 3.10.
        python3 -m pip install --quiet --user uv
        python3 -m uv venv --quiet --seed --python "$PYTHON_TO_GET" "$VENV"
    fi
    prepare_environment "$@"
}

# Checks the command line of the process, because after a reboot the id may be that of another program.
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

# Runs the command in the background and stores its exit code. `stop` and a system shutdown signal the whole process group.
attend() {
    local code=0 child notice
    rm -f "$RUN_DIR/signalled"
    trap 'touch "$RUN_DIR/signalled"' TERM
    "${REMIXER_T5X:-${VENV:-.venv}/bin/remixer-t5x}" "$@" &
    child=$!
    pass_on_preemption "$child" &
    notice=$!
    wait_for "$child" || code=$?
    kill "$notice" 2> /dev/null || true
    echo "$code" > "$RUN_DIR/exit_code"
}

# Google's metadata server reports `preempted` 30 s before a Spot VM ends. Sends SIGTERM unless the system already has,
# because a second SIGTERM would end the run without saving. Returns immediately on machines without such a server.
pass_on_preemption() {
    local answer=''
    until [[ "$answer" == TRUE ]]; do
        answer="$(curl --silent --fail --max-time 90 --header 'Metadata-Flavor: Google' \
            "${METADATA:-http://metadata.google.internal/computeMetadata/v1}/instance/preempted?wait_for_change=true&timeout_sec=60")" || return 0
    done
    sleep "${NOTICE_SECONDS:-3}"
    [[ -e "$RUN_DIR/signalled" ]] || kill -TERM "$1"
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
        # The command and `attend` were both killed.
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
    *) fail "worker.sh got '$action'; use install, start, follow, status, stop or --help" ;;
esac
