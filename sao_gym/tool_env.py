"""ToolEnv: an environment whose tools are plain Python functions.

Invariant: no tool call that a policy may write ends an episode or raises. What cannot be run is answered by an error
observation that says what was expected, counted by kind; what fails inside a tool is an observation as well. Only
errors of the infrastructure (`sao_gym.errors`) leave a step. A message without tool calls is the final answer.

Example:
    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> env = ToolEnv([Task(id="t", prompt="2+2?", answer="4")], tools=[add],
    ...               grader=lambda gold, response: Score(value=float(gold in response), passed=gold in response))
    >>> _ = env.reset(seed=0)
    >>> call = ToolCall(id="c0", name="add", arguments={"a": 2, "b": "2"})
    >>> env.step(Message.assistant(tool_calls=(call,)))[0][0].content
    "Error (wrong_type): argument 'b' of tool 'add' must be an integer, got the string '2'"
    >>> env.step("It is 4.")[1:4]
    (1.0, True, False)
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from sao_gym.agent_env import AgentEnv, Reply
from sao_gym.errors import ConfigError, SaoGymError
from sao_gym.loops import Caller
from sao_gym.messages import CallProblem, Message, ToolCall
from sao_gym.protocols import Task, TaskSet
from sao_gym.stream import Score
from sao_gym.tools import Tool, check_call, error_text, result_text, shortened

AnswerGrader = Callable[[str, str], Score | Awaitable[Score]]


class ToolEnv(AgentEnv):
    """An agent with tools. Hand in functions and a grader, or override `grade_final`.

    Calls of one message run in order, one at a time, so tools may share state without locks. A blocking tool runs in
    the thread that called `step`, or in a worker thread under `step_async`. Of a result longer than `max_result_chars`
    the middle is left out, and the policy is told how much. `grader(gold, response)`, plain or `async`,
    judges the text of the policy's last message.
    """

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        tools: Sequence[Callable[..., Any] | Tool] = (),
        grader: AnswerGrader | None = None,
        max_turns: int | None = None,
        max_calls_per_turn: int = 8,
        max_result_chars: int = 100_000,
        system_prompt: str = "",
    ) -> None:
        if callable(tools) or isinstance(tools, str | Tool):
            raise ConfigError(f"tools must be a list of functions, got {type(tools).__name__}; put it in a list")
        if max_calls_per_turn < 1 or max_result_chars < 1:
            raise ConfigError("max_calls_per_turn and max_result_chars must be at least 1")
        made = [tool if isinstance(tool, Tool) else Tool.from_function(tool) for tool in tools]
        twice = [name for name, count in Counter(tool.spec.name for tool in made).items() if count > 1]
        if twice:
            raise ConfigError(f"two tools are named {twice[0]!r}; tool names must differ")
        super().__init__(tasks, tools=[tool.spec for tool in made], max_turns=max_turns)
        self._tools = {tool.spec.name: tool for tool in made}
        self.grader = grader
        self.max_result_chars = max_result_chars
        self.max_calls_per_turn = max_calls_per_turn
        self.system_prompt = system_prompt
        self.call_problems: Counter[str] = Counter()

    def opening(self, task: Task) -> Any:
        """The system prompt, if there is one, and the task's prompt."""
        system = (Message.system(self.system_prompt),) if self.system_prompt else ()
        return (*system, Message.user(task.prompt))

    def setup(self, task: Task) -> Any:
        """Start the episode's count of problems. A subclass that overrides this calls it."""
        self.call_problems = Counter()

    def grade(self) -> Any:
        """Judge the policy's last message, whole or cut; see `grade_final`."""
        return self.grade_final(self.last_action)

    def grade_final(self, message: Message | None) -> Any:
        """The `Score` of the last message; None stands for a policy that never spoke. Without a grader: the rewards."""
        if self.grader is None:
            return super().grade()
        return self.grader(self.task.answer, message.content if message else "")

    @property
    def is_graded_from_record(self) -> bool:
        """True with a grader of answers, unless a subclass grades in a way of its own and does not say so."""
        kind = type(self)
        is_own = kind.grade is not ToolEnv.grade or kind.grade_final is not ToolEnv.grade_final
        return self.grader is not None and not is_own

    async def _respond(self, call: Caller, message: Message) -> Reply:
        if not message.tool_calls:
            return Reply(is_final=True)
        answers, problems = [], Counter[str]()
        for index, tool_call in enumerate(message.tool_calls):
            text, problem = await self._run(call, tool_call, is_extra=index >= self.max_calls_per_turn)
            answers.append(Message.tool(text, call=tool_call))
            if problem:
                problems[problem.value] += 1
        self.call_problems.update(problems)
        return Reply(messages=tuple(answers), info={"call_problems": dict(problems)})

    async def _run(self, call: Caller, tool_call: ToolCall, *, is_extra: bool) -> tuple[str, CallProblem | None]:
        """A tool's answer, or the text of the problem and its kind."""
        if is_extra:
            return (
                f"Error ({CallProblem.TOO_MANY_CALLS}): at most {self.max_calls_per_turn} calls run per turn",
                CallProblem.TOO_MANY_CALLS,
            )
        checked = check_call(tool_call, self._tools)
        if checked.problem:
            return f"Error ({checked.problem}): {checked.detail}", checked.problem
        try:
            text = result_text(await call(self._tools[tool_call.name].function, **checked.arguments))
        except SaoGymError:
            raise
        except Exception as error:
            text = f"Error: {error_text(error)}"
        return shortened(text, self.max_result_chars), None
