"""Places for episodes that an application will begin: tasks without a prompt, for whoever asks brings his own.

Example:
    >>> places = feedback_places(3)
    >>> [place.id for place in places]
    ['place-0', 'place-1', 'place-2']
"""

from sao_gym.errors import ConfigError
from sao_gym.protocols import Task
from sao_gym.tasks.base import ListTaskSet


def feedback_places(count: int = 4096) -> ListTaskSet:
    """`count` places: as many episodes can be outstanding at once. Raises ConfigError for fewer than one."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"count is how many places there are, a whole number of at least 1; got {count!r}")
    return ListTaskSet("places", (Task(id=f"place-{number}", prompt="") for number in range(count)))
