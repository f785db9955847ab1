"""A gateway over a scripted engine, an agent that talks to it, and what must hold of every tree it leaves."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import httpx
import numpy as np

from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.gateway import EpisodeRecord, Gateway, GatewayEpisode, GatewaySettings
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import Episode
from sao_gym.stream import Outcome, TokenStream
from sao_gym.tokenizer import train_tokenizer

CHAT = OwnChat(train_tokenizer(["hello", "print(1)", '{"name": "python", "arguments": {"code": "'] * 4, vocab_size=300))
END = CHAT.stop_token_ids[0]
SAMPLING = Sampling(max_tokens=4000, temperature=0.7)
TASK = Task(id="t", prompt="p")
Record = dict[str, Any]


def tool(name: str = "python", **properties: str) -> Record:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": "Runs.", "parameters": schema}}


TOOLS = [tool(code="string")]


def said(text: str) -> list[int]:
    """Ids that say `text`; markers are control ids."""
    return [*CHAT.codec.encode(text), END]


def calls(*codes: str, before: str = "") -> str:
    """A turn that calls python with each of `codes`."""
    blocks = [json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=False) for code in codes]
    return before + "".join(f"<tool_call>{block}</tool_call>" for block in blocks)


def engine_of(*texts: str, **options: Any) -> ScriptedEngine:
    """Says `texts` in order, whatever it is asked."""
    left = [said(text) for text in texts]
    return ScriptedEngine(lambda prompt: left.pop(0), **options)


def counting_engine(**options: Any) -> ScriptedEngine:
    """Says another text each time."""
    count = iter(range(10**9))
    return ScriptedEngine(lambda prompt: said(f"answer {next(count)}"), **options)


def episode(uid: str = "e0") -> Episode:
    return Episode(uid=uid, task=TASK, env_id="x", attempt=0, run_seed=0)


class Agent:
    """A client without a socket. `requests` counts what was sent."""

    def __init__(
        self,
        engine: Any,
        *,
        settings: GatewaySettings | None = None,
        chat: Any = CHAT,
        clock: Any = None,
        **opened: Any,
    ) -> None:
        self.engine = engine
        self.gateway = Gateway(engine, chat, clock, settings)
        self.episode: GatewayEpisode = self.gateway.open(episode(), **{"sampling": SAMPLING, **opened})
        transport = httpx.ASGITransport(app=self.gateway.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30)

    @property
    def nodes(self) -> Sequence[Any]:
        return self.episode.session.tree.nodes

    async def post(
        self, path: str, body: Any, *, headers: dict[str, str] | None = None, content: bytes | None = None
    ) -> httpx.Response:
        raw = json.dumps(body).encode() if content is None else content
        given = {"content-type": "application/json", **(headers or {})}
        return await self.http.post(self.episode.path + path, content=raw, headers=given)

    async def ask(self, messages: Iterable[Record], *, tools: Any = TOOLS, headers: Any = None, **more: Any) -> Record:
        """One chat completion, which must succeed: its message."""
        body = {"model": "policy", "messages": list(messages), "tools": tools, **more}
        answer = await self.post("/chat/completions", body, headers=headers)
        assert answer.status_code == 200, answer.text
        message: Record = answer.json()["choices"][0]["message"]
        return message

    async def close(self, outcome: Outcome | None = None) -> EpisodeRecord:
        record = await self.episode.close(outcome)
        check(self.nodes, record.streams)
        return record


def check(nodes: Sequence[Any], streams: Sequence[TokenStream]) -> None:
    """Every path is an exact extension of its parent's; every sampled token is trained once, where it was sampled."""
    for node in nodes:
        if node.parent is not None:
            before = node.parent.token_ids()
            np.testing.assert_array_equal(node.token_ids()[: len(before)], before)
    trained = Counter(
        bytes(action.token_ids) + bytes(action.behavior_logprobs) for s in streams for action in s.actions
    )
    wanted = [node.generation for node in nodes if not node.is_auxiliary]
    assert trained == Counter(bytes(g.token_ids) + bytes(g.logprobs) for g in wanted)
    paths = {bytes(node.token_ids()) for node in nodes}
    for stream in streams:
        ends = np.flatnonzero(np.diff(stream.action_mask.astype(int)) == -1) + 1
        for end in [*ends, len(stream)]:
            assert bytes(stream.token_ids[:end]) in paths


def reasons(record: EpisodeRecord) -> dict[str, int]:
    found: dict[str, int] = record.info["reasons"]
    return found


def user(text: Any) -> Record:
    return {"role": "user", "content": text}


def system(text: Any) -> Record:
    return {"role": "system", "content": text}


def result(message: Record, text: Any, place: int = 0) -> Record:
    return {"role": "tool", "tool_call_id": message["tool_calls"][place]["id"], "content": text}


Edit = Callable[[Record], Record]
