"""OpenHands as a scaffold: its own agent, prompts and tools, unmodified; its terminal and its files are the sandbox's.

As its benchmark runs it: no condenser, so that the conversation only ever grows, native tool calls, no confirmation, 300
iterations; a message without a tool call is answered by a user who says to go on. The title that its server would ask for is
not asked for here, as there is no server.
"""

from collections.abc import Mapping
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.scaffolds.agent_program import REQUEST_S, AgentProgram
from sao_gym.protocols import AGENT_FAILED, Task
from sao_gym.stream import Outcome, TruncationReason

MAX_ITERATIONS = 300
MAX_CONTINUATIONS = 10
RETRIES = 4
PROMPT = "You work in the folder {workdir} of a Linux machine without network.\n\n{prompt}"
ENDED = ("finished", "talked", "stuck", "idle", "paused")


class OpenHandsScaffold(AgentProgram):
    """See the module. `prompt` is the first message, with {workdir} and {prompt} to be filled in."""

    kind, driver = "openhands", "openhands_driver.py"
    env: Mapping[str, str] = {"OPENHANDS_SUPPRESS_BANNER": "1", "LOG_LEVEL": "ERROR", "LOG_RICH_TRACEBACKS": "false"}

    def __init__(self, *, size: int = 4, warm: int = 0, prompt: str = PROMPT) -> None:
        super().__init__(size=size, warm=warm)
        self._prompt = prompt

    def request(self, task: Task, box: ShellSandbox, base_url: str, budgets: Budgets) -> dict[str, Any]:
        """See `AgentProgram`."""
        prompt = self._prompt.replace("{workdir}", box.spec.workdir).replace("{prompt}", task.prompt)
        return {
            "prompt": prompt,
            "base_url": base_url,
            "workdir": box.spec.workdir,
            "request_s": REQUEST_S,
            "retries": RETRIES,
            "max_turns": min(MAX_ITERATIONS, budgets.max_turns or MAX_ITERATIONS),
            "max_continuations": MAX_CONTINUATIONS,
            "output_bytes": box.spec.limits.output_bytes,
        }

    def outcome(self, result: Mapping[str, Any]) -> Outcome:
        """See `AgentProgram`."""
        status = str(result.get("status"))
        if status == "MaxIterationsReached":
            return Outcome.truncated(TruncationReason.TURNS)
        return Outcome.terminated() if status in ENDED else Outcome.error(AGENT_FAILED)
