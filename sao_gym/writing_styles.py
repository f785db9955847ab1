"""The four styles of the writing study, and how a policy is asked for one of them.

The words are ours: the paper names the styles and publishes no prompts. Torch-free; environment and task set share it.

Example:
    >>> "cute (" in system_prompt(("academic", "cute", "chuunibyou"))
    True
    >>> "in the style cute" in system_prompt(("academic", "cute"), target="cute")
    True
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sao_gym.errors import ConfigError
from sao_gym.tools import nearest

STYLES: Mapping[str, str] = MappingProxyType(
    {
        "academic": "sober and exact, with terms, qualified claims and connectives, as in a paper",
        "cute": "playful and tender, with little words, exclamations and happy signs",
        "chuunibyou": "grand and dark, as a teenager who believes in secret powers and a fate of his own",
        "classical": "old-fashioned and literary, with the words and turns of centuries ago",
    }
)
PLAIN = "plain"
"""What a text is in that has none of the styles."""
_ASK = (
    "You write for one reader. The reader likes one of these styles best, and does not say which: {styles}. Do what is "
    "asked, in the one style that you think the reader likes best."
)
_TELL = "You write for one reader. Of these styles: {styles}, do what is asked in the style {target}, and in no other."


def system_prompt(candidates: Sequence[str], *, target: str | None = None) -> str:
    """What the policy is told before the request. Without `target` it must find out from what its texts earn."""
    styles = "; ".join(f"{name} ({STYLES[name]})" for name in candidates)
    return _ASK.format(styles=styles) if target is None else _TELL.format(styles=styles, target=target)


def require_style(name: object, where: str) -> str:
    """`name`, if it is one of the styles. Raises ConfigError naming `where` it was given."""
    if not isinstance(name, str) or name not in STYLES:
        raise ConfigError(f"{where}: {name!r} is no style; {nearest(str(name), tuple(STYLES), what='style')}")
    return name
