"""Jobs on many nodes: running commands there, collecting the replies, and merging the groups of ranks."""

from typing import Literal, TypeAlias

Via: TypeAlias = Literal["ssh", "pdsh", "srun", "kubectl", "local"]
