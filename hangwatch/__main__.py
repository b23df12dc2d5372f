"""Where the command begins, as `hangwatch` and as `python -m hangwatch`: nothing that takes time stands before."""

import signal

# A Ctrl-C while the rest is imported ends the command as it ends any other program, without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hangwatch.cli import main

if __name__ == "__main__":
    main()
