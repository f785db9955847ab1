"""Text to ids with control tokens under control: content never becomes a control id (trap 20).

A tokenizer turns the text of a control token into its id wherever the text came from. Here a control token is what
the *template* writes; the same characters inside a message are ordinary text. `guard` marks them in content before
a template sees it, `encode` keeps what is marked ordinary. One mark stands after the first character of each
dangerous spot, so a template's own tests (`'</think>' in content`) miss it too, and JSON escaping leaves it alone.

Example:
    >>> codec = TextCodec(tokenizer)  # doctest: +SKIP
    >>> codec.encode("<|user|>" + codec.guard("<|end|>") + "<|end|>")  # doctest: +SKIP
    array([2, 31, 95, 72, 81, 71, 95, 33, 1], dtype=int32)
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from sao_gym.errors import ModelError
from sao_gym.stream import Ids

_MARK = "\U0010fffd"
_SURROGATES = re.compile("[\ud800-\udfff]")


class TextCodec:
    """A fast tokenizer together with its list of control tokens."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; chat needs one that the tokenizers library backs"
            )
        self.tokenizer = tokenizer
        self.control = _control_tokens(tokenizer)
        self.control_ids = frozenset(self.control.values())
        self._n_ids = len(tokenizer)
        self._plain = _without_added_tokens(backend)
        self._inside = _without_added_tokens(backend, is_inside=True)
        texts = sorted(self.control, key=len, reverse=True)
        spelled = "|".join(re.escape(text) for text in texts) or r"(?!)"
        self._anywhere = re.compile(f"(?={spelled})")
        self._control_pattern = re.compile(f"({spelled})")

    @classmethod
    def of(cls, tokenizer: Any) -> "TextCodec":
        """`tokenizer` itself if it is a codec already, else a new one."""
        return tokenizer if isinstance(tokenizer, cls) else cls(tokenizer)

    def control_id(self, text: str) -> int | None:
        """Id of the control token spelled `text`, None where the tokenizer has none."""
        return self.control.get(text)

    def guard(self, text: str) -> str:
        """`text` marked so that `encode` makes no control id of it, whatever it spells."""
        doubled = _SURROGATES.sub("\ufffd", text).replace(_MARK, _MARK * 2)
        spots = [match.start() + 1 for match in self._anywhere.finditer(doubled)]
        pieces = [doubled[a:b] for a, b in zip([0, *spots], [*spots, len(doubled)], strict=True)]
        return _MARK.join(pieces)

    def guard_all(self, value: Any) -> Any:
        """`guard` on every string inside JSON-like `value`, keys included."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, Mapping):
            return {self.guard(str(key)): self.guard_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Ids of template text: unmarked control tokens become their ids, all else ordinary ids."""
        if _MARK not in text:
            text = _SURROGATES.sub("\ufffd", text)
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        clean, guarded = _unmark(text)
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(clean):
            if match.start() + 1 in guarded:
                continue
            ids += self._ordinary(clean[start : match.start()], self._inside if start else self._plain)
            ids.append(self.control[match.group()])
            start = match.end()
        return ids + self._ordinary(clean[start:], self._inside if start else self._plain)

    def plain(self, text: str) -> list[int]:
        """Ids of ordinary text as it stands after a control token; no control id, whatever it spells."""
        return self._ordinary(text, self._inside)

    def _ordinary(self, text: str, encoder: Tokenizer) -> list[int]:
        if not text:
            return []
        ids = encoder.encode(_SURROGATES.sub("\ufffd", text), add_special_tokens=False).ids
        if self.control_ids.isdisjoint(ids):
            return list(ids)
        return [i for piece in text for i in encoder.encode(piece, add_special_tokens=False).ids]

    def join(self, parts: Iterable[str | int]) -> Ids:
        """Ids of `parts`: a string is ordinary text, an int an id as it stands. Adjacent strings merge first."""
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
                continue
            ids += [*self.plain(text), part]
            text = ""
        return np.asarray(ids + self.plain(text), dtype=np.int32)

    def decode(self, token_ids: Iterable[int] | Ids) -> str:
        """Text of ids, control tokens spelled out; ids outside the vocabulary are left out."""
        known = [int(i) for i in token_ids if 0 <= int(i) < self._n_ids]
        return str(self.tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _control_tokens(tokenizer: Any) -> dict[str, int]:
    """Added tokens that steer: everything but runs of white space, which some vocabularies add as plain text."""
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    return {text: index for text, index in added.items() if len(text) > 1 and text.strip()}


def _without_added_tokens(backend: Tokenizer, *, is_inside: bool = False) -> Tokenizer:
    """`is_inside`: for text that does not begin a prompt, where some vocabularies put no space in front of it."""
    # `split_special_tokens` is not enough: it spares added tokens that are not flagged special, such as the
    # `<think>` and `<tool_call>` of Qwen3.
    plain = Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = _no_first_space(backend.pre_tokenizer) if is_inside else backend.pre_tokenizer
    return plain


def _no_first_space(pre_tokenizer: Any) -> Any:
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        return pre_tokenizers.Sequence([_no_first_space(part) for part in _parts(pre_tokenizer)])
    if isinstance(pre_tokenizer, pre_tokenizers.Metaspace) and pre_tokenizer.prepend_scheme == "first":
        return pre_tokenizers.Metaspace(pre_tokenizer.replacement, "never", pre_tokenizer.split)
    return pre_tokenizer


def _parts(sequence: Any) -> Iterable[Any]:
    return list(sequence)  # it has no length and no iterator, only positions


def _unmark(text: str) -> tuple[str, frozenset[int]]:
    """Text without marks, and the positions in it where a mark stood. A doubled mark is the character itself."""
    clean: list[str] = []
    guarded: set[int] = set()
    index = 0
    while index < len(text):
        if text[index] != _MARK:
            clean.append(text[index])
            index += 1
        elif text[index : index + 2] == _MARK * 2:
            clean.append(_MARK)
            index += 2
        else:
            guarded.add(len(clean))
            index += 1
    return "".join(clean), frozenset(guarded)
