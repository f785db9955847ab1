"""What an SGLang server is asked. Every sampling key is said, so that no default of a server or checkpoint counts."""

import math
from typing import Any

import numpy as np

from sao_gym.errors import EngineError
from sao_gym.protocols import Sampling
from sao_gym.stream import Ids

MIN_TEMPERATURE = 1e-6
"""Less is greedy to the server; 0 says so."""
STREAM_FROM = 64
"""Longer answers are streamed, so that a lost connection loses little."""
STREAM_INTERVAL = 32


def checked_ids(token_ids: Ids, vocab_size: int) -> list[int]:
    """The prompt as a list. Raises EngineError for what no model could read."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise EngineError(f"token ids must be a non-empty row of integers, got shape {array.shape}")
    if array.min() < 0 or array.max() >= vocab_size:
        raise EngineError(
            f"token ids go from {array.min()} to {array.max()}, the model knows 0 to {vocab_size - 1}; prompt and model "
            "have different tokenizers"
        )
    return list(map(int, array.tolist()))


def check_sampling(sampling: Sampling) -> None:
    """Raises EngineError for what cannot be sampled, or whose log-probs the server would not tell."""
    if sampling.max_tokens < 1:
        raise EngineError(f"cannot sample with {sampling}: max_tokens >= 1")
    if sampling.temperature != 0.0 and not is_temperature(sampling.temperature):
        raise EngineError(f"cannot sample at temperature {sampling.temperature}: 0, or {MIN_TEMPERATURE:g} and more")
    if sampling.temperature != 0.0 and (sampling.top_p != 1.0 or sampling.top_k != 0):
        raise EngineError(
            f"top_p = {sampling.top_p}, top_k = {sampling.top_k}: an SGLang server tells the log-probs of the whole "
            "distribution, not of the truncated one; sample with top_p 1 and top_k 0"
        )


def is_temperature(value: float) -> bool:
    """Whether logits can be divided by it."""
    return MIN_TEMPERATURE <= value < math.inf


def generate_body(
    rid: str, ids: list[int], sampling: Sampling, limit: int, *, salt: str, routed_experts: bool
) -> dict[str, Any]:
    """The request for at most `limit` tokens after `ids`. `salt` keeps the prefixes of one policy version apart."""
    is_greedy = sampling.temperature == 0.0
    is_streamed = limit > STREAM_FROM
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": salt,
        "stream": is_streamed,
        "sampling_params": {
            "max_new_tokens": limit,
            "min_new_tokens": 0,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": 1 if is_greedy else -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": list(sampling.stop_token_ids),
            "sampling_seed": sampling.seed,
            "ignore_eos": not sampling.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "n": 1,
        },
    }
    if is_streamed:
        body["sampling_params"]["stream_interval"] = STREAM_INTERVAL
    if routed_experts:
        body["return_routed_experts"] = True
    return body


def score_body(rid: str, ids: list[int], temperature: float, salt: str) -> dict[str, Any]:
    """The request for the log-probs of `ids` themselves."""
    return {
        "rid": rid,
        "input_ids": ids,
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": salt,
        "sampling_params": {"max_new_tokens": 0, "temperature": temperature, "top_p": 1.0, "top_k": -1},
    }
