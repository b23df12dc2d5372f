#!/bin/sh
# HealthCheckProgram= of slurm.conf: drains this node on a critical finding and takes back its own drain once it is well.
# Slurm leaves all action to this script, and kills it after 60 s. A drain that somebody else ordered is not touched.
HANGWATCH_CHECK="${HANGWATCH_CHECK:-/opt/hangwatch/bin/hangwatch check --fail-on critical}"
SCONTROL="${SCONTROL:-scontrol}"
node="${SLURMD_NODENAME:-$(hostname -s)}"

report=$(timeout 20 $HANGWATCH_CHECK 2>/dev/null)
sick=$(printf '%s\n' "$report" | awk '$1 == "CRITICAL" { sub(/:$/, "", $3); print $2 " " $3; exit }')
now=$($SCONTROL --oneliner show node "$node" 2>/dev/null)
case "$now" in
    *Reason=hangwatch:*) ours=yes ;;
    *State=*DRAIN*) exit 0 ;;
    *) ours=no ;;
esac
if [ -n "$sick" ] && [ "$ours" = no ]; then
    $SCONTROL update NodeName="$node" State=DRAIN Reason="hangwatch: $sick"
elif [ -z "$sick" ] && [ -n "$report" ] && [ "$ours" = yes ]; then
    $SCONTROL update NodeName="$node" State=RESUME
fi
