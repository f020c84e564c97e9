#!/usr/bin/env bash
# Runs `remixer-t5x` on GPU nodes of a Kubernetes cluster or TPU slices of GKE: fills in kubernetes_jobset.yaml and applies
# it with `kubectl`, which must be configured for the cluster.
#
#   scripts/launch/kubernetes.sh --nodes=2 --image=registry/remixer-t5x:gpu -- \
#       train --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/gpu.gin --gin.MODEL_DIR=/data/run
#   scripts/launch/kubernetes.sh --tpu=tpu-v5-lite-podslice --topology=4x4 --slices=2 --spot --image=registry/remixer-t5x:tpu \
#       -- train --gin_file=experiments/t5_1_1_base_c4.gin --gin_file=hardware/tpu.gin --gin.TOPOLOGY='2*v5e:4x4' --gin.MODEL_DIR=gs://bucket/run
#
#   --name=NAME     name of the JobSet (default remixer-t5x)
#   --nodes=N       number of GPU nodes, with one process each (default 2)
#   --gpus=N        GPUs per node (default 8)
#   --tpu=TYPE      use TPU slices; TYPE is the label cloud.google.com/gke-tpu-accelerator of the nodes
#   --topology=AxB  topology of a slice, as in 4x4 or 2x2x4; --chips=N per node (default 4); --slices=N (default 1)
#   --spot          use GKE's Spot nodes, on which a pod has 15 seconds to save a checkpoint
#   --image=IMAGE   image in a registry, built from the Dockerfile
#   --claim=NAME    PersistentVolumeClaim for /data, ReadWriteMany and writable for group 1000 (default remixer-t5x-data; for
#                   a MODEL_DIR in gs://, /data is a folder of the pod)
#   --service_account=NAME   service account of the pods (default `default`), with access to a MODEL_DIR in gs:// (on GKE
#                   through Workload Identity Federation)
#   --dry_run       print the JobSet and the command; DRY_RUN=1 does the same
#
# Logs:   kubectl logs --follow --selector=jobset.sigs.k8s.io/jobset-name=NAME
# Stop:   kubectl delete jobset NAME; the pods save a checkpoint within terminationGracePeriodSeconds
set -euo pipefail
cd "$(dirname "$0")/../.."
source scripts/launch/command_line.sh

name=remixer-t5x nodes=2 gpus=8 tpu='' topology='' chips=4 slices=1 spot='' image='' claim='' account=default
split_arguments "$@"
for option in "${OPTIONS[@]}"; do
    case "$option" in
        --name=*) name="${option#*=}" ;;
        --nodes=*) nodes="${option#*=}" ;;
        --gpus=*) gpus="${option#*=}" ;;
        --tpu=*) tpu="${option#*=}" ;;
        --topology=*) topology="${option#*=}" ;;
        --chips=*) chips="${option#*=}" ;;
        --slices=*) slices="${option#*=}" ;;
        --spot) spot=1 ;;
        --image=*) image="${option#*=}" ;;
        --claim=*) claim="${option#*=}" ;;
        --service_account=*) account="${option#*=}" ;;
        *) fail "$option is not an option of kubernetes.sh; pass --help for a list" ;;
    esac
done
check_number --nodes "$nodes"
check_number --gpus "$gpus"
check_number --chips "$chips"
check_number --slices "$slices"
if [[ -z "$tpu" ]]; then
    # All GPU nodes belong to a single Job, so there are no slices.
    (( slices == 1 )) || fail "--slices=$slices requires --tpu=TYPE; pass --nodes=N for GPU nodes"
else
    [[ "$topology" =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || fail "--tpu=$tpu needs the topology of a slice; pass --topology=4x4"
    nodes=$((${topology//x/*} / chips))
    (( nodes > 0 && nodes * chips == ${topology//x/*} )) || fail "--topology=$topology is not a number of nodes of --chips=$chips"
fi
[[ "${COMMAND[*]}" =~ MODEL_DIR[=\ ][\'\"]?gs:// ]] || claim="${claim:-remixer-t5x-data}"

# Values are written as JSON, which is valid YAML. This shell must not expand variables in the quoted program.
# shellcheck disable=SC2016
fill='
import json, re, sys
name, nodes, gpus, tpu, topology, chips, slices, spot, image, claim, account, *command = sys.argv[1:]
# Kubernetes replaces $$ by $.
command = [word.replace("$", "$$") for word in command]
selector = {"cloud.google.com/gke-spot": "true"} if spot else {}
if tpu:
    # GKE sets the variables with which the processes of TPU slices connect; each slice has exclusive nodes.
    selector |= {"cloud.google.com/gke-tpu-accelerator": tpu, "cloud.google.com/gke-tpu-topology": topology}
    annotations = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
else:
    annotations = {}
    flags = {"coordinator_address": "COORDINATOR", "process_count": "PROCESS_COUNT", "process_index": "PROCESS_INDEX"}
    command += [f"--{flag}=$({variable})" for flag, variable in flags.items()]
data = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
values = {"name": json.dumps(name), "nodes": nodes, "count": json.dumps(nodes), "slices": slices, "image": json.dumps(image),
          "annotations": json.dumps(annotations), "selector": json.dumps(selector), "grace": "15" if spot else "300",
          "limits": "{google.com/tpu: " + chips + "}" if tpu else "{nvidia.com/gpu: " + gpus + "}",
          "args": json.dumps(command), "coordinator": f"{name}-train-0-0.{name}:8476",
          "account": json.dumps(account), "volumes": json.dumps([{"name": "data", **data}, shared_memory])}
for line in open("scripts/launch/kubernetes_jobset.yaml"):
    print(re.sub(r"^( *[\w./]+: ).* # \[(\w+)\]$", lambda found: found[1] + values[found[2]], line.rstrip("\n")))
'

need_command
[[ -n "$image" ]] || fail '--image is required; pass --image=REGISTRY/remixer-t5x:gpu, after docker build and docker push'
jobset="$(python3 -c "$fill" "$name" "$nodes" "$gpus" "$tpu" "$topology" "$chips" "$slices" "$spot" "$image" "$claim" \
    "$account" "${COMMAND[@]}")"
if [[ "$DRY_RUN" == 1 ]]; then
    echo "$jobset"
    echo '+ kubectl apply --filename=- # (the JobSet above)' >&2
else
    kubectl apply --filename=- <<< "$jobset"
fi
