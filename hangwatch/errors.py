"""Base classes of errors for users. Other exceptions are bugs of hangwatch."""


class UserError(Exception):
    """Bad input, or a machine that is not set up. The message says what to type. The exit code is 2."""


class TemporaryError(Exception):
    """A temporary failure. The exit code is 75: systemd restarts the daemon after 75, but not after 2."""
