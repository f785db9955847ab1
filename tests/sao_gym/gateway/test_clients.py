"""Real clients over real sockets: openai's and litellm's. Cases GW-01, GW-03, GW-04, GW-05."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from gateway_world import CHAT, END, SAMPLING, TOOLS, calls, engine_of, episode, said, tool, user

from sao_gym.budgets import Budgets
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import EngineError
from sao_gym.gateway import Gateway, GatewaySettings
from sao_gym.gateway.server import served
from sao_gym.protocols import AGENT_FAILED
from sao_gym.stream import Outcome, StopReason

MESSAGES = [user("hi")]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Counted:
    """The gateway's application, and the requests and answers that went through it."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.paths: list[str] = []
        self.statuses: list[int] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
                self.headers.append(dict(message["headers"]))
            await send(message)

        self.paths.append(scope["path"])
        await self.app(scope, receive, counted)


@asynccontextmanager
async def world(engine: Any, *, settings: GatewaySettings | None = None, **opened: Any) -> AsyncIterator[Any]:
    gateway = Gateway(engine, CHAT, None, settings)
    counted = Counted(gateway.app)
    async with served(counted) as address:
        opened_episode = gateway.open(episode(), **{"sampling": SAMPLING, **opened})
        base_url = address.url + opened_episode.path
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=2) as client:
            yield SimpleNamespace(
                gateway=gateway,
                episode=opened_episode,
                client=client,
                base_url=base_url,
                counted=counted,
                url=address.url,
            )


async def with_litellm(base_url: str, **more: Any) -> Any:
    import litellm

    given = {"model": "openai/policy", "messages": MESSAGES, "api_base": base_url, "api_key": "none", **more}
    return await litellm.acompletion(**given)


# GW-01

LONG = calls('print("' + "x" * 4 + '")')
N_CALL = len(said(LONG))
LIMITS = [
    ({"max_tokens": N_CALL - 10}, True),
    ({"max_tokens": N_CALL - 1}, True),
    ({"max_tokens": N_CALL}, False),
    ({"max_tokens": N_CALL + 1}, False),
    ({"max_completion_tokens": N_CALL - 10}, True),
    ({"max_completion_tokens": N_CALL}, False),
    ({"max_tokens": N_CALL + 5, "max_completion_tokens": N_CALL - 10}, True),
    ({"max_tokens": N_CALL - 10, "max_completion_tokens": N_CALL + 5}, True),
]


@pytest.mark.parametrize(("limits", "is_cut"), LIMITS)
async def test_a_cut_call_is_never_shown_as_whole(limits: dict[str, int], is_cut: bool) -> None:
    """Case GW-01; N_CALL - 1 lacks only the end of the turn."""
    messages: list[Any] = []
    for is_streamed in (False, True):
        async with world(engine_of(LONG, "more")) as at:
            given = {"model": "policy", "messages": MESSAGES, "tools": TOOLS, **limits}
            answer = await at.client.chat.completions.create(**given, stream=is_streamed)
            message, finish = await assembled(answer) if is_streamed else whole(answer)
            assert finish == ("length" if is_cut else "tool_calls")
            assert bool(message.get("tool_calls")) is not is_cut
            messages.append(message)
            if is_cut:
                with pytest.raises(openai.AuthenticationError, match="an answer was cut"):
                    await at.client.chat.completions.create(**given)
            record = await at.episode.close()
            (stream,) = record.streams
            assert stream.actions[-1].stop is (StopReason.LENGTH if is_cut else StopReason.STOP)
            assert record.outcome == (Outcome.truncated("turn_tokens") if is_cut else Outcome.terminated())
    assert messages[0] == messages[1]


def whole(answer: Any) -> tuple[dict[str, Any], str]:
    choice = answer.choices[0]
    return normal(choice.message.model_dump(exclude_none=True)), choice.finish_reason


def normal(message: dict[str, Any]) -> dict[str, Any]:
    found = [
        (call["id"], call["type"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or []
    ]
    reasoning = message.get("reasoning_content") or None
    return {"content": message.get("content") or "", "reasoning": reasoning, "tool_calls": found}


async def assembled(answer: Any) -> tuple[dict[str, Any], str]:
    """As openai's clients are commonly assembled."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = ""
    async for chunk in answer:
        append(message, chunk.model_dump(exclude_none=True))
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
    return normal(message), finish


def append(message: dict[str, Any], chunk: dict[str, Any]) -> None:
    """A naive client: appends by index."""
    for choice in chunk["choices"]:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls") or []:
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": "", "type": "", "function": {"name": "", "arguments": ""}})
            call = message["tool_calls"][part["index"]]
            call["id"] += part.get("id") or ""
            call["type"] += part.get("type") or ""
            for name, value in part["function"].items():
                call["function"][name] += value or ""


# GW-03


KINDS = {400: "BadRequestError", 401: "AuthenticationError"}


async def refused_once(at: Any, status: int, code: str, *, base_url: str | None = None, **more: Any) -> None:
    """Both clients are refused, and neither comes again."""
    base_url = base_url or at.base_url
    before = len(at.counted.paths)
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            await client.chat.completions.create(model="policy", messages=MESSAGES, **more)
    assert raised.value.status_code == status
    assert raised.value.code == code
    assert raised.value.type is not None
    with pytest.raises(openai.APIStatusError) as seen:
        await with_litellm(base_url, max_retries=2, **more)
    assert type(seen.value).__name__ == KINDS[status]
    assert len(at.counted.paths) == before + 2
    assert b"retry-after" not in at.counted.headers[-1]


async def test_what_will_not_pass_is_sent_once() -> None:
    """Case GW-03: budget, closed, wrong secret, malformed."""
    async with world(engine_of("a", "b", "c"), budgets=Budgets(max_turns=3)) as at:
        await refused_once(at, 401, "invalid_api_key", base_url=f"{at.url}/s/wrong/v1")
        await refused_once(at, 400, "invalid_request", max_tokens=-1)
        for _ in range(3):
            await at.client.chat.completions.create(model="policy", messages=MESSAGES)
        await refused_once(at, 401, "budget_exhausted")
        record = await at.episode.close(Outcome.error(AGENT_FAILED))
        assert record.outcome == Outcome.truncated("turns")
        await refused_once(at, 401, "episode_over")
        assert record.info["refusals"] == {"budget_exhausted": 2}


async def test_a_failed_engine_ends_the_episode_at_once() -> None:
    engine = engine_of("a", failures={0: EngineError("gone", kind="engine_down")})
    async with world(engine) as at:
        await refused_once(at, 401, "episode_failed")
        record = await at.episode.close(Outcome.terminated())
        assert record.outcome == Outcome.error("engine_down")
        assert record.streams == ()
        assert len(engine.calls) == 1


async def test_calls_wait_while_weights_are_published() -> None:
    """Case GW-03: held, and answered once."""
    async with world(engine_of("a", "b")) as at:
        async with at.gateway.hold():
            pending = [
                asyncio.ensure_future(at.client.chat.completions.create(model="policy", messages=MESSAGES)),
                asyncio.ensure_future(with_litellm(at.base_url)),
            ]
            while at.gateway._gate.waiting < 2:
                await asyncio.sleep(0.005)
            assert not any(task.done() for task in pending)
        answers = await asyncio.gather(*pending)
        assert sorted(answer.choices[0].message.content for answer in answers) == ["a", "b"]
        assert len(at.counted.paths) == 2


async def test_a_long_publication_asks_to_come_again() -> None:
    """Case GW-03: 429 with Retry-After, and the client's own retry succeeds."""
    async with world(engine_of("a"), settings=GatewaySettings(hold_s=0.05, retry_after_s=1)) as at:
        async with at.gateway.hold():
            pending = asyncio.ensure_future(at.client.chat.completions.create(model="policy", messages=MESSAGES))
            while not at.counted.statuses:
                await asyncio.sleep(0.01)
        assert (await pending).choices[0].message.content == "a"
        assert at.counted.statuses == [429, 200]
        assert at.counted.headers[0][b"retry-after"] == b"1"
        record = await at.episode.close()
        assert record.info["refusals"] == {"overloaded": 1}
        assert len(record.streams) == 1


# GW-04

SGLANG = (
    "The input (700 tokens) is longer than the model's context length (500 tokens).",
    "Requested token count exceeds the model's maximum context length of 500 tokens. You requested a total of 700 tokens",
)


class OverflowingEngine(ScriptedEngine):
    """Answers as a server that counts for itself."""

    def __init__(self, words: str) -> None:
        super().__init__(lambda prompt: [END], context_length=500)
        self._words = words

    async def generate(self, token_ids: Any, sampling: Any, session: str | None = None) -> Any:
        raise EngineError(self._words)


@pytest.mark.parametrize("kind", ["prompt", "answer", *SGLANG])
async def test_a_full_context_is_told_in_words_that_clients_know(kind: str) -> None:
    """Case GW-04."""
    engine = OverflowingEngine(kind) if kind in SGLANG else engine_of("a", context_length=500)
    messages = [user("word " * (300 if kind == "prompt" else 10))]
    more = {"max_tokens": 490} if kind == "answer" else {}
    async with world(engine) as at:
        with pytest.raises(openai.BadRequestError, match="maximum context length is 500 tokens") as raised:
            await at.client.chat.completions.create(model="policy", messages=messages, **more)
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.type == "invalid_request_error"
        with pytest.raises(Exception, match="maximum context length") as seen:
            await with_litellm(at.base_url, messages=messages, **more)
        assert type(seen.value).__name__ == "ContextWindowExceededError"
        assert [status for status in at.counted.statuses if status != 400] == []
        assert len(at.counted.paths) == 2
        async with httpx.AsyncClient(base_url=at.base_url) as client:
            body = {"input": messages[0]["content"], "max_output_tokens": more.get("max_tokens")}
            answer = await client.post("/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            answer = await client.post("/messages", json={"messages": messages, **more})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"].startswith("prompt is too long: ")
        record = await at.episode.close(Outcome.error(AGENT_FAILED))
        assert record.outcome == Outcome.truncated("context")


async def test_an_agent_that_makes_room_goes_on() -> None:
    async with world(engine_of("a", context_length=500)) as at:
        with pytest.raises(openai.BadRequestError):
            await at.client.chat.completions.create(model="policy", messages=[user("word " * 300)])
        assert at.episode.truncation == "context"
        await at.client.chat.completions.create(model="policy", messages=MESSAGES)
        assert at.episode.truncation is None
        assert (await at.episode.close()).outcome == Outcome.terminated()


# GW-05

FILES = [tool("read_file", path="string")]


def reads(*arguments: str) -> str:
    blocks = [f'{{"name": "read_file", "arguments": {given}}}' for given in arguments]
    return "".join(f"<tool_call>{block}</tool_call>" for block in blocks)


TURNS = {
    "two calls": reads('{"path": "a"}', '{"path": "b"}'),
    "empty arguments": reads("{}", "{}"),
    "text before": "<think>hm</think>I read both. " + reads('{"path": "ä"}', '{"path": "b"}'),
    "text alone": "Nothing to read.",
}


@pytest.mark.parametrize("text", TURNS.values(), ids=TURNS)
async def test_a_streamed_answer_assembles_to_the_whole_one(text: str) -> None:
    """Case GW-05: openai's objects, litellm's builder, and a naive client over the raw bytes."""
    import litellm

    async with world(engine_of(*[text] * 4)) as at:
        given: dict[str, Any] = {"messages": MESSAGES, "tools": FILES}
        wanted, finish = whole(await at.client.chat.completions.create(model="policy", **given))
        wanted = without_ids(wanted)
        streamed = await at.client.chat.completions.create(model="policy", **given, stream=True)
        assert as_assembled(await assembled(streamed)) == (wanted, finish)
        chunks = [chunk async for chunk in await with_litellm(at.base_url, **given, stream=True)]
        built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
        assert as_assembled(whole(built)) == (wanted, finish)
        async with httpx.AsyncClient(base_url=at.base_url) as client:
            body = {**given, "stream": True, "stream_options": {"include_usage": True}}
            raw = (await client.post("/chat/completions", json=body)).text
        check_events(raw, wanted, finish)


def as_assembled(found: tuple[dict[str, Any], str]) -> tuple[dict[str, Any], str]:
    return without_ids(found[0]), found[1]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Each answer has ids of its own; in one answer they differ."""
    ids = [call[0] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids)
    return {**message, "tool_calls": [call[1:] for call in message["tool_calls"]]}


def check_events(raw: str, wanted: dict[str, Any], finish: str) -> None:
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    *said_events, end, used = events
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for event in said_events:
        append(message, event)
        assert event["choices"][0]["finish_reason"] is None
    assert without_ids(normal(message)) == wanted
    assert (end["choices"][0]["delta"], end["choices"][0]["finish_reason"]) == ({}, finish)
    assert used["choices"] == []
    assert used["usage"]["total_tokens"] == used["usage"]["prompt_tokens"] + used["usage"]["completion_tokens"]
    ids = [
        part["id"]
        for event in said_events
        for part in event["choices"][0]["delta"].get("tool_calls", [])
        if "id" in part
    ]
    assert len(ids) == len(wanted["tool_calls"])
