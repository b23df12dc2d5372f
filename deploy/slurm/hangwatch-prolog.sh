#!/bin/sh
# Prolog= of slurm.conf: a node with a critical finding takes no job. Slurm drains the node when this exits non-zero,
# and puts a batch job back into the queue, held unless SchedulerParameters has nohold_on_prolog_fail. Only a finding
# counts: a broken configuration or a missing program drains no node.
# Only checks of the node itself: xid, ranks and network also depend on its jobs, and a node need not be drained because
# a job ran out of memory.
HANGWATCH_CHECK="${HANGWATCH_CHECK:-/opt/hangwatch/bin/hangwatch check --fail-on critical \
    gpu_health nvlink_status fabric pcie infiniband storage shared_memory fd_limit}"

sick=$(timeout 20 $HANGWATCH_CHECK 2>/dev/null | awk '$1 == "CRITICAL" { sub(/:$/, "", $3); print $2 " " $3; exit }')
if [ -n "$sick" ]; then
    logger -t hangwatch-prolog "job ${SLURM_JOB_ID:-?} refused: $sick" 2>/dev/null
    exit 1
fi
exit 0
