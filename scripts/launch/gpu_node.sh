#!/usr/bin/env bash
# Installs remixer_t5x into .venv on a machine with 1 to 8 GPUs, and runs `remixer-t5x` in one process on all of them.
#
#   scripts/launch/gpu_node.sh -- train --gin_file=experiments/t5_1_1_base_c4.gin --gin.MODEL_DIR=/data/run
#
#   --gpus=N        use only the first N GPUs (default: all that nvidia-smi lists)
#   --extra=NAME    gpu (CUDA 12, the default) or gpu-cuda13
#   --wheel=FILE    install this wheel of remixer_t5x instead of the checkout
#   --restarts=N    restart after a crash, at most N times (default 3); the run resumes from its last checkpoint
#   --dry_run       print the commands; DRY_RUN=1 does the same
#
# Adds hardware/gpu.gin to the command, unless the command already has a file in hardware/: after the last gin file that
# includes a file in experiments/ or hardware/, or else after the first gin file. Forwards SIGTERM to the run, which saves a
# checkpoint and exits with 143. The exit code is that of the last attempt. Installs into .venv in this checkout. Relative
# paths in the command refer to the current folder.
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
        *) fail "$option is not an option; pass --gpus=N, --extra=NAME, --wheel=FILE, --restarts=N, --dry_run or --help" ;;
    esac
done
[[ "$extra" == gpu || "$extra" == gpu-cuda13 ]] || fail "--extra must be gpu or gpu-cuda13, got $extra; pass --extra=gpu"
check_number --restarts "$restarts" 0
[[ -z "$wheel" || -f "$wheel" ]] || fail "--wheel must be a file, got $wheel; build one with: pip wheel --no-deps ."

count="$(ask "${gpus:-8}" bash -c 'nvidia-smi --list-gpus | wc -l')"
[[ "${gpus:-$count}" =~ ^[1-8]$ ]] || fail "--gpus must be from 1 to 8, got ${gpus:-$count}; pass --gpus=1"
gpus="${gpus:-$count}"
(( gpus <= count )) || fail "--gpus must be at most $count, as nvidia-smi lists, got $gpus; pass --gpus=$count"

# Later gin files override earlier ones: hardware/gpu.gin must override the hardware file that another file includes, but
# not the user's settings. Without gin files, eval and infer read the config.gin of the run.
includes_hardware() {
    grep -qsE "^include .*(experiments|hardware)/" "$1" "$OLDPWD/$1" "configs/$1"
}
position='' hardware='' previous=''
for index in "${!COMMAND[@]}"; do
    word="${COMMAND[index]}"
    if [[ "$word" == --gin_file=* || "$previous" == --gin_file ]]; then
        [[ ! "$word" =~ (^|[=/])hardware/[^/]+\.gin$ ]] || hardware="$word"
        if [[ -z "$position" ]] || includes_hardware "${word#--gin_file=}"; then position=$((index + 1)); fi
    fi
    previous="$word"
done
if [[ -n "$position" && -z "$hardware" ]]; then
    COMMAND=("${COMMAND[@]:0:position}" --gin_file=hardware/gpu.gin "${COMMAND[@]:position}")
fi
CUDA_VISIBLE_DEVICES="$(seq -s, 0 $((gpus - 1)))"
export CUDA_VISIBLE_DEVICES

# Calls the script rather than its function, so that the printed command of a dry run can be executed.
run env VENV="$VENV" scripts/launch/worker.sh install "$extra" ${wheel:+"$wheel"}
program="$VENV/bin/remixer-t5x"
[[ "$program" == /* ]] || program="$PWD/$program"
cd "$OLDPWD"
child='' stopped=''
trap 'stopped=1; [[ -z "$child" ]] || kill -TERM "$child"' TERM INT
for (( attempt = 0; ; attempt++ )); do
    code=0
    if [[ "$DRY_RUN" == 1 ]]; then
        run env "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES" "$program" "${COMMAND[@]}"
    else
        "$program" "${COMMAND[@]}" &
        child=$!
        wait_for "$child" || code=$?
        child=''
    fi
    case "$code" in
        0 | "$USER_ERROR" | 130 | "$TERMINATED") exit "$code" ;;
    esac
    [[ -z "$stopped" ]] && (( attempt < restarts )) || exit "$code"
    say "remixer-t5x ended with $code; start $((attempt + 2)) of $((restarts + 1))"
    # A signal interrupts `wait`, but not `sleep`.
    sleep "${RESTART_SECONDS:-10}" &
    wait "$!" || true
    [[ -z "$stopped" ]] || exit "$code"
done
