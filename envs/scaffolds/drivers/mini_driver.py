"""Runs mini-swe-agent in its own Python: its agent, model and prompts, with a sandbox elsewhere as its environment.

A run: {"prompt", "base_url", "workdir", "timeout_s", "request_s", "max_turns", "config"}. Its result: {"status", "answer", "calls"}.
"""

from driver_lines import Lines

lines = Lines()

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import litellm  # noqa: E402
import minisweagent  # noqa: E402
import yaml  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment, LocalEnvironmentConfig  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402


class SandboxEnvironment(LocalEnvironment):
    """mini's own environment, but that the command runs in the sandbox; how a submission is seen stays mini's."""

    def __init__(self, facts: dict[str, str], **settings: Any) -> None:
        self.config = LocalEnvironmentConfig(**settings)
        self._facts = facts

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run `action["command"]`; the same record as mini's own."""
        limit = timeout or self.config.timeout
        given = {"command": action.get("command", ""), "cwd": cwd or self.config.cwd, "env": self.config.env}
        done = lines.ask("exec", timeout_s=limit, merged=True, entered=True, **given)
        output = {"output": done["stdout"], "returncode": done["exit_code"], "exception_info": ""}
        if done["timed_out"]:
            why = f"Command {given['command']!r} timed out after {limit} seconds"
            output["returncode"] = -1
            output["exception_info"] = f"An error occurred while executing the command: {why}"
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """What prompts may say of the machine: the sandbox's, never this one's."""
        return {**self.config.model_dump(), **self._facts, **kwargs}


def machine() -> dict[str, str]:
    """system, node, release, version and machine of the sandbox, as `platform.uname` names them."""
    names = ("system", "node", "release", "version", "machine")
    asked = lines.ask("exec", command="for x in s n r v m; do uname -$x; done", timeout_s=20)["stdout"].split("\n")
    return dict(zip(names, [*asked, "", "", "", "", ""], strict=False))


def run(given: dict[str, Any]) -> dict[str, Any]:
    """One episode."""
    path = Path(minisweagent.__file__).parent / "config" / given["config"]
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    told = config.get("environment", {})
    env = SandboxEnvironment(machine(), cwd=given["workdir"], timeout=given["timeout_s"], env=told.get("env", {}))
    known = config.get("model", {})
    templates = {name: known[name] for name in ("observation_template", "format_error_template") if name in known}
    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={
            "api_base": given["base_url"],
            "api_key": "none",
            "drop_params": True,
            "timeout": given["request_s"],
            "max_retries": 0,
        },
        cost_tracking="ignore_errors",
        **templates,
    )
    model.abort_exceptions = [*model.abort_exceptions, litellm.exceptions.BadRequestError]  # what no retry can mend
    prompts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, env, step_limit=given["max_turns"], cost_limit=0.0, **prompts)
    ended = agent.run(given["prompt"])
    return {"status": ended.get("exit_status", ""), "answer": ended.get("submission", ""), "calls": agent.n_calls}


lines.serve({"version": minisweagent.__version__}, run)
