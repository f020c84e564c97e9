#!/usr/bin/env bash
# Creates one or several TPU VM slices, installs this checkout on all hosts, runs the same `remixer-t5x` command on all of
# them, and recreates preempted slices. Requires `gcloud` with credentials.
#
#   scripts/launch/tpu_vm.sh supervise --name=mixer --zone=us-central2-b --type=v4-32 --spot -- \
#       train --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/tpu.gin \
#       --gin.MODEL_DIR=gs://bucket/run
#
# Actions, each of which can be repeated:
#   supervise   performs create to status until the command succeeds; after Ctrl-C the command continues, and the same
#               `supervise` resumes
#   create      creates the slice unless it exists, and waits until it is ready
#   install     builds a wheel, copies it with the files of the checkout, and creates .venv on every host
#   start       starts the command on every host; it continues after the connection is closed
#   logs        follows the log of one host (--worker=0)
#   status      prints the state of the slice, and that of the command on every host
#   stop        sends SIGTERM on every host: the run saves a checkpoint and exits with 143, or is killed after five minutes
#   delete      deletes the slice
#
#   --name=NAME --zone=ZONE --type=TYPE   the slice; TYPE, as in v4-32 or v5litepod-16, is required by `create`
#   --slices=N          number of slices of one run (multi-slice), as one queued resource NAME
#   --version=VERSION   software version of the TPU VM (default: Google's for JAX on that type)
#   --project=PROJECT   default: gcloud's project
#   --queued            request a queued resource NAME, which waits for capacity
#   --spot              use Spot capacity, which is cheaper and can be preempted at any time
#   --wheel=FILE        install this wheel of remixer_t5x instead of building one from the checkout
#   --env=NAME=VALUE    environment variable for the command on every host, repeatable
#   --worker=N          host whose log to follow (default 0, of the first slice)
#   --failures=N        number of failures, except for preemptions, after which `supervise` stops (default 3)
#   --dry_run           print the commands; DRY_RUN=1 does the same
#
# MODEL_DIR must be in gs://, which all hosts can access and which outlives the slice.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/launch/command_line.sh
source scripts/environment.sh

REMOTE_FOLDER=remixer_t5x
POLL_SECONDS="${POLL_SECONDS:-30}"
action="${1:-}"
shift || true
name='' zone='' type='' version='' project='' queued='' spot='' worker=0 failures=3
slices=1 wheel=''
environment=()

read_options() {
    local option
    for option in "${OPTIONS[@]}"; do
        case "$option" in
            --name=*) name="${option#*=}" ;;
            --zone=*) zone="${option#*=}" ;;
            --type=*) type="${option#*=}" ;;
            --version=*) version="${option#*=}" ;;
            --project=*) project="${option#*=}" ;;
            --slices=*) slices="${option#*=}" ;;
            --queued) queued=1 ;;
            --spot) spot=1 ;;
            --wheel=*) wheel="$(given_path "${option#*=}")" ;;
            --env=*=*) environment+=("${option#*=}") ;;
            --worker=*) worker="${option#*=}" ;;
            --failures=*) failures="${option#*=}" ;;
            *) fail "$option is not an option of tpu_vm.sh; pass --help for a list" ;;
        esac
    done
    [[ -n "$name" && -n "$zone" ]] || fail "--name and --zone are required; pass --name=NAME --zone=ZONE"
    check_number --slices "$slices"
    check_number --failures "$failures"
    [[ -z "$wheel" || -f "$wheel" ]] || fail "--wheel=$wheel does not exist; without --wheel, the script builds one"
    where=(--zone="$zone")
    [[ -z "$project" ]] || where+=(--project="$project")
    # gcloud connects to the hosts of several slices through their queued resource.
    hosts=tpu-vm every=(--worker=all) one=(--worker="$worker")
    if (( slices > 1 )); then
        hosts='queued-resources' queued=1
        every+=(--node=all) one+=(--node=0)
    fi
}

# Prints the state of the slice; empty if it does not exist, READY if it can be used.
state() {
    local request
    if (( slices == 1 )); then
        ask "$1" gcloud compute tpus tpu-vm list "${where[@]}" --filter="name~/$name\$" --format='value(state)'
        return
    fi
    request="$(request_state "${1/READY/ACTIVE}")"
    case "$request" in
        ACTIVE) echo READY ;;
        ACCEPTED | WAITING_FOR_RESOURCES | PROVISIONING | CREATING) echo CREATING ;;
        *) echo "$request" ;;
    esac
}

request_state() {
    ask "$1" gcloud compute tpus queued-resources list "${where[@]}" --filter="name~/$name\$" \
        --format='value(state.state)'
}

# on COMMAND HOSTS...: runs a command on hosts over ssh.
on() {
    run gcloud compute tpus "$hosts" ssh "$name" "${where[@]}" "${@:2}" --command="$1"
}

create() {
    [[ -n "$type" ]] || fail "--type is required; pass --type=TYPE, as in --type=v4-32"
    # From https://cloud.google.com/tpu/docs/runtimes.
    [[ -n "$version" ]] || case "$type" in
        v[234]-[0-9]*) version=tpu-ubuntu2204-base ;;
        v5litepod-*) version=v2-alpha-tpuv5-lite ;;
        v5p-*) version=v2-alpha-tpuv5 ;;
        v6e-*) version=v2-alpha-tpuv6e ;;
        *) fail "--type=$type is not v2 to v4, v5litepod, v5p or v6e; pass its software version with --version=VERSION" ;;
    esac
    local current options=("${where[@]}" --accelerator-type="$type")
    current="$(state '')"
    case "$current" in
        READY) return ;;
        '' | CREATING | STARTING | RESTARTING | REPAIRING) ;;
        *)
            # PREEMPTED, TERMINATED or STOPPED: the slice cannot be reused, but its name can.
            echo "$name is $current"
            delete
            current=''
            ;;
    esac
    [[ -z "$spot" ]] || options+=(--spot)
    if [[ -n "$queued" ]]; then
        create_queued "$current" "${options[@]}"
    elif [[ -z "$current" ]]; then
        run gcloud compute tpus tpu-vm create "$name" "${options[@]}" --version="$version" \
            || fail "$name could not be created, see above; --queued waits for capacity"
    fi
    until current="$(state READY)" && [[ "$current" == READY ]]; do
        [[ "$current" =~ ^(|CREATING|STARTING|RESTARTING|REPAIRING)$ ]] || return 1
        sleep "$POLL_SECONDS"
    done
}

# Requests a queued resource, and waits for capacity without a time limit.
create_queued() {
    local current="$1" request nodes=(--node-id="$name")
    (( slices == 1 )) || nodes=(--node-count="$slices")
    shift
    request="$(request_state '')"
    if [[ "$request" =~ ^(FAILED|SUSPENDED|SUSPENDING)$ ]]; then
        delete
        request=''
    fi
    if [[ -z "$request" && -z "$current" ]]; then
        run gcloud compute tpus queued-resources create "$name" "${nodes[@]}" "$@" --runtime-version="$version" \
            || fail "the queued resource $name could not be created, see above"
    fi
    until request="$(request_state ACTIVE)" && [[ "$request" == ACTIVE ]]; do
        [[ "$request" != FAILED ]] || fail "the queued resource $name failed; see: gcloud compute tpus queued-resources describe $name"
        echo "$name: ${request:-not listed yet}"
        sleep "$POLL_SECONDS"
    done
}

install() {
    local folder
    folder="/tmp/remixer_t5x_$name"
    [[ "$DRY_RUN" == 1 ]] || folder="$(mktemp -d)"
    run mkdir -p "$folder"
    if [[ -n "$wheel" ]]; then
        copy_files "$folder"
        run mkdir "$folder/dist"
        run cp "$wheel" "$folder/dist"
    else
        make_wheel "$folder" || fail 'the wheel could not be built, see above; --wheel=FILE installs an existing wheel'
    fi
    run tar --create --gzip --exclude=./build --exclude='./*.egg-info' "--directory=$folder" "--file=$folder.tar.gz" .
    run gcloud compute tpus "$hosts" scp "$folder.tar.gz" "$name:$REMOTE_FOLDER.tar.gz" "${where[@]}" "${every[@]}"
    run rm -rf "$folder" "$folder.tar.gz"
    on "rm -rf $REMOTE_FOLDER/dist && mkdir -p $REMOTE_FOLDER && tar --extract --gzip --file=$REMOTE_FOLDER.tar.gz --directory=$REMOTE_FOLDER && cd $REMOTE_FOLDER && scripts/launch/worker.sh install tpu dist/*.whl" "${every[@]}"
}

start() {
    need_command
    on "$(quoted env "${environment[@]}" "$REMOTE_FOLDER/scripts/launch/worker.sh" start -- "${COMMAND[@]}")" "${every[@]}"
}

logs() {
    on "$REMOTE_FOLDER/scripts/launch/worker.sh follow" "${one[@]}"
}

# Prints one line per host, as in `exited 0`; none for a host that did not respond.
host_states() {
    ask 'exited 0' gcloud compute tpus "$hosts" ssh "$name" "${where[@]}" "${every[@]}" \
        --command="$REMOTE_FOLDER/scripts/launch/worker.sh status" | grep -Ex 'running|absent|exited [0-9]+' || true
}

# Prints `host_states` once all hosts agree on whether the command is running, which takes a while after a failure on one host.
settled_host_states() {
    local states tries
    for (( tries = 0; tries < 10; tries++ )); do
        states="$(host_states)"
        if ! grep -q '^running' <<< "$states" || ! grep -q '^exited' <<< "$states"; then break; fi
        sleep "$POLL_SECONDS"
    done
    echo "$states"
}

status() {
    echo "$name: $(state READY)"
    host_states
}

stop() {
    on "$REMOTE_FOLDER/scripts/launch/worker.sh stop" "${every[@]}"
}

delete() {
    if [[ -n "$queued" ]]; then
        run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
    else
        run gcloud compute tpus tpu-vm delete "$name" "${where[@]}" --quiet
    fi
}

supervise() {
    need_command
    local failed=0 states
    while true; do
        create
        if install && start; then
            # Returns when the command ends or the connection is closed.
            logs || true
        fi
        if [[ "$(state READY)" != READY ]]; then
            echo "$name was preempted"
            sleep "$POLL_SECONDS"
            continue
        fi
        states="$(settled_host_states)"
        case "$(sort -u <<< "$states" | tr '\n' ' ')" in
            'exited 0 ')
                echo "the command has succeeded; the action delete removes $name"
                return
                ;;
            ' ' | 'running ') ;;
            *"exited $USER_ERROR "*) fail 'the command failed with a user error, which the last line of its log describes' ;;
            *)
                if ! grep -qx "exited $TERMINATED" <<< "$states"; then
                    failed=$((failed + 1))
                    echo "the command failed ($failed of $failures): $(tr '\n' ' ' <<< "$states")"
                    (( failed < failures )) || exit 1
                fi
                stop
                ;;
        esac
        sleep "$POLL_SECONDS"
    done
}

case "$action" in
    supervise | create | install | start | logs | status | stop | delete) ;;
    *) fail "tpu_vm.sh got '$action'; use supervise, create, install, start, logs, status, stop, delete or --help" ;;
esac
split_arguments "$@"
read_options
"$action"
