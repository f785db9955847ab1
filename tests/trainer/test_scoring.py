"""Grading runs beside the episodes: one that is scored holds no agent's place. All orderings are by events."""

import asyncio
from collections.abc import Callable

from sao_gym.clock import SystemClock
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.protocols import Task
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding


def record(row: LedgerRow) -> Trajectory:
    action = Segment.action([3], logprobs=[-1.0], versions=[0], temperature=1.0, stop=StopReason.STOP)
    stream = TokenStream(segments=(Segment.observation([1, 2]), action))
    made = Trajectory(
        uid=f"r{row.number}",
        task_id=row.task_id,
        env_id="e",
        attempt=row.attempt,
        streams=(stream,),
        outcome=Outcome.terminated(),
    )
    return made.scored(Score(value=1.0, passed=True))


class World:
    """A runtime of `places` places whose episodes begin, are scored and end when they are told to."""

    def __init__(self, places: int) -> None:
        self.ledger = Ledger(":memory:")
        self.begun: asyncio.Queue[int] = asyncio.Queue()
        self.played: dict[int, asyncio.Event] = {}
        self.graded: dict[int, asyncio.Event] = {}
        self.runtime = Runtime(
            ledger=self.ledger,
            order=PromptOrder(ListTaskSet("made up", [Task(id=f"t{i}", prompt="?") for i in range(16)]), seed=7),
            rule=Outstanding(batch_rows=8, max_staleness=1),
            engine_version=lambda: 0,
            run_episode=self.episode,
            clock=SystemClock(),
            options=RuntimeOptions(max_in_flight=places),
        )

    async def episode(self, row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        self.played[row.number], self.graded[row.number] = asyncio.Event(), asyncio.Event()
        on_version(0)
        self.begun.put_nowait(row.number)
        await self.played[row.number].wait()
        self.runtime.begin_scoring(row.number)
        await self.graded[row.number].wait()
        return record(row)

    async def next_begun(self) -> int:
        return await asyncio.wait_for(self.begun.get(), 10.0)

    async def status(self, number: int, wanted: RowStatus) -> None:
        while self.ledger.row(number).status is not wanted:
            await asyncio.sleep(0)


async def test_an_episode_that_is_scored_holds_no_agents_place() -> None:
    world = World(places=1)
    world.runtime.start()
    first = await world.next_begun()
    assert world.begun.empty()
    world.played[first].set()
    second = await world.next_begun()  # while the first one's grade goes on
    assert world.ledger.row(first).status is RowStatus.SCORING
    assert world.ledger.row(second).status is RowStatus.RUNNING
    world.played[second].set()
    await world.status(second, RowStatus.SCORING)
    assert world.begun.empty(), "no more than as many again are scored at a time"
    world.graded[first].set()
    third = await world.next_begun()
    assert world.ledger.row(first).status is RowStatus.READY
    assert third not in (first, second)
    await world.runtime.stop()


async def test_a_resume_queues_what_was_scored_again() -> None:
    world = World(places=1)
    world.runtime.start()
    first = await world.next_begun()
    world.played[first].set()
    await world.next_begun()
    await world.runtime.stop()
    world.ledger.recover(0, 0, {})
    assert world.ledger.row(first).status is RowStatus.QUEUED
