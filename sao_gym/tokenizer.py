"""A small byte-level BPE, trained on the text of one environment, for models made from scratch.

Invariants: every text encodes and decodes to itself (256 bytes are in the vocabulary); each ASCII digit is a token
of its own, so that a tiny model copies numbers digit by digit; all else may merge, across words and punctuation, so
that an environment's boilerplate is a few tokens; the same texts give the same vocabulary.

Example:
    >>> tokenizer = train_tokenizer(["What is 1 + 2?", "What is 3 + 4?"], vocab_size=280)
    >>> tokenizer.decode(tokenizer.encode("What is 12?"))
    'What is 12?'
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sao_gym.errors import ConfigError

PAD, END = "<|pad|>", "<|end|>"
SPECIALS = (
    PAD,
    END,
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 512, specials: Sequence[str] = SPECIALS
) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `vocab_size` ids: `specials` first, then 256 bytes, then merges learnt on `texts`.

    Fewer merges are made where the texts repeat too little. Specials inside `texts` are control tokens, not text to
    learn from. Raises ConfigError if the size leaves no room or a special is given twice.
    """
    _check(vocab_size, specials)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    backend.train_from_iterator(_pieces(texts, specials), trainer)
    return _wrap(backend, specials)


def _check(vocab_size: int, specials: Sequence[str]) -> None:
    if len(set(specials)) != len(specials) or not all(specials):
        raise ConfigError(f"specials must be distinct and not empty, got {list(specials)}")
    least = 256 + len(specials)
    if vocab_size < least:
        raise ConfigError(f"vocab_size {vocab_size} is too small: 256 bytes and {len(specials)} specials need {least}")


def _pieces(texts: Iterable[str], specials: Sequence[str]) -> Iterable[str]:
    """The texts cut at specials: what stands between two control tokens is what merges may span."""
    for text in texts:
        pieces = [text]
        for special in sorted(specials, key=len, reverse=True):
            pieces = [part for piece in pieces for part in piece.split(special)]
        yield from (piece for piece in pieces if piece)


def _wrap(backend: Tokenizer, specials: Sequence[str]) -> PreTrainedTokenizerFast:
    roles: dict[str, Any] = {}
    if PAD in specials:
        roles["pad_token"] = PAD
    if END in specials:
        roles["eos_token"] = END
    rest = [special for special in specials if special not in (PAD, END)]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=rest, clean_up_tokenization_spaces=False, **roles
    )
