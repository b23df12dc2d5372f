#!/bin/sh
# Requeues the Slurm job that has hung, once, though each of its nodes calls this:
#     on_hung = ["/etc/hangwatch/hooks/requeue-slurm.sh", "/shared/hangwatch/requeued"]
# Needs the user hangwatch as an operator of Slurm, jobs submitted with --requeue, and a folder on a file system that all
# nodes share and in which only hangwatch may write.
set -eu
claims=$1
# From the control group. The environment of a job may contain the number of another user's job.
job=${HANGWATCH_SLURM_JOB:-}
if [ -z "$job" ]; then
  echo "not a Slurm job by its control group: nothing to requeue"
  exit 0
fi
if [ ! -w "$claims" ]; then
  echo "$claims: is not a folder that this user may write"
  exit 1
fi
# Only these two columns: the name and the comment of a job are its owner's text.
found=$(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:20)
# shellcheck disable=SC2086
set -- $found
if [ "${1:-}" != RUNNING ]; then
  echo "job $job is ${1:-gone}: nothing to requeue"
  exit 0
fi
# mkdir is one step, over NFS as well: the first node goes on, the others have nothing to do.
if ! mkdir "$claims/$job.${2:-0}"; then
  echo "another node has requeued job $job"
  exit 0
fi
if ! scontrol requeue "$job"; then
  # Not submitted with --requeue, or this user is not an operator: it was not requeued.
  rmdir "$claims/$job.${2:-0}"
  exit 1
fi
