r"""Markup that is safe by construction: text becomes markup in `escape` alone, and everything else builds on it.

Invariant: a `Markup` holds no character of foreign text that was not escaped. Whatever joins strings in another way (+,
f-strings, str.join) makes an ordinary `str`, which is escaped when it is put into a tag: mistakes show, and do no harm.

Example:
    >>> tag("p", "a < b ", tag("b", "\x00</script>"), class_="x")
    '<p class="x">a &lt; b <b>␀&lt;/script&gt;</b></p>'
"""

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "link", "br", "hr", "input"})
"""Elements without an end; those of SVG are not among them, they would swallow what follows."""
# Characters without a picture, and those that reorder the text around them: shown, so that nothing hides.
_ODD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Markup(str):
    """Text that may stand in a page as it is."""

    __slots__ = ()


def escape(text: str) -> Markup:
    r"""Any text as markup that shows it: control characters as their pictures, lone surrogates and such as \uXXXX."""
    return Markup(html.escape(_ODD.sub(_shown, text), quote=True))


def tag(element: str, /, *children: str | float | None, **attributes: str | float | bool | None) -> Markup:
    """An element. Children that are not `Markup` are escaped, None is left out.

    `class_="x"` and `data_value=3` are `class="x"` and `data-value="3"`; True is an attribute alone, None and False none.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if element in VOID:
        return Markup(f"<{element}{opening}>")
    lost = "\n" if element == "pre" else ""  # a parser drops the first line end of a <pre>
    return Markup(f"<{element}{opening}>{lost}{''.join(map(_child, children))}</{element}>")


def join(parts: Iterable[str | float | None]) -> Markup:
    """Parts one after the other, escaped where they are not markup."""
    return Markup("".join(map(_child, parts)))


def _child(child: str | float | None) -> str:
    if isinstance(child, Markup):
        return child
    return "" if child is None else escape(str(child))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _shown(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
