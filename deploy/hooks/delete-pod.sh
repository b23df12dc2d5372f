#!/bin/sh
# Deletes the pod of a rank that hangs, if the verdict recommends a restart. Its PyTorchJob, JobSet or TrainJob makes a
# new pod, if its restart policies are as in the examples in kubernetes/:
#     on_hung = ["/hooks/delete-pod.sh", "hangwatch"]
# Arguments: the namespace for its ConfigMaps; the most jobs in a day (10). The ConfigMaps are its memory: a job is
# restarted once, by one of its nodes. To allow it again: kubectl -n hangwatch delete configmap hangwatch-restart-KEY
# Needs kubectl in the image, and the rights of kubernetes/rights.yaml.
set -eu
memory=$1 per_day=${2:-10}
action=${HANGWATCH_ACTION:-investigate} pods=${HANGWATCH_PODS:-} node=${NODE_NAME:-$HANGWATCH_NODE}
stop() { # STATUS MESSAGE
  echo "$2"
  exit "$1"
}
take() { # the API server creates a name only once, for all nodes
  answer=$(echo "{\"kind\": \"ConfigMap\", \"apiVersion\": \"v1\", \"metadata\": {\"name\": \"$1\"}}" |
    kubectl create --raw "/api/v1/namespaces/$memory/configmaps" --filename - 2>&1) && return
  case $answer in *"already exists"*) return 1 ;; esac
  stop 1 "$answer"
}
case $action in
  restart | restart_elsewhere) ;;
  *) stop 0 "the recommended action is $action: no pod is deleted" ;;
esac
[ -n "$pods" ] || stop 0 "not in a pod by its control group: nothing to delete"

# By the uid of the control group. The owner of a job chooses all names.
found=$(kubectl get pods --all-namespaces --field-selector "spec.nodeName=$node" \
  --output 'jsonpath={range .items[*]}{.metadata.uid} {.metadata.namespace} {.metadata.name}{"\n"}{end}')
found=$(echo "$found" | grep -E "^($(echo "$pods" | tr , '|')) ") || stop 1 "no pod $pods on node $node"

job=hangwatch-restart-$HANGWATCH_JOB_KEY
day=hangwatch-day-$(date -u +%Y-%m-%d) number=1
take "$job" || stop 0 "job $HANGWATCH_JOB_KEY was restarted before: no pod is deleted"
until take "$day-$number"; do
  number=$((number + 1))
  if [ "$number" -gt "$per_day" ]; then
    kubectl --namespace "$memory" delete --wait=false configmap "$job"
    stop 1 "no pod is deleted: limit $per_day a day"
  fi
done
echo "$found" | while read -r uid namespace name; do
  # With its uid: a new pod of the same name is not deleted.
  echo "{\"kind\": \"DeleteOptions\", \"apiVersion\": \"v1\", \"preconditions\": {\"uid\": \"$uid\"}}" |
    kubectl delete --raw "/api/v1/namespaces/$namespace/pods/$name" --filename - >/dev/null || exit 1
  echo "deleted pod $namespace/$name"
done
[ "$action" = restart ] || echo "unless $HANGWATCH_EXCLUDE_NODES is cordoned or tainted, the new pod may start there"
