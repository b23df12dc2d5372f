"""The daemon of one node: scheduled tasks, and the actions that follow from them."""

from hangwatch.daemon.wiring import Daemon
