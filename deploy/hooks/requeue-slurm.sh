#!/bin/sh
# Requeues a Slurm job that hangs. Each of its nodes calls this script; only the first requeues the job:
#     on_hung = ["/etc/hangwatch/hooks/requeue-slurm.sh", "/shared/hangwatch/requeued"]
# Needs the user hangwatch as an operator of Slurm, jobs submitted with --requeue, and a folder on a file system that all
# nodes share and in which only hangwatch may write.
set -eu
claims=$1
# From the control group: the environment of a job may contain the number of another user's job.
job=${HANGWATCH_SLURM_JOB:-}
if [ -z "$job" ]; then
  echo "not a Slurm job by its control group: nothing to requeue"
  exit 0
fi
if [ ! -w "$claims" ]; then
  echo "$claims: is not a folder that this user may write"
  exit 1
fi
# Only these two columns: the owner chooses the name and the comment of a job.
found=$(squeue --noheader --jobs="$job" --Format=State:20,RestartCnt:20)
# shellcheck disable=SC2086
set -- $found
if [ "${1:-}" != RUNNING ]; then
  echo "job $job is ${1:-gone}: nothing to requeue"
  exit 0
fi
# mkdir is atomic, over NFS, too: only the first node continues.
if ! mkdir "$claims/$job.${2:-0}"; then
  echo "another node has requeued job $job"
  exit 0
fi
if ! scontrol requeue "$job"; then
  # Slurm refused: the job was not submitted with --requeue, or this user is not an operator.
  rmdir "$claims/$job.${2:-0}"
  exit 1
fi
