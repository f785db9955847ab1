"""A desk over a scripted engine under a virtual clock, a runtime that is played by hand, and an application without a socket."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

from sao_gym.budgets import Budgets
from sao_gym.clock import VirtualClock
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import EngineError
from sao_gym.feedback import Desk, FeedbackBook
from sao_gym.feedback.app import DeskDoor, desk_app
from sao_gym.feedback.book import Keep
from sao_gym.gateway import Gateway
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import Episode
from sao_gym.stream import Trajectory
from sao_gym.tokenizer import train_tokenizer

CHAT = OwnChat(train_tokenizer(["hello", "answer 0123456789"] * 4, vocab_size=300))
KEY = "the-key"
DEADLINE_S = 600.0
QUESTION = [{"role": "user", "content": "hello?"}]


class World:
    """`fails` says whether the engine fails; rows begin with `place`, and end as the runtime would settle them."""

    def __init__(self, *, keep: Keep = "all", settles: bool = True, budgets: Budgets | None = None) -> None:
        self.clock = VirtualClock()
        self.fails = False
        self.hold: asyncio.Event | None = None
        self.engine = _Engine(self)
        self.book = FeedbackBook(":memory:", keep)
        self.desk = Desk(
            Gateway(self.engine, CHAT, self.clock),
            self.book,
            clock=self.clock,
            sampling=Sampling(max_tokens=100),
            budgets=budgets or Budgets(),
            deadline_s=DEADLINE_S,
        )
        self._settles = settles
        self.ended: dict[int, Trajectory] = {}
        self.heard: list[str] = []
        app = desk_app(DeskDoor(self.desk, KEY))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://desk/v1", timeout=30)

    def place(self, number: int) -> "asyncio.Task[Trajectory]":
        """Admit a row."""
        return asyncio.ensure_future(self._row(number))

    async def _row(self, number: int) -> Trajectory:
        task = Task(id=f"place-{number}", prompt="")
        made = await self.desk.episode(
            Episode(uid=f"r{number}", task=task, env_id="feedback", attempt=0, run_seed=0),
            on_version=lambda version: self.heard.append(f"r{number} version {version}"),
            on_answered=lambda: self.heard.append(f"r{number} answered"),
        )
        self.ended[number] = made
        if self._settles:
            failed = made.outcome.is_error
            self.desk.settle(f"r{number}", is_for_training=not failed, why=made.outcome.reason if failed else None)
        return made

    async def ask(self, episode: str = "", *, headers: Any = None, **more: Any) -> httpx.Response:
        """One chat completion."""
        named = {"x-sao-episode": episode} if episode else {}
        body = {"model": "policy", "messages": QUESTION, **more}
        return await self.post("/chat/completions", body, headers={**named, **(headers or {})})

    async def begin(self) -> str:
        """The name of a new episode that has its answer."""
        answer = await self.ask()
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-sao-episode"])

    async def say(self, episode: str, score: Any = 1.0, **more: Any) -> httpx.Response:
        """Post feedback."""
        return await self.post("/feedback", {"episode": episode, "score": score, **more})

    async def post(self, path: str, body: Any, *, headers: Any = None) -> httpx.Response:
        """Any request, with the key."""
        return await self.http.post(path, json=body, headers={"authorization": f"Bearer {KEY}", **(headers or {})})

    async def soon(self, until: Callable[[], bool]) -> None:
        """Give way until it is so; time stands still."""
        for _ in range(1000):
            if until():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never came")


class _Engine(ScriptedEngine):
    """Says another text each time; fails, or waits, where its world says so."""

    def __init__(self, world: World) -> None:
        count = iter(range(10**9))
        end = CHAT.stop_token_ids[0]
        super().__init__(lambda prompt: [*CHAT.codec.encode(f"answer {next(count)}"), end])
        self._world = world

    async def generate(self, *arguments: Any, **more: Any) -> Any:
        if self._world.hold is not None:
            await self._world.hold.wait()
        if self._world.fails:
            raise EngineError("the engine is gone")
        return await super().generate(*arguments, **more)
