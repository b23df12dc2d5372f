#!/bin/bash
# Tests install.sh and the service. Runs as a service of the machine that test-in-nspawn.sh boots.
systemd=/given/checkout/deploy/systemd
. /given/checkout/deploy/machine-steps.sh
config=/etc/hangwatch/hangwatch.toml
fake=/var/lib/fake-driver

capability() { local all; all=$(awk '/^CapEff/ {print $2}' "/proc/$(property MainPID)/status"); (((16#$all >> $1) & 1)); }
job_runs() { [ "$(pgrep --count --full --uid trainer 'rank\.py')" = 2 ] && ! ps -o stat= --user trainer | grep -q '^T'; }
# Runs a line of shell with the user, rights and restrictions of the unit.
sandboxed() {
  echo "$1" >/run/sandboxed.sh
  sed -e "s|^ExecStart=.*|ExecStart=/bin/sh -eu /run/sandboxed.sh|; s|^Type=.*|Type=oneshot|; s|^Restart=.*|Restart=no|; /^WatchdogSec/d" \
    /etc/systemd/system/hangwatch.service >/etc/systemd/system/sandboxed.service
  systemctl daemon-reload && systemctl start sandboxed.service 2>/dev/null
}
sandboxed_says() { journalctl --unit=sandboxed --no-pager --output=cat | grep -q -- "$1"; }
hook_printed() { grep -q -x "$1" /var/lib/hangwatch/incidents/*/hooks/on_hung.txt 2>/dev/null; }
# Prints the verdict that user $1 gets over the daemon's socket on the job with process $2.
asks() {
  setpriv --reuid="$1" --regid=65534 --clear-groups /opt/hangwatch/bin/python -c '
import sys
from hangwatch import config
from hangwatch.cli import own_daemon
print(own_daemon.dump(config.Settings(), f"pid={sys.argv[1]}", 1).verdict)' "$2"
}
report() { cat /var/lib/hangwatch/incidents/*/report.txt 2>/dev/null; }
reported() { report | grep -q "$1"; }

# A job of two ranks: rank 0 waits in a collective, rank 1 is stuck reading. Both run an interpreter that only they
# may reach.
start_job() {
  useradd --create-home trainer
  chmod 0700 /home/trainer
  su trainer -c 'python3 -m venv --copies --without-pip ~/venv && mkdir -p ~/job/torch/distributed'
  cat >/home/trainer/job/torch/distributed/distributed_c10d.py <<'PYTHON'
def all_reduce(peer):
    peer.recv(1)
PYTHON
  cat >/home/trainer/job/rank.py <<'PYTHON'
import os, socket, time
from torch.distributed.distributed_c10d import all_reduce
def connect(address):
    if os.environ["RANK"] == "0":
        return socket.create_server(address).accept()[0]
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.1)
def read_shard():
    with open("shard") as shard:  # a FIFO that nobody writes
        shard.read()
def train():
    peer = connect(("127.0.0.1", 29500))  # ranks that nothing connects have nothing to wait for
    all_reduce(peer) if os.environ["RANK"] == "0" else read_shard()
train()
PYTHON
  cat >/home/trainer/job/torchrun <<'PYTHON'
import os, subprocess, sys
shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "nspawn"}
ranks = [
    subprocess.Popen([sys.executable, "rank.py"], env={**os.environ, **shared, "RANK": str(n), "LOCAL_RANK": str(n)})
    for n in (0, 1)
]
print(*(rank.pid for rank in ranks), flush=True)
for rank in ranks:
    rank.wait()
PYTHON
  mkfifo /home/trainer/job/shard
  chown -R trainer: /home/trainer
  chmod -R go= /home/trainer/job
  su trainer -c 'cd ~/job && exec ~/venv/bin/python torchrun' >/tmp/pids &
  within 10 test -s /tmp/pids
}

# Sets the power of both GPUs and the processes that hold them: write_scenario "WATTS [WATTS@TIME]" PID PID
write_scenario() {
  cat >$fake/scenario.new <<TEXT
driver_version 570.86.15
gpus 2
gpu all name NVIDIA H100 80GB HBM3
gpu 0 uuid GPU-00000000-0000-4000-8000-000000000000
gpu 1 uuid GPU-00000001-0000-4000-8000-000000000000
gpu all power_watts $1
gpu all power_limit_watts 700
gpu 0 pids ${2-}
gpu 1 pids ${3-}
TEXT
  chmod 0644 $fake/scenario.new
  mv $fake/scenario.new $fake/scenario
}

systemd-analyze --version | head -1
mkdir -p $fake
cp /given/libnvidia-ml.so.1 $fake
write_scenario 70

echo "--- install"
see "install.sh installs without a network" $systemd/install.sh --wheels /given/wheels --no-start
see "the configuration is left to the administrator" grep -q '^# hangwatch: ' $config
see "a sample lies beside it" grep -q '^\[detector\]' /etc/hangwatch/hangwatch.sample.toml
see "the command is on the path" hangwatch --version
cat >$config <<TOML
[jobs]
discover_seconds = 1.0
[detector]
hold_seconds = 5.0
[capture]
pause_seconds = 0.5
[hooks]
on_hung = ["/etc/hangwatch/hooks/try.sh", "{incident}"]
TOML
# Tests what a hook may do under the unit (shell, pipes, Python, network, unix sockets) and what it may not.
mkdir -p /etc/hangwatch/hooks
cat >/etc/hangwatch/hooks/try.sh <<'SH'
#!/bin/sh
id -un
grep -E '^(CapEff|NoNewPrivs)' /proc/self/status | tr -d '\t'
test -s "$1/incident.json" && echo "incident read"
python3 -c 'import urllib.request; print("port", urllib.request.urlopen("http://127.0.0.1:9836/metrics").status)'
python3 -c 'import socket; socket.socket(socket.AF_UNIX).connect("/run/hangwatch/socket"); print("unix socket")'
touch /tmp/own && echo "own /tmp"
touch /etc/hangwatch/x 2>/dev/null || echo "read-only /etc"
SH
chmod 0755 /etc/hangwatch/hooks/try.sh
# The fake driver, and a watchdog time of 5 s instead of a minute.
mkdir -p /etc/systemd/system/hangwatch.service.d
cat >/etc/systemd/system/hangwatch.service.d/test.conf <<UNIT
[Service]
Environment=LD_LIBRARY_PATH=$fake FAKE_NVML_SCENARIO=$fake/scenario
WatchdogSec=5
UNIT
before=$(sha256sum $config)
see "install.sh again is an upgrade, and starts the service" $systemd/install.sh --wheels /given/wheels
see "the configuration is as it was" test "$before" = "$(sha256sum $config)"
see "the service is enabled" systemctl is-enabled --quiet hangwatch
see "it said READY" systemctl is-active --quiet hangwatch
see "it runs as hangwatch" test "$(ps -o user= -p "$(property MainPID)")" = hangwatch
see "its state folder is its own, and owners of jobs come through it" test "$(stat -c '%U %a' /var/lib/hangwatch)" = "hangwatch 711"
see "/metrics answers" within 10 metric '^hangwatch_build_info'

echo "--- a hung job of another user"
see "a job of user trainer runs" start_job
read -r first second </tmp/pids
write_scenario "600 95@$(($(date +%s) + 12))" "$first" "$second"
see "the daemon sees it at work" within 12 metric '^hangwatch_job_state\{.*state="training"\} 1'
see "and then hung" within 40 metric '^hangwatch_job_state\{.*state="hung"\} 1'
see "the report names the function of rank 1" within 10 reported read_shard
report | sed -n '1,12s/^/          | /p'
see "the hook ran, without a right" within 15 hook_printed 'CapEff:0000000000000000'
for word in 'hangwatch' 'NoNewPrivs:1' 'incident read' 'port 200' 'unix socket' 'own /tmp' 'read-only /etc'; do
  see "the hook: $word" hook_printed "$word"
done
see "the report tells of it" within 15 reported 'hook on_hung (try.sh) ended with status'
see "the job is as it was" job_runs
see "the job's owner has its stacks over the socket" eval 'asks trainer "$second" | grep -q read_shard'
see "and nobody else" eval '! asks nobody "$second" 2>/dev/null | grep -q read_shard'
see "systemctl status tells of the job" within 15 eval 'property StatusText | grep -q "nspawn hung"'
echo "          | $(property StatusText)"
see "the journal knows warnings from the rest" eval 'journalctl --unit=hangwatch --priority=warning --output=cat | grep -q "hung"'
see "no system call was refused by killing" eval '! journalctl --no-pager | grep -q SIGSYS'

echo "--- the sandbox"
read -r first second </tmp/pids
see "a dump that pauses the rank works in it" sandboxed "/opt/hangwatch/bin/py-spy dump --pid $second"
see "and shows where the rank is" within 5 sandboxed_says read_shard
kill -STOP "$first"
see "a rank that was left stopped can be continued" sandboxed "kill -CONT $first"
see "its environment, io and descriptors can be read" sandboxed "cd /proc/$first; cat environ io >/dev/null; ls fd"
see "the kernel's log can be read" sandboxed "dd if=/dev/kmsg bs=8192 count=1 iflag=nonblock of=/dev/null"
see "but no other device" eval ': </dev/loop-control && ! sandboxed ": </dev/loop-control"'
see "the clock can be read" sandboxed \
  "/opt/hangwatch/bin/python -c 'import ctypes; assert ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) >= 0'"
see "but not set" eval '! sandboxed "date --set=12:00"'
see "nothing can be written outside the state folder" \
  sandboxed "for folder in / /etc/hangwatch /home /usr /opt/hangwatch; do ! touch \$folder/x 2>/dev/null || exit 1; done"
see "a folder of its own can" sandboxed "touch /var/lib/hangwatch/x; rm /var/lib/hangwatch/x"
see "the job is as it was" job_runs

see "no check of the daemon lacks a right" eval '! hangwatch status --json | grep -E "PermissionDenied|not permitted"'

echo "--- a daemon that freezes"
frozen=$(property MainPID)
kill -STOP "$frozen"
see "the watchdog notices" within 20 logged 'Watchdog timeout'
see "systemd starts it again" within 40 eval 'is NRestarts 1 && systemctl is-active --quiet hangwatch'
see "it is another process" test "$(property MainPID)" != "$frozen"
see "it serves again" within 10 metric '^hangwatch_build_info'
see "the job is as it was" job_runs

echo "--- kernel stacks, opted in"
see "CAP_SYS_ADMIN is not there by default" eval '! capability 21'
install -D -m 0644 $systemd/kernel-stack.conf /etc/systemd/system/hangwatch.service.d/kernel-stack.conf
systemctl daemon-reload && systemctl restart hangwatch
see "it is there with kernel-stack.conf, beside the others" eval 'capability 21 && capability 19 && capability 2'

echo "--- a stop"
start=$(date +%s%N)
systemctl stop hangwatch
took=$((($(date +%s%N) - start) / 1000000))
see "it stopped within its time, in $took ms" test "$took" -lt 20000
see "by itself, with status 0" is Result success
see "nothing of it is left" eval '! pgrep --uid hangwatch'
see "the job is as it was" job_runs

echo "--- a configuration that cannot be used"
printf '[detector]\nhold = 5\n' >$config
systemctl start hangwatch 2>/dev/null
see "the service fails with status 2" within 10 is ExecMainStatus 2
see "and is not started over and over" is NRestarts 0
see "the journal says which key" logged "unknown key 'hold'"

echo "--- uninstall"
see "install.sh --uninstall" $systemd/install.sh --uninstall
see "program, unit and command are gone" gone /opt/hangwatch /etc/systemd/system/hangwatch.service /usr/local/bin/hangwatch /etc/sysusers.d/hangwatch.conf
see "configuration and incidents are kept" test -e $config -a -d /var/lib/hangwatch/incidents
see "install.sh --uninstall --purge" $systemd/install.sh --uninstall --purge
see "those are gone as well" gone /etc/hangwatch /var/lib/hangwatch /etc/systemd/system/hangwatch.service.d
see "the user is gone" eval '! id hangwatch 2>/dev/null'
finish 0
