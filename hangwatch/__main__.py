"""Entry point of `hangwatch` and `python -m hangwatch`."""

import signal

# First, before the slow imports: a Ctrl-C while they run ends the command without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hangwatch.cli import main

if __name__ == "__main__":
    main()
