"""AgentEnv: an episode as a conversation, with Gymnasium's meaning of every word.

`reset` says the task, `step` takes one assistant message and says what is new. Invariants:
- after one seeded reset, later unseeded resets draw tasks from the environment's own generator.
- rewards are per action, and over an episode they sum to the value of its `Score`.
- `terminated` wins over `truncated`; a truncation has a reason; a message cut by a length limit ends the episode and
  is graded as it stands.
- blocking and asynchronous callers run the same code: `step` and `step_async`, `reset` and `reset_async`, ...

Example:
    >>> class Echo(AgentEnv):
    ...     def respond(self, message: Message) -> Reply:
    ...         return Reply(reward=float(message.content == self.task.answer), is_final=True)
    >>> env = Echo([Task(id="t0", prompt="Say hi.", answer="hi")])
    >>> env.reset(seed=0)[0][0].content
    'Say hi.'
    >>> env.step("hi")[1:4]
    (1.0, True, False)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import gymnasium
from gymnasium.error import ResetNeeded

from sao_gym.errors import ConfigError, GradingError, SaoGymError
from sao_gym.loops import Caller, drive, inline, offload
from sao_gym.messages import Message, ToolSpec
from sao_gym.protocols import Task, TaskSet
from sao_gym.spaces import Messages, MessageSpace
from sao_gym.stream import Score, TruncationReason
from sao_gym.tools import error_text

Step = tuple[tuple[Message, ...], float, bool, bool, dict[str, Any]]
ResetOptions = ("task", "task_id")
RESERVED_INFO = ("turn", "score", "truncation_reason")


@runtime_checkable
class HasById(Protocol):
    """A task set that finds a task by its id without reading all."""

    def by_id(self, task_id: str) -> Task:
        """Raises LookupError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment says to one action. `is_final` declares the episode over by itself."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    is_final: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = next((key for key in RESERVED_INFO if key in self.info), None)
        if taken is not None:
            raise ConfigError(
                f"the info of a Reply cannot say {taken!r}: the environment itself does; choose another key"
            )
        object.__setattr__(self, "messages", as_messages(self.messages, "the messages of a Reply"))
        if not hasattr(self.reward, "__float__"):
            raise ConfigError(f"the reward of a Reply must be a number, got {type(self.reward).__name__}")
        object.__setattr__(self, "reward", float(self.reward))
        if not math.isfinite(self.reward):
            raise GradingError(f"the environment gave the reward {self.reward}; a reward must be finite")


class AgentEnv(gymnasium.Env[tuple[Message, ...], Message]):
    """Base of every environment. Write `respond`; where the score is not the sum of rewards, `grade`.

    `opening`, `respond`, `grade`, `setup` and `teardown` may each be a plain or an `async` method. One whose `grade` takes
    long and needs nothing of the agent's says `grades_apart`: a runtime may then begin another episode beside it, which
    it hears of through `on_grading`.
    """

    grades_apart = False
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own declaration

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        tools: Sequence[ToolSpec] = (),
        max_turns: int | None = None,
    ) -> None:
        _check_tasks(type(self).__name__, tasks)
        if max_turns is not None and (not isinstance(max_turns, int) or max_turns < 1):
            raise ConfigError(f"max_turns must be a whole number of at least 1, or None; got {max_turns!r}")
        self.tasks = tasks
        self.tools = tuple(tools)
        self.max_turns = max_turns
        self.observation_space = Messages()
        self.action_space = MessageSpace([tool.name for tool in self.tools])
        self._task: Task | None = None
        self._messages: tuple[Message, ...] = ()
        self._rewards: list[float] = []
        self._is_over = True
        self._is_graded = False
        self._is_held = False
        self._score: Score | None = None
        self.on_grading: Callable[[], None] | None = None

    # What a subclass writes

    def opening(self, task: Task) -> Any:
        """First messages of an episode: the task's prompt."""
        return (Message.user(task.prompt),)

    def respond(self, message: Message) -> Any:
        """The `Reply` to one whole assistant message."""
        raise ConfigError(f"{type(self).__name__} does not say how it answers: define respond(message) -> Reply")

    def grade(self) -> Any:
        """The episode's `Score` as it stands, or None if the verdict comes later. Here: the sum of its rewards."""
        value = sum(self._rewards)
        return Score(value=value, passed=value > 0, detail="sum of rewards")

    def setup(self, task: Task) -> Any:
        """Make ready what one episode needs."""

    def teardown(self) -> Any:
        """Give back what `setup` or the episode took; called once per episode, however it ended."""

    @property
    def is_graded_from_record(self) -> bool:
        """Whether `grade` reads nothing but the task and the last action's text, so that a record can be graded again.

        A subclass of which that is true says so; here it is not known.
        """
        return False

    # What a caller reads

    @property
    def task(self) -> Task:
        """The episode's task. Raises ResetNeeded before the first reset."""
        if self._task is None:
            raise ResetNeeded("the environment has no task yet; call reset() first")
        return self._task

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation so far, actions included."""
        return self._messages

    @property
    def turn(self) -> int:
        """Number of actions taken in this episode."""
        return len(self._rewards)

    @property
    def last_action(self) -> Message | None:
        """The policy's latest message, None before the first."""
        return next((m for m in reversed(self._messages) if m.role == "assistant"), None)

    @property
    def episode_return(self) -> float:
        """Sum of the rewards that were given in this episode."""
        return sum(self._rewards)

    # Gymnasium, blocking and asynchronous

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """Begin an episode. `options` may hold `task` (a Task) or `task_id`; else a task is drawn. Raises ConfigError."""
        return drive(self._reset(inline, seed, options))

    async def reset_async(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        """`reset` for a caller that has other episodes to go on with."""
        return await self._reset(offload, seed, options)

    def step(self, action: Message | str) -> Step:
        """One action; a plain string stands for an assistant message. Raises ResetNeeded after the episode's end.

        The last step's info holds `score`, and `truncation_reason` where a limit ended the episode.
        """
        return drive(self._step(inline, action))

    async def step_async(self, action: Message | str) -> Step:
        """`step` for a caller that has other episodes to go on with; blocking code runs in a worker thread."""
        return await self._step(offload, action)

    def finish(self, reason: str) -> Score | None:
        """End the episode because a budget outside ended it, and grade it as it stands; idempotent."""
        return drive(self._finish(inline, reason))

    async def finish_async(self, reason: str) -> Score | None:
        """`finish` for a caller that has other episodes to go on with."""
        return await self._finish(offload, reason)

    async def regrade_async(self, task: Task, response: str) -> Score | None:
        """Grade a recorded episode again, by its task and the text of its last action. Nothing is set up or run.

        Raises ConfigError where the record does not suffice, see `is_graded_from_record`.
        """
        if not self.is_graded_from_record:
            raise ConfigError(
                f"{type(self).__name__} cannot grade an episode from its record: its grade may depend on more than the "
                "task and the last message; if it does not, let is_graded_from_record say True"
            )
        await self._release(offload)
        self._task, self._messages, self._rewards = task, (Message.assistant(response),), [0.0]
        self._score, self._is_over, self._is_graded = None, True, False
        return await self._graded(offload)

    def close(self) -> None:
        """Give everything back; idempotent. An episode that goes on is over, without a grade."""
        self._is_over = True
        drive(self._release(inline))

    async def close_async(self) -> None:
        """`close` for a caller that has other episodes to go on with."""
        self._is_over = True
        await self._release(offload)

    # The one body behind both

    async def _reset(
        self, call: Caller, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[tuple[Message, ...], dict[str, Any]]:
        super().reset(seed=seed)
        await self._release(call)
        task = self._pick_task(options or {})
        self._task, self._rewards, self._score = task, [], None
        self._is_over, self._is_graded, self._is_held = True, False, True
        await call(self.setup, task)
        self._messages = as_messages(await call(self.opening, task), f"{type(self).__name__}.opening(task)")
        self._is_over = False
        return self._messages, {"task_id": task.id}

    def _pick_task(self, options: Mapping[str, Any]) -> Task:
        unknown = [key for key in options if key not in ResetOptions]
        if unknown:
            raise ConfigError(f"unknown reset option {unknown[0]!r}; known options: 'task', 'task_id'")
        if "task" in options:
            task = options["task"]
            if not isinstance(task, Task):
                raise ConfigError(f"reset option 'task' must be a Task, got {type(task).__name__}")
            return task
        if "task_id" in options:
            return self._find_task(str(options["task_id"]))
        drawn = self.tasks[int(self.np_random.integers(len(self.tasks)))]
        if not isinstance(drawn, Task):
            raise ConfigError(f"a task set must hold Tasks, got {type(drawn).__name__}")
        return drawn

    def _find_task(self, task_id: str) -> Task:
        if isinstance(self.tasks, HasById):
            return self.tasks.by_id(task_id)
        for index in range(len(self.tasks)):
            if self.tasks[index].id == task_id:
                return self.tasks[index]
        raise ConfigError(f"no task has the id {task_id!r}; the environment holds {len(self.tasks)} tasks")

    async def _step(self, call: Caller, action: Message | str) -> Step:
        message = self._accept(action)
        self._is_over = True  # holds if an exception leaves this step: nobody knows the state then
        reply = Reply() if message.is_truncated else await self._respond(call, message)
        self._messages = (*self._messages, *reply.messages)
        self._rewards[-1] += reply.reward
        info: dict[str, Any] = {"turn": self.turn, **reply.info}
        reason = self._truncation(message, reply)
        if not reply.is_final and reason is None:
            self._is_over = False
            return reply.messages, reply.reward, False, False, info
        paid = self._rewards[-1]
        info["score"] = await self._graded(call)
        if reason is not None:
            info["truncation_reason"] = str(reason)
        reward = reply.reward + self._rewards[-1] - paid
        return reply.messages, reward, reply.is_final, reason is not None, info

    async def _respond(self, call: Caller, message: Message) -> Reply:
        reply = await call(self.respond, message)
        if not isinstance(reply, Reply):
            raise ConfigError(f"{type(self).__name__}.respond(message) must return a Reply, got {type(reply).__name__}")
        return reply

    def _accept(self, action: Message | str) -> Message:
        if self._is_over:
            raise ResetNeeded("the episode is over (or has not begun); call reset() before step()")
        message = Message.assistant(action) if isinstance(action, str) else action
        if not self.action_space.contains(message):
            shown = f"role {message.role!r}" if isinstance(message, Message) else type(message).__name__
            raise ConfigError(f"an action is one assistant Message or a string, got {shown}")
        self._messages = (*self._messages, message)
        self._rewards.append(0.0)
        return message

    def _truncation(self, message: Message, reply: Reply) -> TruncationReason | None:
        if message.is_truncated:
            return TruncationReason.TURN_TOKENS
        if not reply.is_final and self.max_turns is not None and self.turn >= self.max_turns:
            return TruncationReason.TURNS
        return None

    async def _finish(self, call: Caller, reason: str) -> Score | None:
        if self._task is None:
            raise ResetNeeded("there is no episode to finish; call reset() first")
        self._is_over = True
        return await self._graded(call)

    async def _graded(self, call: Caller) -> Score | None:
        """Grade once; what the rewards lack to the score's value is added to the last action's."""
        if self._is_graded:
            return self._score
        if self.on_grading is not None:
            self.on_grading()
        try:
            given = await call(self.grade)
        except SaoGymError:
            raise
        except Exception as error:
            raise GradingError(f"the grader raised {error_text(error)}") from error
        score = _as_score(given, self.turn)
        if score is not None:
            if self._rewards:
                self._rewards[-1] += score.value - sum(self._rewards)
            score = with_shares(score, self._rewards)
        self._score, self._is_graded = score, True
        await self._release(call)
        return score

    async def _release(self, call: Caller) -> None:
        if self._is_held:
            self._is_held = False
            await call(self.teardown)


def as_messages(given: Any, what: str) -> tuple[Message, ...]:
    """`given` as a tuple of messages. Raises ConfigError, naming `what`, where it is something else."""
    if isinstance(given, list | tuple) and all(isinstance(message, Message) for message in given):
        return tuple(given)
    shown = type(given).__name__
    if isinstance(given, list | tuple):
        shown += " of " + ", ".join(sorted({type(item).__name__ for item in given}))
    raise ConfigError(f"{what} must be a list or tuple of Messages, got {shown}")


def _check_tasks(name: str, tasks: Any) -> None:
    if isinstance(tasks, str | Mapping) or not hasattr(tasks, "__len__") or not hasattr(tasks, "__getitem__"):
        raise ConfigError(f"{name} takes a task set or a list of Tasks, got {type(tasks).__name__}")
    if len(tasks) == 0:
        raise ConfigError(f"{name} was given no tasks; give it at least one")
    if isinstance(tasks, list | tuple):
        wrong = next((task for task in tasks if not isinstance(task, Task)), None)
        if wrong is not None:
            raise ConfigError(f"{name} takes a list of Tasks, got one that holds a {type(wrong).__name__}")


def _as_score(given: Any, turns: int) -> Score | None:
    if given is not None and not isinstance(given, Score):
        raise ConfigError(
            f"a grader must return a Score(value=..., passed=...), got {type(given).__name__} {repr(given)[:60]}"
        )
    if given is None:
        return None
    if not hasattr(given.value, "__float__") or not isinstance(given.detail, str):
        raise ConfigError(f"a Score has a number as value and text as detail, got {given.value!r} and {given.detail!r}")
    if not isinstance(given.method, str):
        raise ConfigError(f"a Score has one word as method, or nothing, got {given.method!r}")
    if not math.isfinite(given.value):
        raise GradingError(f"the grader gave the score {given.value}; a score must be finite")
    if given.per_action and len(given.per_action) != turns:
        raise GradingError(f"the grader gave {len(given.per_action)} shares for {turns} actions; give one per action")
    if given.per_action and abs(sum(given.per_action) - given.value) > 1e-6:
        raise GradingError(f"the grader's shares sum to {sum(given.per_action)}, its score's value is {given.value}")
    return given


def with_shares(score: Score, rewards: Sequence[float]) -> Score:
    """`score` with `rewards` as shares per action, where more than the last action earned something."""
    if score.per_action or not any(rewards[:-1]):
        return score
    return replace(score, per_action=tuple(float(reward) for reward in rewards))
