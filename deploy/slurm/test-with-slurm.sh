#!/bin/bash
# Tests the two scripts on a real Slurm of one node on loopback. The prolog refuses a job on a sick node; the health check
# drains and resumes the node. Needs root and: apt-get install slurmctld slurmd slurm-client munge. Not part of the suite.
#
#   deploy/slurm/test-with-slurm.sh [path of hangwatch]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
hangwatch=${1:-$here/../../.venv/bin/hangwatch}
work=$(mktemp -d /tmp/hangwatch-slurm.XXXXXX)
node=$(hostname -s)
pids=()

finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait || true
    rm -rf "$work"
}
trap finish EXIT

mkdir -p "$work"/{state,spool,munge}
chmod 755 "$work"
chmod 700 "$work/munge"
dd if=/dev/urandom of="$work/munge/key" bs=1024 count=1 status=none
chmod 400 "$work/munge/key"
munged --force --foreground --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
    --log-file="$work/munge/log" --seed-file="$work/munge/seed" &
pids+=($!)

# The node is sick while this file names an interface that does not exist.
printf '[checks.network]\ninterfaces = ""\n' > "$work/well.toml"
printf '[checks.network]\ninterfaces = "=nosuch0"\n' > "$work/sick.toml"
cp "$work/well.toml" "$work/hangwatch.toml"
for script in prolog healthcheck; do
    cat > "$work/$script" <<WRAPPER
#!/bin/sh
export SLURM_CONF=$work/slurm.conf HANGWATCH_CHECK="$hangwatch check network --config $work/hangwatch.toml --fail-on critical"
exec $here/hangwatch-$script.sh
WRAPPER
    chmod 755 "$work/$script"
done

cat > "$work/slurm.conf" <<CONF
ClusterName=hangwatch
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmctldPort=26817
SlurmdPort=26818
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
Prolog=$work/prolog
PrologFlags=Alloc
HealthCheckProgram=$work/healthcheck
HealthCheckInterval=2
HealthCheckNodeState=ANY
NodeName=$node NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=main Nodes=$node Default=YES State=UP
CONF
export SLURM_CONF="$work/slurm.conf"
: > "$work/cgroup.conf"
slurmctld -D -f "$SLURM_CONF" >"$work/ctld.out" 2>&1 &
pids+=($!)
slurmd -D -f "$SLURM_CONF" -N "$node" >"$work/d.out" 2>&1 &
pids+=($!)

state() { sinfo --noheader --format '%t %E' 2>/dev/null; }
await() { # what it should look like, for at most 40 s
    for _ in $(seq 80); do
        if state | grep -Eq "$1"; then echo "ok: node is $(state)"; return 0; fi
        sleep 0.5
    done
    echo "FAILED: waited for '$1', node is: $(state)"
    tail -5 "$work"/slurmctld.log "$work"/slurmd.log "$work"/*.out || true
    return 1
}

await '^idle'
srun --immediate=20 true && echo "ok: a job runs on the node while it is well"

cp "$work/sick.toml" "$work/hangwatch.toml"
await '^(drain|drng).*hangwatch: network NoInterface'
cp "$work/well.toml" "$work/hangwatch.toml"
await '^idle'

# Without the health check: the prolog refuses the job, and Slurm drains the node.
sed -i '/^HealthCheck/d' "$SLURM_CONF"
scontrol reconfigure
cp "$work/sick.toml" "$work/hangwatch.toml"
timeout 20 srun --immediate=10 true && { echo "FAILED: a job ran on a sick node"; exit 1; }
await '^(drain|drng).*(Prolog|prolog)'
echo "all went as it should"
