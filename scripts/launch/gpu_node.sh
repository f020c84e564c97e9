#!/usr/bin/env bash
# One machine with 1 to 8 GPUs, all driven by one process: installs into .venv and runs `remixer-t5x`.
#
#   scripts/launch/gpu_node.sh -- train --gin_file=experiments/t5_1_1_base_c4.gin --gin.MODEL_DIR=/data/run
#
#   --gpus=N        use the first N only (default: all that nvidia-smi lists)
#   --extra=NAME    gpu (CUDA 12, the default) or gpu-cuda13
#   --wheel=FILE    installs this wheel of remixer_t5x instead of the checkout
#   --restarts=N    start again after a crash, at most N times (default 3); the run goes on from its checkpoint
#   --dry_run       print the commands; DRY_RUN=1 does the same
#
# hardware/gpu.gin is added unless the command names a hardware file. SIGTERM is passed on:
# the run saves its state and ends with 143, as remixer-t5x does. Exit code: that of the last start.
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/launch/command_line.sh
source scripts/environment.sh

gpus='' extra=gpu wheel='' restarts=3
split_arguments "$@"
need_command
for option in "${OPTIONS[@]}"; do
    case "$option" in
        --gpus=*) gpus="${option#*=}" ;;
        --extra=*) extra="${option#*=}" ;;
        --wheel=*) wheel="$(given_path "${option#*=}")" ;;
        --restarts=*) restarts="${option#*=}" ;;
        *) fail "$option is not an option; type --gpus=N, --extra=NAME, --wheel=FILE, --restarts=N, --dry_run or --help" ;;
    esac
done
[[ "$extra" == gpu || "$extra" == gpu-cuda13 ]] || fail "--extra=$extra; type --extra=gpu or --extra=gpu-cuda13"
[[ -z "$wheel" || -f "$wheel" ]] || fail "--wheel=$wheel: there is no such file; build one with: pip wheel --no-deps ."
[[ "$restarts" =~ ^[0-9]+$ ]] || fail "--restarts=$restarts; type a number, as in --restarts=3"

found="$(ask "${gpus:-8}" bash -c 'nvidia-smi --list-gpus | wc -l')"
[[ "${gpus:-$found}" =~ ^[1-8]$ ]] || fail "--gpus=${gpus:-$found}; type a number from 1 to 8"
gpus="${gpus:-$found}"
(( gpus <= found )) || fail "--gpus=$gpus, and nvidia-smi lists $found; type --gpus=$found"

if [[ " ${COMMAND[*]}" != *hardware/* ]]; then
    COMMAND+=(--gin_file=hardware/gpu.gin)
fi
CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((gpus - 1)))"
export CUDA_VISIBLE_DEVICES

# A script, and not the function that it calls, so that a line of the dry run can be pasted.
run env VENV="$VENV" scripts/launch/worker.sh install "$extra" ${wheel:+"$wheel"}
child=''
trap '[[ -z "$child" ]] || kill -TERM "$child"' TERM INT
for (( attempt = 0; ; attempt++ )); do
    code=0
    if [[ "$DRY_RUN" == 1 ]]; then
        run env "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES" "$VENV/bin/remixer-t5x" "${COMMAND[@]}"
    else
        "$VENV/bin/remixer-t5x" "${COMMAND[@]}" &
        child=$!
        wait_for "$child" || code=$?
        child=''
    fi
    case "$code" in
        0 | "$MISTAKE" | 130 | "$TERMINATED") exit "$code" ;;
    esac
    (( attempt < restarts )) || exit "$code"
    say "remixer-t5x ended with $code; start $((attempt + 2)) of $((restarts + 1))"
    sleep "${RESTART_SECONDS:-10}"
done
