"""mini-swe-agent as a scaffold: its own agent, model client and prompts, unmodified; its commands run in the sandbox."""

from collections.abc import Mapping
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.scaffolds.agent_program import REQUEST_S, AgentProgram
from sao_gym.errors import ConfigError
from sao_gym.protocols import Task
from sao_gym.stream import Outcome, TruncationReason

COMMAND_S = 60
LIMITS = ("LimitsExceeded", "TimeExceeded")


class MiniScaffold(AgentProgram):
    """See the module. `config` names one of the program's own files of prompts, as mini.yaml."""

    kind, driver = "mini", "mini_driver.py"
    env: Mapping[str, str] = {
        "MSWEA_CONFIGURED": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "5",
    }

    def __init__(self, *, size: int = 4, warm: int = 0, config: str = "mini.yaml", command_s: int = COMMAND_S) -> None:
        super().__init__(size=size, warm=warm)
        if config.startswith("/") or ".." in config.split("/"):
            raise ConfigError(f"config is {config!r}; give the name of one of mini-swe-agent's own files, as mini.yaml")
        self._config, self._command_s = config, command_s

    def request(self, task: Task, box: ShellSandbox, base_url: str, budgets: Budgets) -> dict[str, Any]:
        """See `AgentProgram`."""
        return {
            "prompt": task.prompt,
            "base_url": base_url,
            "workdir": box.spec.workdir,
            "timeout_s": self._command_s,
            "request_s": REQUEST_S,
            "max_turns": budgets.max_turns or 0,
            "config": self._config,
        }

    def outcome(self, result: Mapping[str, Any]) -> Outcome:
        """See `AgentProgram`."""
        cut = result.get("status") in LIMITS
        return Outcome.truncated(TruncationReason.TURNS) if cut else Outcome.terminated()
