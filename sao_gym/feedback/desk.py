"""Where an application's requests become episodes, and its users' verdicts their scores.

A *place* is a ledger row that was admitted and waits for somebody to ask; it does not age while it waits. A request takes the
place that has waited longest. Where none is free (ADMIT holds rows back) it is answered all the same: that episode is recorded
and counted, and never trained. An episode ends with its feedback, or `deadline_s` after its last answer.

Invariants: an application is answered whenever the engine is; feedback was accepted only once the ledger holds the episode, so
a crash loses none; a request of which nothing came takes no place.
"""

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping

from sao_gym.budgets import Budgets
from sao_gym.errors import NoFeedbackError
from sao_gym.feedback.book import FeedbackBook, ServedEpisode, ServedState
from sao_gym.feedback.reconcile import STOPPED
from sao_gym.feedback.served import Feedback, Place, Receipt, Served
from sao_gym.gateway import Gateway
from sao_gym.gateway.refusals import Code, Refusal
from sao_gym.gateway.retry import Retry
from sao_gym.gateway.session import Session
from sao_gym.protocols import Clock, Sampling, Task
from sao_gym.rollout import Episode
from sao_gym.stream import Outcome, Score, Trajectory

NO_PLACE = "no place was free"
TAKEN_BACK = "its place was taken back: the episode had become too old, or the run stopped"

PASSED_FROM = 0.5
"""The score from which on an episode counts as a success; what is trained on is the score itself."""
DRAIN_S, LOOK_S = 30.0, 0.05
"""How long answers under way may still take when a run ends, and how often that is looked at."""


class Desk:
    """Serves an application. Belongs to one event loop; `close` it before its gateway's engine.

    `deadline_s`: seconds after the last answer until an episode without feedback is given up.
    """

    def __init__(
        self,
        gateway: Gateway,
        book: FeedbackBook,
        *,
        clock: Clock,
        sampling: Sampling,
        budgets: Budgets,
        deadline_s: float,
        env_id: str = "feedback",
        run_seed: int = 0,
    ) -> None:
        self.gateway, self.book = gateway, book
        self._clock, self._sampling, self._budgets, self._deadline_s = clock, sampling, budgets, deadline_s
        self._env_id, self._run_seed = env_id, run_seed
        self._free: deque[Place] = deque()
        self._open: dict[str, Served] = {}
        self._by_session: dict[Session, Served] = {}
        self._by_request: dict[tuple[str, bytes], Served] = {}
        self._settling: dict[str, tuple[Served, Trajectory]] = {}
        self._guests: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._is_closing = False

    # -- what the runtime calls

    async def episode(
        self, episode: Episode, *, on_version: Callable[[int], None], on_answered: Callable[[], None]
    ) -> Trajectory:
        """Wait for an application, then for its feedback. The caller says with `settle` when the ledger has the result.

        Cancelled, an episode that was begun goes on without its place.
        """
        place = Place(episode, on_version, on_answered, asyncio.get_running_loop().create_future())
        self._free.append(place)
        try:
            while True:
                served = await place.taken
                made = await self._ended(served)
                if made is not None:
                    self._settling[episode.uid] = served, made
                    return made
                place.taken = asyncio.get_running_loop().create_future()
                self._free.appendleft(place)
        except asyncio.CancelledError:
            self._give_up(place)
            raise

    def settle(self, uid: str, *, is_for_training: bool, why: str | None) -> None:
        """The ledger has what `episode` returned for `uid`; without effect for one that returned nothing."""
        served, made = self._settling.pop(uid, (None, None))
        if served is not None and made is not None:
            self._close(served, made, None if is_for_training else why or "it was not trained")

    def _give_up(self, place: Place) -> None:
        """The row is no longer ours to fill."""
        place.is_ours = False
        if place in self._free:
            self._free.remove(place)
        elif place.taken.done() and not place.taken.cancelled():
            served = place.taken.result()
            if served.place is place and not served.settled.done():
                served.place, served.why = None, TAKEN_BACK
                self._settling.pop(place.episode.uid, None)
                self._host(served)

    # -- what the application's requests call

    def find(self, name: str, retry: Retry) -> Session:
        """The session that a request goes on with, or begins where `name` is empty. Raises Refusal."""
        served = self._named(name) if name else self._asked_before(retry) or self._begin()
        if retry.key is not None and not name and served.request is None:
            served.request = retry.key, retry.body
            self._by_request[served.request] = served
        served.calls += 1
        return served.handle.session

    def answered(self, session: Session) -> str:
        """An answer was made. Returns the episode's name."""
        served = self._by_session.get(session)
        if served is None:
            return ""  # closed meanwhile
        served.calls -= 1
        served.answers += 1
        served.answered_at = self._clock.now()
        served.changed.set()
        if served.answers == 1:
            self._counts["served"] += 1
            self._counts["not_admitted"] += served.why == NO_PLACE
            if served.place is not None:
                served.place.on_answered()
        return served.id

    def refused(self, session: Session) -> None:
        """A call was refused. Where nothing came of an episode, there was none."""
        served = self._by_session.get(session)
        if served is None:
            return
        served.calls -= 1
        nothing = not (served.calls or served.answers or session.tree.nodes or session.failure)
        served.is_withdrawn = served.is_withdrawn or nothing
        served.changed.set()

    async def post(self, name: str, feedback: Feedback) -> Receipt:
        """Take feedback, and return once it is on the disk. Said twice alike, it is answered alike. Raises Refusal."""
        line = self.book.find(name)
        if line is None:
            raise Refusal(404, Code.NOT_FOUND, f"no episode {name!r} was served here", "episode")
        served = self._open.get(name)
        if served is None:
            return self._post_late(line, feedback)
        if served.feedback is None and (served.calls or not served.answers):
            raise Refusal(409, Code.CONFLICT, "an answer of this episode is being made; post its feedback afterwards")
        if served.feedback is not None and served.feedback != feedback:
            raise _said_before(served.feedback.score)
        served.feedback = feedback
        served.changed.set()
        return await asyncio.shield(served.settled)

    def _post_late(self, line: ServedEpisode, feedback: Feedback) -> Receipt:
        if line.state is ServedState.DELETED:
            raise Refusal(410, Code.GONE, f"episode {line.id!r} was deleted", "episode")
        if line.score is not None and line.score != feedback.score:
            raise _said_before(line.score)
        if line.score is None:
            self.book.score_late(line.id, feedback.score, feedback.comment)
            self._counts["late"] += 1
        return Receipt(line.id, feedback.score, line.is_for_training, line.why)

    # -- beginning

    def _named(self, name: str) -> Served:
        served = self._open.get(name)
        if served is None:
            if self.book.find(name) is None:
                raise Refusal(
                    404, Code.NOT_FOUND, f"no episode {name!r} was served here; leave its name out to begin one"
                )
            raise Refusal.over("it is no longer open; leave its name out to begin another")
        if served.feedback is not None:
            raise Refusal.over("it has its feedback; leave its name out to begin another")
        return served

    def _asked_before(self, retry: Retry) -> Served | None:
        """The episode that a request with this idempotency key has begun. (The same words alone may be another user's.)"""
        served = self._by_request.get((retry.key, retry.body)) if retry.key is not None else None
        return served if served is not None and not served.is_over else None

    def _begin(self) -> Served:
        if self._is_closing:
            raise Refusal.busy(self.gateway.settings.retry_after_s)
        place = self._free.popleft() if self._free else None
        name = secrets.token_hex(12)  # never looks like a flag to a command
        episode = place.episode if place else self._guest(name)
        handle = self.gateway.open(
            episode, sampling=self._sampling, budgets=self._budgets, on_version=place.heard if place else None
        )
        served = Served(name, episode, handle, place, self._clock.now(), why=None if place else NO_PLACE)
        self.book.open(name, row=int(episode.uid.removeprefix("r")) if place else None)
        self._open[name] = self._by_session[handle.session] = served
        if place is not None:
            place.taken.set_result(served)
        else:
            self._host(served)
        return served

    def _guest(self, name: str) -> Episode:
        task = Task(id=f"guest-{name}", prompt="")
        return Episode(uid=f"guest-{name}", task=task, env_id=self._env_id, attempt=0, run_seed=self._run_seed)

    def _host(self, served: Served) -> None:
        """Follow an episode that has no place."""
        task = asyncio.ensure_future(self._hosted(served))
        self._guests.add(task)
        task.add_done_callback(self._guests.discard)

    async def _hosted(self, served: Served) -> None:
        made = await self._ended(served)
        if made is not None:
            self._close(served, made, served.why)

    # -- ending

    async def _ended(self, served: Served) -> Trajectory | None:
        """The record of an episode once it is over; None for one of which nothing came."""
        await self._wait(served)
        if served.is_withdrawn:
            await served.handle.close()
            self._forget(served)
            self.book.withdraw(served.id)
            return None
        return await self._record(served)

    async def _record(self, served: Served) -> Trajectory:
        record = await served.handle.close()
        said = served.feedback  # after the wait: it may have come meanwhile
        is_silent = said is None and not record.outcome.is_error
        made = record.trajectory(
            served.episode,
            Outcome.error(NoFeedbackError.kind) if is_silent else record.outcome,
            timings={"episode_s": self._clock.now() - served.began_at},
            info={"feedback": {"episode": served.id}},
        )
        if said is None or record.outcome.is_error:
            return made
        return made.scored(Score(value=said.score, passed=said.score >= PASSED_FROM, method="feedback"))

    async def _wait(self, served: Served) -> None:
        """Until feedback, a failure, or nothing for `deadline_s` after the last answer."""
        while not served.is_over:
            left = served.answered_at + self._deadline_s - self._clock.now() if served.answers else None
            if left is not None and left <= 0 and not served.calls:
                return
            served.changed.clear()
            alarm = None if left is None or served.calls else asyncio.ensure_future(self._clock.sleep(left))
            change = asyncio.ensure_future(served.changed.wait())
            try:
                await asyncio.wait({change, alarm} if alarm else {change}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiting in (change, alarm):
                    if waiting is not None:
                        waiting.cancel()

    def _close(self, served: Served, made: Trajectory, why: str | None) -> None:
        """Write what became of an episode, and tell who waits for it. `why` it is not trained, None if it is."""
        said = served.feedback
        if said is not None:
            state = ServedState.SCORED
        elif served.is_lost:
            state, why = ServedState.LOST, STOPPED
        elif made.outcome.reason == NoFeedbackError.kind:
            state, why = ServedState.EXPIRED, f"no feedback came within {self._deadline_s:g} s"
        else:
            state, why = ServedState.FAILED, f"its generation failed ({made.outcome.reason})"
        score, comment = (said.score, said.comment) if said else (None, None)
        self.book.end(served.id, state, score=score, comment=comment, why=why, trajectory=made)
        self._counts[state] += 1
        self._forget(served)
        if said is not None:
            served.settled.set_result(Receipt(served.id, said.score, why is None, why))

    def _forget(self, served: Served) -> None:
        self._open.pop(served.id, None)
        self._by_session.pop(served.handle.session, None)
        if served.request is not None and self._by_request.get(served.request) is served:
            del self._by_request[served.request]

    # -- the whole

    async def close(self) -> None:
        """End what is open: answers under way are finished, feedback that is here is written, the rest is lost, and recorded as
        that; idempotent.

        Call it once nobody awaits `episode` any more.
        """
        self._is_closing = True
        await self._drained()
        for served in self._open.values():
            served.is_lost = served.feedback is None
            served.changed.set()
        await asyncio.gather(*self._guests)

    async def _drained(self) -> None:
        """Let answers under way be finished, for a while."""
        last = self._clock.now() + DRAIN_S
        while any(served.calls for served in self._open.values()) and self._clock.now() < last:
            await self._clock.sleep(LOOK_S)

    def counters(self) -> Mapping[str, float]:
        """Episodes so far by what became of them, those that found no place, late feedback; and what is there now."""
        names = ("served", "scored", "expired", "failed", "not_admitted", "late")
        now = {"open": len(self._open), "places_free": len(self._free)}
        return {**{name: self._counts[name] for name in names}, **now}


def _said_before(score: float) -> Refusal:
    return Refusal(409, Code.CONFLICT, f"this episode has its feedback already: {score:g}", "score")
