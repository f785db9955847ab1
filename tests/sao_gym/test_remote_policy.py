"""Which API, and its key: checked before the first request, and never a secret where it would be written down."""

from typing import Any

import pytest

from sao_gym.errors import ConfigError
from sao_gym.protocols import Sampling
from sao_gym.remote_policy import RemotePolicy
from sao_gym.remote_request import Conversation, request_body

BASE = "https://api.example/v1"


def policy(**changes: Any) -> RemotePolicy:
    return RemotePolicy(**{"api_base": BASE, "model": "m", **changes})


@pytest.mark.parametrize(
    ("base", "url"),
    [
        (BASE, f"{BASE}/chat/completions"),
        (f"{BASE}/", f"{BASE}/chat/completions"),
        (f"{BASE}/chat/completions", f"{BASE}/chat/completions"),
        ("http://localhost:8000", "http://localhost:8000/chat/completions"),
        ("https://x/openai?api-version=1", "https://x/openai/chat/completions?api-version=1"),
    ],
)
def test_where_requests_go(base: str, url: str) -> None:
    assert policy(api_base=base).url == url


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"api_base": "localhost:8000/v1"}, "must be a URL"),
        ({"api_base": ""}, "must be a URL"),
        ({"api_base": "ftp://x/v1"}, "must be a URL"),
        ({"api_base": "http://x:99999/v1"}, "must be a URL"),
        ({"api_base": "https://me:secret@x/v1"}, "environment variable"),
        ({"api_base": "https://x/v1?api-key=1"}, "environment variable"),
        ({"model": ""}, "name of a model"),
        ({"key_env": "sk-secret"}, "name of an environment variable"),
        ({"key_env": "gsk_secret1"}, "name of an environment variable"),
        ({"key_env": ""}, "name of an environment variable"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"context_length": 0}, "context_length"),
        ({"omit": ("top_k",)}, "'top_k' is no parameter"),
        ({"extra_body": {"temperature": 1}}, "'temperature'"),
        ({"extra_body": {"stream": True}}, "'stream'"),
        ({"extra_body": {"api-key": "s"}}, "environment variable"),
        ({"extra_body": {"x": float("nan")}}, "JSON"),
        ({"extra_body": {"x": object()}}, "JSON"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        policy(**changes)
    assert "secret" not in str(caught.value)


def test_the_key_comes_from_the_environment() -> None:
    assert policy().key({}) is None
    assert policy().key({"OPENAI_API_KEY": " sk-1\n"}) == "sk-1"
    assert policy(key_env="OTHER").key({"OPENAI_API_KEY": "sk-1", "OTHER": "sk-2"}) == "sk-2"
    with pytest.raises(ConfigError, match="OTHER holds no API key"):
        policy(key_env="OTHER").key({"OPENAI_API_KEY": "sk-1"})
    for wrong in ("sk 1", "sk-é", "a\nb"):
        with pytest.raises(ConfigError, match="cannot be an API key") as caught:
            policy().key({"OPENAI_API_KEY": wrong})
        assert wrong not in str(caught.value)


def test_a_request_holds_what_was_asked_for_and_no_more() -> None:
    talk = Conversation()
    talk.hear([{"role": "user", "content": "?"}])
    body = request_body(policy(), Sampling(max_tokens=9, seed=2**40 + 3), (), talk, None)
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}],
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 3,
    }
    left_out = policy(omit=("temperature", "top_p", "max_tokens", "seed"))
    assert request_body(left_out, Sampling(max_tokens=9), (), talk, 9).keys() == {"model", "messages"}
