"""The command that installs a package for hangwatch's interpreter. A bare `pip` may belong to another interpreter."""

import os
import sys


def pip_install(requirement: str) -> str:
    """Return the command, such as `sudo /opt/hangwatch/bin/python -m pip install 'py-spy>=0.4.1'`."""
    return f"{'' if os.access(sys.prefix, os.W_OK) else 'sudo '}{sys.executable} -m pip install '{requirement}'"
