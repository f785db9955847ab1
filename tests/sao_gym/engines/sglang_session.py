"""One fixed conversation with an SGLang server, and the form of what it answers.

`python tests/sao_gym/engines/sglang_session.py URL > tests/sao_gym/engines/sglang_recording.json` records the real
server (a Qwen3 of 40 or more tokens, started as docs/engines.md says). The stand-in of the tests must answer in the
same form, and so must the next version of the server.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

from sao_gym.engines.sglang_request import generate_body, score_body
from sao_gym.engines.sglang_server import ServerFacts
from sao_gym.protocols import Sampling

IDS = list(range(1, 12))
RECORDING = Path(__file__).with_name("sglang_recording.json")


async def converse(url: str) -> list[dict[str, Any]]:
    """(call, status, form of the answer) of each call, in order."""
    short = generate_body("a" * 32, IDS, Sampling(max_tokens=4, seed=1), 4, salt="x", routed_experts=False)
    long = generate_body("b" * 32, IDS, Sampling(max_tokens=140, seed=1), 140, salt="x", routed_experts=False)
    greedy = generate_body("c" * 32, IDS, Sampling(max_tokens=2, temperature=0.0), 2, salt="x", routed_experts=False)
    tensors = {"serialized_named_tensors": ["gASVAg=="], "flush_cache": False, "weight_version": "v"}
    calls: list[tuple[str, str, Any]] = [
        ("facts", "/server_info", None),
        ("ready", "/ready", None),
        ("generate", "/generate", short),
        ("greedy", "/generate", greedy),
        ("score", "/generate", score_body("d" * 32, IDS, 1.0, "x")),
        ("stream", "/generate", long),
        ("too long", "/generate", short | {"sampling_params": short["sampling_params"] | {"max_new_tokens": 10**6}}),
        ("update outside of a session", "/update_weights_from_tensor", tensors),
        ("pause", "/pause_generation", {"mode": "retract"}),
        ("begin", "/begin_weight_update", {}),
        ("begin twice", "/begin_weight_update", {}),
        ("end", "/end_weight_update", {}),
        ("end twice", "/end_weight_update", {}),
        ("no weights on the disk", "/update_weights_from_disk", {"model_path": "/nowhere", "flush_cache": False}),
        ("flush", "/flush_cache", {}),
        ("checksums", "/weights_checker", {"action": "checksum"}),
        ("continue", "/continue_generation", {}),
        ("abort of nothing", "/abort_request", {"rid": "e" * 32}),
    ]
    records = []
    async with aiohttp.ClientSession(trust_env=False) as session:
        for name, path, body in calls:
            request = session.get(url + path) if body is None else session.post(url + path, json=body)
            async with request as response:
                data = await response.read()
                records.append({"call": name, "status": response.status, "answer": form(_read(name, data))})
    return records


def _read(name: str, data: bytes) -> Any:
    if name == "facts":
        return {key: value for key, value in json.loads(data).items() if key in ServerFacts.__struct_fields__}
    if name == "stream":
        events = [event[6:] for event in data.split(b"\n\n") if event.startswith(b"data: {")]
        chunks = [json.loads(event) for event in events]
        sizes = [[len(c["output_ids"]), len(c["meta_info"]["output_token_logprobs"])] for c in chunks]
        return {
            "first": chunks[0],
            "last": chunks[-1],
            "sizes": json.dumps(sizes),
            "ends": data.endswith(b"[DONE]\n\n"),
        }
    try:
        return json.loads(data)
    except ValueError:
        return data.decode()


def form(value: Any) -> Any:
    """Keys and types in place of values; of a list the form of its first element."""
    if isinstance(value, dict):
        if value and all(isinstance(one, str) and len(one) == 16 for one in value.values()):
            return {"*": "checksum"}
        return {key: form(one) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Where `found` has a key or a type that `expected` has not. An empty list or a null says nothing."""
    if isinstance(found, dict) and isinstance(expected, dict):
        missing = [f"{where}.{key} is not in the recording" for key in found if key not in expected]
        shared = [
            d for key in found if key in expected for d in differences(expected[key], found[key], f"{where}.{key}")
        ]
        return missing + shared
    if isinstance(found, list) and isinstance(expected, list):
        return differences(expected[0], found[0], f"{where}[]") if found and expected else []
    if "NoneType" in (found, expected) or found == expected:
        return []
    return [f"{where} is {found}, was {expected}"]


def compare(found: list[dict[str, Any]]) -> None:
    """Fails where a conversation went otherwise than the recorded one."""
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    assert [one["call"] for one in found] == [one["call"] for one in recorded]
    wrong = []
    for expected, one in zip(recorded, found, strict=True):
        if expected["status"] != one["status"]:
            wrong.append(f"{one['call']}: status {one['status']}, was {expected['status']}")
        wrong += differences(expected["answer"], one["answer"], one["call"])
    assert not wrong


if __name__ == "__main__":
    json.dump(asyncio.run(converse(sys.argv[1].rstrip("/"))), sys.stdout, indent=1)
    print()
