"""The stand-in of the tests and the real server answer one conversation in one form, that of the recording."""

import json
from pathlib import Path
from typing import Any

from sglang_session import converse, differences
from sglang_standin import StandIn

from sao_gym.loops import on_background
from sao_gym.models import tiny_qwen3

RECORDING = Path(__file__).with_name("sglang_recording.json")


def compare(found: list[dict[str, Any]]) -> None:
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))
    assert [one["call"] for one in found] == [one["call"] for one in recorded]
    wrong = []
    for expected, one in zip(recorded, found, strict=True):
        if expected["status"] != one["status"]:
            wrong.append(f"{one['call']}: status {one['status']}, was {expected['status']}")
        wrong += differences(expected["answer"], one["answer"], one["call"])
    assert not wrong


async def test_the_stand_in_answers_as_the_server_did() -> None:
    stand = StandIn(tiny_qwen3(40, 1, 32, heads=2, kv_heads=1, context_length=256))
    await on_background(stand.start())
    try:
        compare(await on_background(converse(stand.url)))
    finally:
        await on_background(stand.die())
