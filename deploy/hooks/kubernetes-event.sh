#!/bin/sh
# Writes the verdict as an Event of the pods of a job on this node, or of the node if the job is not in a pod:
#     on_hung    = ["/hooks/kubernetes-event.sh"]
#     on_stalled = ["/hooks/kubernetes-event.sh"]
#     on_crashed = ["/hooks/kubernetes-event.sh"]
# `kubectl describe pod` shows it to the owner of the job. Needs kubectl in the image, and the rights of
# kubernetes/rights.yaml.
set -eu
pods=${HANGWATCH_PODS:-} node=${NODE_NAME:-$HANGWATCH_NODE}
event() { # KIND NAMESPACE NAME UID
  now=$(date -u +%Y-%m-%dT%H:%M:%SZ)
  # These variables hold no quote, backslash or line break.
  kubectl create --raw "/api/v1/namespaces/${2:-default}/events" --filename - >/dev/null <<JSON
{
  "apiVersion": "v1",
  "kind": "Event",
  "metadata": {"generateName": "hangwatch-", "namespace": "${2:-default}"},
  "involvedObject": {"apiVersion": "v1", "kind": "$1", "namespace": "$2", "name": "$3", "uid": "$4"},
  "type": "Warning",
  "reason": "$HANGWATCH_KIND",
  "message": "job $HANGWATCH_STATE on $node; recommended action: $HANGWATCH_ACTION. $HANGWATCH_MESSAGE",
  "firstTimestamp": "$now",
  "lastTimestamp": "$now",
  "count": 1,
  "source": {"component": "hangwatch", "host": "$node"},
  "reportingComponent": "hangwatch",
  "reportingInstance": "$node"
}
JSON
  echo "event of $1 $3"
}
if [ -z "$pods" ]; then
  event Node "" "$node" "$node" # `kubectl describe node` looks for the name in place of the uid
  exit
fi
# By the uid of the control group. The owner of a job chooses all names.
found=$(kubectl get pods --all-namespaces --field-selector "spec.nodeName=$node" \
  --output 'jsonpath={range .items[*]}{.metadata.uid} {.metadata.namespace} {.metadata.name}{"\n"}{end}')
echo "$found" | while read -r uid namespace name; do
  case ",$pods," in *",$uid,"*) event Pod "$namespace" "$name" "$uid" ;; esac
done
