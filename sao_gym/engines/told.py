"""An engine that says what it was told in place of what it would sample, and scores it with its own weights.

All else is the engine below: log-probs are those of its present weights, publications arrive, versions rise. So a whole
run can be tried, and demonstrations be learned from, before a policy can do anything by itself.

Example:
    engine = ToldEngine(LocalEngine(model))
    engine.tell("r1", [first_turn_ids, second_turn_ids])
    generation = await engine.generate(prompt, Sampling(max_tokens=64), session="r1")
"""

from collections.abc import Sequence

import numpy as np

from sao_gym.errors import EngineError
from sao_gym.protocols import Engine, EngineHealth, Generation, Sampling, WeightSource
from sao_gym.stream import Floats, Ids, StopReason


class ToldEngine:
    """An `Engine` around another one. Closing it closes that one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lines: dict[str, list[Ids]] = {}

    def tell(self, session: str, lines: Sequence[Ids]) -> None:
        """What a session says from now on, turn by turn, each with its stop token."""
        self._lines[session] = [np.asarray(line, dtype=np.int32) for line in lines]

    @property
    def version(self) -> int:
        """Policy version that the next turn is scored with."""
        return self._engine.version

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and completion together, that one request may hold."""
        return self._engine.context_length

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        """The session's next turn, cut at the limit. Raises EngineError where nothing is left to say."""
        left = self._lines.get(session or "", [])
        if not left:
            raise EngineError(f"session {session} was told nothing (more) to say; give it one line a turn")
        room = min(sampling.max_tokens, self.context_length - len(token_ids))
        if room < 1:
            raise EngineError(
                f"a prompt of {len(token_ids)} tokens leaves no room in a context of {self.context_length}"
            )
        whole = left.pop(0)
        said = whole[:room]
        while True:  # every token carries the version that scored it
            version = self.version
            scored = await self._engine.score(np.concatenate([token_ids, said]), sampling.temperature)
            if version == self.version:
                break
        return Generation(
            token_ids=said,
            logprobs=scored[len(token_ids) :].astype(np.float32),
            versions=np.full(len(said), version, dtype=np.int32),
            stop=StopReason.STOP if int(said[-1]) in sampling.stop_token_ids else StopReason.LENGTH,
            temperature=sampling.temperature,
        )

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """See `Engine.score`."""
        return await self._engine.score(token_ids, temperature)

    async def publish(self, source: WeightSource, version: int) -> None:
        """See `Engine.publish`."""
        await self._engine.publish(source, version)

    async def end_session(self, session: str) -> None:
        """Forget what the session was told."""
        self._lines.pop(session, None)
        await self._engine.end_session(session)

    async def health(self) -> EngineHealth:
        """See `Engine.health`."""
        return await self._engine.health()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()
