#!/bin/sh
# Requeues a Slurm job that hangs, if the verdict recommends a restart, and excludes the nodes that have a fault:
#     on_hung = ["/etc/hangwatch/hooks/requeue-slurm.sh", "/shared/hangwatch/requeued"]
# Further arguments: `any` requeues every job that hangs, unless the action is `wait` (default: `recommended`); then the
# most requeues of one job (1), and of all jobs in a day (10). Each node of a job calls this script: the first requeues.
# Needs the user hangwatch as an operator of Slurm, jobs submitted with --requeue, and a folder that all nodes share and
# in which only hangwatch may write. Entries in it that are older than a month may be removed.
set -eu
export TZ=UTC # times are part of names
claims=$1 which=${2:-recommended} per_job=${3:-1} per_day=${4:-10}
action=${HANGWATCH_ACTION:-investigate} exclude=${HANGWATCH_EXCLUDE_NODES:-}
# From the control group. That of Slurm 26.05 has no number: then it is from the environment, and the user is compared.
job=${HANGWATCH_SLURM_JOB:-}
stop() { # STATUS MESSAGE
  echo "$2"
  exit "$1"
}
take() { # mkdir is atomic, over NFS, too: only one node takes a claim
  mkdir "$claims/$1" 2>/dev/null || { [ -d "$claims/$1" ] && return 1; } || stop 1 "$claims/$1: cannot be made"
}
[ -n "$job" ] || stop 0 "not a Slurm job by its control group: nothing to requeue"
case $which:$action in
  recommended:restart | recommended:restart_elsewhere) ;;
  recommended:* | any:wait) stop 0 "the recommended action is $action: job $job is not requeued" ;;
  any:*) ;;
  *) stop 1 "$which: must be recommended or any" ;;
esac
case $per_job:$per_day in *[!0-9:]* | :* | *:) stop 1 "$per_job, $per_day: must be whole numbers" ;; esac
[ -w "$claims" ] || stop 1 "$claims: is not a folder that this user may write"

# Without the name and the comment, which the owner chooses. An array has one line for each task. %i of a task is 7_2:
# the last task has the number of its array, and with that number, scontrol would requeue all tasks.
found=$(squeue --noheader --noconvert --jobs="$job" --format='%A|%i|%T|%S|%P|%D|%x|%n|%U')
IFS='|' read -r _ name state start partition nodes excluded required user <<LINE
$(echo "$found" | grep "^$job|")
LINE
[ "$HANGWATCH_OWNER" = "Slurm job $job" ] || [ "$user" = "${HANGWATCH_OWNER_UID:-}" ] || stop 1 "job $job is of uid $user"
[ "$state" = RUNNING ] || stop 0 "job $job is ${state:-gone}: nothing to requeue"
if [ -n "$exclude" ]; then
  excluded=$exclude${excluded:+,$excluded}
  names=$(scontrol show hostnames "$excluded")
  remaining=$(sinfo --noheader --Node --partition="$partition" --format=%N | sort -u | grep -vxFc "$names") || true
  # Otherwise a job that needs every node, or has asked for this node, would wait for ever.
  if [ "$remaining" -lt "$nodes" ] || scontrol show hostnames "$required" 2>/dev/null | grep -qxF "$names"; then
    echo "job $job cannot run without $exclude, and may start there again: drain $exclude"
    exclude=
  fi
fi
[ ! -d "$claims/$job.$start" ] || stop 0 "another node has requeued job $job"
[ "$(find "$claims" -name "$job.*" | wc -l)" -lt "$per_job" ] || stop 0 "job $job is not requeued again: limit $per_job"
take "$job.$start" || stop 0 "another node has requeued job $job"
day=day-$(date +%Y-%m-%d) number=1
until take "$day.$number"; do
  number=$((number + 1))
  [ "$number" -le "$per_day" ] || { rmdir "$claims/$job.$start"; stop 1 "job $job is not requeued: limit $per_day a day"; }
done
# Slurm refuses a job without --requeue, and a user that is no operator.
scontrol requeue "$name" || { rmdir "$claims/$job.$start" "$claims/$day.$number"; stop 1 "job $job is not requeued"; }
echo "requeued job $name${exclude:+ without $exclude}"
# Slurm starts a requeued job after 2 minutes (cred_expire). Without a hold, no failure here can leave the job held.
[ -z "$exclude" ] || scontrol update JobId="$name" ExcNodeList="$excluded" || stop 1 "job $name may start there again"
