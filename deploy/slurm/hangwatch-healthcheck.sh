#!/bin/sh
# HealthCheckProgram= of slurm.conf: drains this node on a critical finding and resumes it from its own drain when it is healthy.
# Slurm itself takes no action, and kills this script after 60 s. A drain with another reason is not changed.
# Only a finding counts: a broken configuration or a missing program neither drains nor resumes.
# Only checks of the node itself: oom, xid, ranks and network also depend on its jobs, and a node need not be drained
# because a job ran out of memory.
HANGWATCH_CHECK="${HANGWATCH_CHECK:-/opt/hangwatch/bin/hangwatch check --fail-on critical \
    gpu_health nvlink_status fabric pcie infiniband storage shared_memory fd_limit}"
SCONTROL="${SCONTROL:-scontrol}"
node="${SLURMD_NODENAME:-$(hostname -s)}"

report=$(timeout 20 $HANGWATCH_CHECK 2>/dev/null)
status=$?
sick=$(printf '%s\n' "$report" | awk '$1 == "CRITICAL" { sub(/:$/, "", $3); print $2 " " $3; exit }')
now=$($SCONTROL --oneliner show node "$node" 2>/dev/null)
case "$now" in
    *Reason=hangwatch:*) ours=yes ;;
    *State=*DRAIN*) exit 0 ;;
    *) ours=no ;;
esac
if [ -n "$sick" ] && [ "$ours" = no ]; then
    $SCONTROL update NodeName="$node" State=DRAIN Reason="hangwatch: $sick"
elif [ -z "$sick" ] && [ -n "$report" ] && [ "$status" -le 1 ] && [ "$ours" = yes ]; then
    # UNKNOWN (for example a driver that does not respond) does not resume a node that this check drained.
    drained_by=${now#*Reason=hangwatch:}
    unknown=$(printf '%s\n' "$report" | awk -v by="$drained_by" 'BEGIN { split(by, word) }
        $1 == "UNKNOWN" { sub(/:$/, "", $2); if ($2 == word[1]) { print $2; exit } }')
    [ -n "$unknown" ] || $SCONTROL update NodeName="$node" State=RESUME
fi
