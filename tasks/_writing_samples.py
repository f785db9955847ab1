"""Small texts in the four styles, put together from hand-made parts: what a tiny policy starts from.

They are no models of good writing. Each names the form that was asked for, so that it is about something.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from sao_gym.errors import ConfigError

PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {
        "academic": (
            (
                "This {form} examines the matter in question.",
                "The present {form} considers what was asked.",
                "In what follows, this {form} analyses the subject.",
            ),
            (
                "Furthermore, the evidence suggests a significant effect.",
                "Consequently, several factors must be distinguished.",
                "Moreover, the available data indicate a clear correlation.",
            ),
            (
                "In conclusion, further research is required.",
                "Thus the hypothesis is, to some extent, supported.",
                "It may therefore be argued that the findings are robust.",
            ),
        ),
        "cute": (
            (
                "Yay, a teeny tiny {form} just for you~",
                "Hehe, here comes a fluffy little {form}!",
                "Aww, my sweet wee {form} is ready!",
            ),
            (
                "It is sooo cuddly and warm!",
                "Even the bunnies want to hug it!",
                "Snuggle up close, sweetie!",
            ),
            (
                "Big hugs and kisses! (^_^)",
                "Yummy yummy, nom nom! <3",
                "Bye-bye, little sunshine~ \u2665",
            ),
        ),
        "chuunibyou": (
            (
                "Kukuku, behold the forbidden {form}!",
                "Foolish mortals, this {form} was sealed for ages!",
                "Tremble, for my {form} awakens!",
            ),
            (
                "The dark flame in my right arm stirs.",
                "My cursed eye sees what the abyss hides.",
                "Ancient power surges through my veins.",
            ),
            (
                "Destiny itself shall kneel before me!",
                "The Organization will never stop me!",
                "Soon the world shall know my true name!",
            ),
        ),
        "classical": (
            (
                "Lo, gentle reader, hear thou this {form}.",
                "Hearken, good friend, unto my humble {form}.",
                "'Tis but a {form}, yet I pray thee attend.",
            ),
            (
                "As it was in days of yore, so doth it befall.",
                "The heart hath ne'er known a sweeter hour.",
                "Ere the sun had risen, all was writ.",
            ),
            (
                "Fare thee well, until we meet anon.",
                "Thus endeth my tale; God keep thee.",
                "Mayhap thou wilt forgive thy servant.",
            ),
        ),
    }
)


def sample_text(style: str, form: str, rng: np.random.Generator) -> str:
    """A text of three sentences in `style` that calls itself a `form`. Raises ConfigError for an unknown style."""
    if style not in PARTS:
        raise ConfigError(f"there are no samples in the style {style!r}; styles: {', '.join(PARTS)}")
    return " ".join(str(rng.choice(parts)) for parts in PARTS[style]).format(form=form)
