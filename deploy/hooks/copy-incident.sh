#!/bin/sh
# Copies an incident to a shared folder or, with the AWS client, into an object store, one folder for each node:
#     on_hung  = ["/etc/hangwatch/hooks/copy-incident.sh", "{incident}", "/shared/hangwatch"]
#     on_ended = ["/etc/hangwatch/hooks/copy-incident.sh", "{incident}", "s3://bucket/hangwatch"]
# `hangwatch merge /shared/hangwatch/*/*` makes one report of all nodes. Incidents hold stacks: restrict access to the copy.
set -eu
umask 077
incident=$1 to=$2/$HANGWATCH_NODE/$HANGWATCH_NAME
case $2 in
  /*)
    mkdir -p "$to"
    cp -R -P "$incident/." "$to"
    ;;
  *)
    exec aws s3 cp --recursive --no-follow-symlinks --only-show-errors "$incident" "$to"
    ;;
esac
