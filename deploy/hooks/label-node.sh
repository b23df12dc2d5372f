#!/bin/sh
# Labels the Kubernetes node of a job that hangs, and removes the label when the job has recovered or ended:
#     on_hung      = ["/hooks/label-node.sh", "{node}", "{job_key}", "{state}"]
#     on_recovered = ["/hooks/label-node.sh", "{node}", "{job_key}", "{state}"]
#     on_ended     = ["/hooks/label-node.sh", "{node}", "{job_key}", "{state}"]
# Needs kubectl in the image, and a ClusterRole that may get and patch nodes.
set -eu
node=${NODE_NAME:-$1} job_key=$2 state=$3
if [ "$state" = hung ]; then
  exec kubectl label node "$node" --overwrite "hangwatch/hung=$job_key"
fi
# The label of another job that hangs on this node stays.
if [ "$(kubectl get node "$node" --output 'jsonpath={.metadata.labels.hangwatch/hung}')" = "$job_key" ]; then
  exec kubectl label node "$node" hangwatch/hung-
fi
