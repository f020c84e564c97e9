#!/usr/bin/env bash
# Runs `remixer-t5x` on several GPU nodes of a Kubernetes cluster: fills in kubernetes_jobset.yaml and applies it.
#
#   scripts/launch/kubernetes.sh --nodes=2 --image=registry/remixer-t5x:gpu -- \
#       train --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/gpus.gin --gin.MODEL_DIR=/data/run
#
#   --name=NAME     of the JobSet (default remixer-t5x)
#   --nodes=N       one process on each (default 2)
#   --gpus=N        of each node (default 8)
#   --image=IMAGE   made with the Dockerfile (default remixer-t5x:gpu)
#   --claim=NAME    PersistentVolumeClaim for /data, ReadWriteMany (default remixer-t5x-data)
#   --dry_run       print the JobSet and the command; DRY_RUN=1 does the same
#
# Logs:   kubectl logs --follow --selector=jobset.sigs.k8s.io/jobset-name=NAME
# Stop:   kubectl delete jobset NAME; the pods save their state within terminationGracePeriodSeconds
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/launch/command_line.sh

name=remixer-t5x nodes=2 gpus=8 image=remixer-t5x:gpu claim=remixer-t5x-data
split_arguments "$@"
need_command
for option in "${OPTIONS[@]}"; do
    case "$option" in
        --name=*) name="${option#*=}" ;;
        --nodes=*) nodes="${option#*=}" ;;
        --gpus=*) gpus="${option#*=}" ;;
        --image=*) image="${option#*=}" ;;
        --claim=*) claim="${option#*=}" ;;
        *) fail "$option is no option; type --name, --nodes, --gpus, --image or --claim with =VALUE, or --dry_run" ;;
    esac
done
[[ "$nodes" =~ ^[1-9][0-9]*$ ]] || fail "--nodes=$nodes; type a number from 1"
[[ "$gpus" =~ ^[1-9][0-9]*$ ]] || fail "--gpus=$gpus; type a number from 1"
[[ "$name" =~ ^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$ ]] || fail "--name=$name; type lower-case letters, digits and -, at most 32"

# JSON is YAML, and Python's standard library writes it. The shell is to expand nothing in this program.
# shellcheck disable=SC2016
fill='
import json, re, sys
name, nodes, gpus, image, claim, *command = sys.argv[1:]
flags = [f"--{flag}=$({variable})" for flag, variable in
         (("coordinator_address", "COORDINATOR"), ("process_count", "PROCESS_COUNT"), ("process_index", "PROCESS_INDEX"))]
# Kubernetes reads $$ as $.
command = [word.replace("$", "$$") for word in command]
values = {"name": name, "nodes": nodes, "count": json.dumps(nodes), "gpus": gpus, "image": json.dumps(image),
          "args": json.dumps([*command, *flags]), "coordinator": f"{name}-train-0-0.{name}:8476",
          "claim": "{claimName: " + claim + "}"}
for line in open("scripts/launch/kubernetes_jobset.yaml"):
    print(re.sub(r"^( *[\w./]+: ).* # \[(\w+)\]$", lambda found: found[1] + values[found[2]], line.rstrip("\n")))
'
jobset="$(python3 -c "$fill" "$name" "$nodes" "$gpus" "$image" "$claim" "${COMMAND[@]}")"
if [[ "$DRY_RUN" == 1 ]]; then
    echo "$jobset"
    echo '+ kubectl apply --filename=- # (the JobSet above)' >&2
else
    kubectl apply --filename=- <<< "$jobset"
fi
