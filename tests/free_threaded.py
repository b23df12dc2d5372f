"""Check that pystack's engine reads the stacks of a free-threaded Python, which py-spy cannot read.

usage: python -m tests.free_threaded PYTHON

Start a Python with a second thread, capture it as a rank, and print both stacks. Exit with 1 if a stack is missing.
The test suite does not run this script: CI cannot install a free-threaded Python from a distribution package.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from hangwatch import config
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import capture
from hangwatch.jobs import discovery
from hangwatch.probes.process.process_scan import ProcessScan
from tests.conftest import wait_for

PROGRAM = """
import sys, threading, time
def beside():
    time.sleep(600)
threading.Thread(target=beside, daemon=True).start()
def asleep():
    print(sys.version, "GIL" if sys._is_gil_enabled() else "no GIL", flush=True)
    open(sys.argv[1], "w").close()
    time.sleep(600)
asleep()
"""


def main(python: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        program, ready = Path(folder, "train.py"), Path(folder, "ready")
        program.write_text(PROGRAM)
        child = subprocess.Popen([python, program, ready])
        try:
            wait_for(ready.exists, "the interpreter")
            job = discovery.job_of_pids(ProcessScan().processes([child.pid]), [child.pid])
            request = CaptureRequest(settings=config.Capture(rounds=1), node="here")
            (dump,) = capture(job, request).ranks[0].rounds
        finally:
            child.kill()
            child.wait()
    for thread in dump.threads:
        print(" < ".join(map(str, thread.frames)))
    print(f"{dump.duration_seconds:.2f} s, state {dump.state_after} afterwards, {dump.fault}")
    found = {thread.frames[0].function for thread in dump.threads if thread.frames}
    return 0 if found == {"asleep", "beside"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
