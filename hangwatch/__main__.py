"""Entry point of `hangwatch` and `python -m hangwatch`."""

import contextlib
import gc
import os
import signal
import sys

from hangwatch import __version__

# First, before the slow imports: a Ctrl-C while they run ends the command without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command in the arguments of this process and exit. The version is printed without slow imports."""
    if sys.argv[1:] == ["--version"]:
        with contextlib.suppress(OSError):  # the command line reports it
            os.write(1, f"hangwatch, version {__version__}\n".encode())
            sys.exit(0)
    # Imports make many objects and no garbage: collections would take a tenth of their time
    gc.disable()
    from hangwatch.cli import main as run_command

    try:
        run_command()
    except SystemExit as end:  # all output is written: do not free all memory, nor wait for threads that may block
        os._exit(int(end.code or 0))


if __name__ == "__main__":
    main()
