import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sao_gym.errors import ConfigError
from sao_gym.own_chat import OwnChat
from sao_gym.tokenizer import SPECIALS, train_tokenizer


def episode(a: int, b: int, c: int) -> str:
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(%s)"}}</tool_call><|end|>'
    return (
        f"<|user|>Compute ({a} + {b}) * {c}.<|end|><|assistant|>{call % f'{a} + {b}'}<|tool|>{a + b}<|end|>"
        f"<|assistant|>{call % f'{a + b} * {c}'}<|tool|>{(a + b) * c}<|end|>"
        rf"<|assistant|>\boxed{{{(a + b) * c}}}<|end|>"
    )


TEXTS = [episode(11 + 7 * i % 83, 13 + 5 * i % 79, 12 + 3 * i % 71) for i in range(200)]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=400)


@given(st.text())
def test_every_text_survives(text: str) -> None:
    codec = OwnChat(TOKENIZER).codec
    assert codec.decode(codec.plain(text)) == text


def test_the_same_texts_give_the_same_tokenizer() -> None:
    again = train_tokenizer(TEXTS, vocab_size=400)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()


def test_specials_come_first_and_digits_stand_alone() -> None:
    assert [TOKENIZER.convert_tokens_to_ids(special) for special in SPECIALS] == list(range(len(SPECIALS)))
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|pad|>", "<|end|>")
    tokens = TOKENIZER.tokenize("print(907 + 15)")
    assert [token for token in tokens if any(char.isdigit() for char in token)] == list("90715")


def test_an_episode_of_two_calls_has_about_forty_action_tokens() -> None:
    assistant_turns = TEXTS[3].split("<|assistant|>")[1:]
    sampled = [turn.split("<|end|>")[0] + "<|end|>" for turn in assistant_turns]
    assert len(sampled) == 3
    assert 20 <= sum(len(TOKENIZER.encode(turn)) for turn in sampled) <= 45


def test_it_survives_being_saved(tmp_path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert OwnChat(loaded).stop_token_ids == OwnChat(TOKENIZER).stop_token_ids
    for text in [*TEXTS[:5], "é ∑ \x00 12"]:
        assert loaded.encode(text) == TOKENIZER.encode(text)


def test_no_texts_still_give_bytes() -> None:
    bare = train_tokenizer([], vocab_size=300)
    assert len(bare) == 256 + len(SPECIALS)


def test_bad_sizes_and_specials_are_named() -> None:
    with pytest.raises(ConfigError, match="need 266"):
        train_tokenizer([], vocab_size=265)
    with pytest.raises(ConfigError, match="distinct"):
        train_tokenizer([], specials=("<a>", "<a>"))
