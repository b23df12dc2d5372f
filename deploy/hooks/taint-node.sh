#!/bin/sh
# Taints this node if the verdict names a hardware fault of it (action restart_elsewhere). It is off: a taint takes the
# node from all users. The argument `on` switches it on:
#     on_hung = ["/hooks/taint-node.sh", "off"]
# Not more than 3 nodes (second argument) have the taint at a time. Pods on the node continue to run, and new pods go
# elsewhere. After the repair: kubectl taint node NODE hangwatch/fault-
# Needs kubectl in the image, and the rights of kubernetes/rights.yaml.
set -eu
switch=${1:-off} most=${2:-3} node=${NODE_NAME:-$HANGWATCH_NODE}
case $switch:,${HANGWATCH_EXCLUDE_NODES:-}, in
  on:*",$HANGWATCH_NODE,"*) ;;
  on:*) echo "no hardware fault of $HANGWATCH_NODE is known: not tainted" && exit ;;
  *) echo "taint-node.sh is off: $HANGWATCH_NODE is not tainted" && exit ;;
esac
tainted=$(kubectl get nodes --output 'jsonpath={range .items[*]}{.metadata.name}:{.spec.taints[*].key}{"\n"}{end}')
number=$(echo "$tainted" | grep -v "^$node:" | grep -cw hangwatch/fault) || true
if [ "$number" -ge "$most" ]; then
  echo "$node is not tainted: $number other nodes are (limit: $most)"
  exit 1
fi
exec kubectl taint node "$node" --overwrite "hangwatch/fault=$HANGWATCH_KIND:NoSchedule"
