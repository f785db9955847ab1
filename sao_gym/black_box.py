"""A user's own agent as an environment: a function or a command line that knows an address, and a grader of what it says.

Invariants: the agent is never stepped and is given nothing but its task and the address of a model; a command runs in a
folder and a process group of its own, which both end with the episode, and no secret stands among its arguments.

Example:
    async def agent(task: Task, base_url: str) -> str:
        reply = await openai.AsyncOpenAI(base_url=base_url, api_key="none").chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.prompt}])
        return reply.choices[0].message.content

    env = BlackBoxEnv(tasks, agent=agent, grader=grade)
    env = BlackBoxEnv(tasks, agent="node my_agent.js", grader=grade)
"""

import asyncio
import inspect
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from sao_gym.agent_env import AgentEnv, Reply
from sao_gym.budgets import Budgets
from sao_gym.errors import ConfigError, EpisodeError, UserError
from sao_gym.loops import on_background
from sao_gym.messages import Message
from sao_gym.protocols import AGENT_FAILED, Task, TaskSet
from sao_gym.stream import Outcome
from sao_gym.tool_env import AnswerGrader

AgentFunction = Callable[[Task, str], Awaitable[str | None]]
ANSWER_BYTES = 1 << 20
TAIL = 2000


class BlackBoxEnv(AgentEnv):
    """An environment whose episodes `agent` drives; `grader(gold, answer)`, plain or async, judges what it returned.

    An asynchronous function is called with the task and the address. A command line is run by the shell: the prompt on
    stdin, the address in OPENAI_BASE_URL, the task's id in SAO_GYM_TASK_ID; what it prints on stdout is its answer, and an
    exit code other than 0 is its failure.
    """

    def __init__(self, tasks: TaskSet | Sequence[Task], *, agent: str | AgentFunction, grader: AnswerGrader) -> None:
        is_command = isinstance(agent, str)
        if not (is_command and str(agent).strip()) and not (callable(agent) and _is_async(agent)):
            raise ConfigError(
                f"agent must be an async function of (task, base_url), or a command line, got {type(agent).__name__}"
            )
        super().__init__(tasks)
        self.agent, self.grader = agent, grader
        self._answer: str | None = None

    drives_itself = True

    def setup(self, task: Task) -> None:
        """Forget the answer before."""
        self._answer = None

    def respond(self, message: Message) -> Reply:
        """Raises ConfigError: nobody steps this environment."""
        raise ConfigError(
            f"{type(self).__name__} is driven by its own agent and cannot be stepped; run it with rollout_black_box"
        )

    async def play(self, base_url: str, budgets: Budgets) -> Outcome:
        """Let the agent work on the episode's task. See `SelfDriven`."""
        if isinstance(self.agent, str):
            done = await on_background(run_command_line(self.agent, self.task, base_url))
        else:
            done = await self._call(self.agent, base_url)
        if done is None:
            return Outcome.error(AGENT_FAILED)
        self._answer = done
        return Outcome.terminated()

    async def _call(self, agent: AgentFunction, base_url: str) -> str | None:
        try:
            said = await agent(self.task, base_url)
        except (UserError, EpisodeError):
            raise
        except Exception as error:
            _log_failure(self.task, f"{type(error).__name__}: {error}")
            return None
        if said is not None and not isinstance(said, str):
            raise ConfigError(f"an agent must return its answer as text, or None; got {type(said).__name__}")
        return said or ""

    def grade(self) -> Any:
        """The grader's verdict on the answer; on an empty one where a budget ended the episode."""
        return self.grader(self.task.answer, self._answer or "")

    @property
    def episode_info(self) -> Mapping[str, Any]:
        """The answer, as it is kept with the episode."""
        return {} if self._answer is None else {"response": self._answer}


async def run_command_line(command: str, task: Task, base_url: str) -> str | None:
    """What a command printed, None where it failed; it is ended, with all that it started, when this is cancelled."""
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="sao-gym-agent-")
    told = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": "none",
        "SAO_GYM_TASK_ID": task.id,
    }
    process: asyncio.subprocess.Process | None = None
    try:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **told},
            cwd=folder,
            start_new_session=True,
        )
        out, complaint, _ = await asyncio.gather(
            _head(process.stdout, ANSWER_BYTES), _tail(process.stderr), _feed(process.stdin, task.prompt)
        )
        code = await process.wait()
        if code:
            _log_failure(task, f"exit code {code}: {complaint.decode(errors='replace')}")
            return None
        return out.decode(errors="replace")
    finally:
        if process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        shutil.rmtree(folder, ignore_errors=True)


async def _feed(stdin: asyncio.StreamWriter | None, text: str) -> None:
    if stdin is not None:
        with suppress(OSError):  # an agent need not read its prompt
            stdin.write(text.encode("utf-8", "replace"))
            await stdin.drain()
        stdin.close()


async def _head(stream: asyncio.StreamReader | None, most: int) -> bytes:
    kept = b""
    while stream is not None and (data := await stream.read(65536)):
        kept += data[: most - len(kept)]
    return kept


async def _tail(stream: asyncio.StreamReader | None) -> bytes:
    kept = b""
    while stream is not None and (data := await stream.read(65536)):
        kept = (kept + data)[-TAIL:]
    return kept


def _log_failure(task: Task, why: str) -> None:
    import logging

    logging.getLogger(__name__).warning("the agent of task %s failed (%s)", task.id, " ".join(why.split())[-TAIL:])


def _is_async(function: Any) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - an object may stand for a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
