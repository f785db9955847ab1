"""The stand-in of the tests and the real server answer one conversation in one form, that of the recording."""

from sglang_session import compare, converse
from sglang_standin import StandIn

from sao_gym.loops import on_background
from sao_gym.models import tiny_qwen3


async def test_the_stand_in_answers_as_the_server_did() -> None:
    stand = StandIn(tiny_qwen3(40, 1, 32, heads=2, kv_heads=1, context_length=256))
    await on_background(stand.start())
    try:
        compare(await on_background(converse(stand.url)))
    finally:
        await on_background(stand.die())
