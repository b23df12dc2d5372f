"""The recommended action as a sentence. Pure."""

from hangwatch import words
from hangwatch.model import ActionKind, RecommendedAction

_TITLES: dict[ActionKind, str] = {
    "wait": "wait",
    "restart_elsewhere": "restart the job on other nodes",
    "fix_storage": "repair the storage",
    "fix_network": "repair the network",
    "restart": "restart the job",
    "fix_program": "fix the program",
    "investigate": "investigate",
}


def describe_action(action: RecommendedAction) -> str:
    """Return an action with its reason, such as "restart the job: no process serves the store at 10.0.0.1:29500"."""
    title = _TITLES[action.kind]
    if action.exclude_nodes:
        title = f"restart the job without {words.join_words(action.exclude_nodes)}"
    return f"{title}: {action.reason}" if action.reason else title
