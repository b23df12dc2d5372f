#!/usr/bin/env bash
# tool: APScheduler 3.11.0, an interval job; libfaketime 3.0.0 of PyPI sets the clock of the process
# finding: after the wall clock is set back by an hour, a job of every second does not run for an hour, in silence
# last run: 2026-12-01
#
# The scheduler compares wall-clock times, also for intervals. A daemon that watches a node must bring its jobs forward
# after a step, such as the first synchronisation of a node that booted with a wrong clock.
. "$(dirname "$0")/lib.sh"
install apscheduler==3.11.0 libfaketime==3.0.0
cat > "$folder/jobs.py" <<'PY'
import time
from datetime import datetime, timedelta

import libfaketime
from apscheduler.schedulers.background import BackgroundScheduler

runs = []
with libfaketime.fake_time(datetime.now(), only_main_thread=False) as clock:
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.add_job(lambda: runs.append(1), "interval", seconds=1)
    scheduler.start()
    for step, hours in (("before", 0), ("after the step back", -1)):
        clock.tick(timedelta(hours=hours))
        runs.clear()
        for _ in range(5):  # seconds of the machine: monotonic time is not faked
            clock.tick(timedelta(seconds=1))
            time.sleep(1)
        print(f"{step}: {'runs' if runs else 'no run'} in 5 s", flush=True)
PY
eval "$("$folder/venv/bin/python-libfaketime")"
timeout 60 "$python" "$folder/jobs.py" | expect $'before: runs in 5 s\nafter the step back: no run in 5 s'
