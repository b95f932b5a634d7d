#!/bin/bash
# One process on each host of a TPU slice (Cloud TPU VMs), with all chips of the host:
#
#     gcloud compute tpus tpu-vm scp --zone "$ZONE" --worker=all --recurse . "$TPU:jaxdist"
#     gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command="pip install -e 'jaxdist[all,tpu]'"
#     TPU=my-slice ZONE=us-west4-a deploy/tpu/vm.sh examples/gpt.py --run /mnt/shared/gpt
#
# The ranks find each other as JAX does, by what the metadata server says of the slice. Nobody has run this on one yet.
set -euo pipefail
[ $# -gt 0 ] && [ -n "${TPU:-}" ] && [ -n "${ZONE:-}" ] || { echo "usage: TPU=NAME ZONE=ZONE $0 SCRIPT [ARGS]..." >&2; exit 2; }

# All ranks have to build the same program (Python orders a set of strings anew in each process otherwise), and let in
# whoever knows the secret of the job.
command="cd jaxdist && PYTHONHASHSEED=0 JAXDIST_SECRET=$(openssl rand -hex 32) python3 -u $(printf '%q ' "$@")"
exec gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$command"
