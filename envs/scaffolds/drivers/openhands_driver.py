"""Runs OpenHands in its own Python: its agent, prompts and tools, with a sandbox elsewhere under its tools.

Found in `openhands-sdk` + `openhands-tools`, which `openhands-ai` brings as well. The tools are OpenHands' own; only what
they stand on is ours: the terminal's session is a shell inside the sandbox (openhands_terminal.py), and files to be edited
are fetched from there and put back (openhands_files.py). A run: {"prompt", "base_url", "workdir", "request_s", "max_turns",
"max_continuations", "output_bytes"}. Its result: {"status", "answer", "calls"}.
"""

from driver_lines import Lines

lines = Lines()

import contextlib  # noqa: E402
import tempfile  # noqa: E402
from importlib.metadata import version  # noqa: E402
from typing import Any  # noqa: E402

from openhands.sdk import LLM, Agent, Conversation, Tool  # noqa: E402
from openhands.sdk.conversation.response_utils import get_agent_final_response  # noqa: E402
from openhands.sdk.event import ActionEvent, MessageEvent  # noqa: E402
from openhands.sdk.event.conversation_error import ConversationErrorEvent  # noqa: E402
from openhands.sdk.tool.builtins.finish import FinishTool  # noqa: E402
from openhands.tools.file_editor import FileEditorTool  # noqa: E402
from openhands.tools.task_tracker import TaskTrackerTool  # noqa: E402
from openhands.tools.terminal import TerminalTool  # noqa: E402
from openhands_files import SandboxFiles, use_files  # noqa: E402
from openhands_terminal import SandboxTerminal, use_terminal  # noqa: E402

GO_ON = (
    "Nobody is here to answer. Go on by yourself in the way that you find best, and call the finish tool once the task is "
    "done; do not ask for help."
)
"""What a user says to a message that ends nothing."""


def make_agent(given: dict[str, Any]) -> Agent:
    """OpenHands' default tools without a browser; no condenser, so that the history only ever grows."""
    llm = LLM(
        model="openai/policy",
        base_url=given["base_url"],
        api_key="none",
        usage_id="agent",
        native_tool_calling=True,
        caching_prompt=False,
        disable_vision=True,
        timeout=int(given["request_s"]),
        num_retries=given["retries"],
    )
    tools = [Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name), Tool(name=TaskTrackerTool.name)]
    return Agent(llm=llm, tools=tools, system_prompt_kwargs={"cli_mode": True}, condenser=None)


def require_sandboxed(conversation: Any) -> None:
    """Raise RuntimeError unless the tools that touch a machine stand on the sandbox: else they would work on this one."""
    conversation._ensure_agent_ready()
    tools = conversation.agent.tools_map
    terminal, files = tools[TerminalTool.name].executor, tools[FileEditorTool.name].executor
    harmless = {TerminalTool.name, FileEditorTool.name, TaskTrackerTool.name, "finish", "think"}
    if not isinstance(getattr(terminal.session, "terminal", None), SandboxTerminal) or not isinstance(
        files, SandboxFiles
    ):
        raise RuntimeError("this version of OpenHands made tools that do not stand on the sandbox")
    if unknown := set(tools) - harmless:
        raise RuntimeError(f"this version of OpenHands made further tools: {', '.join(sorted(unknown))}")


def has_finished(events: Any) -> bool:
    """Whether the agent itself declared the task done, rather than said something."""
    for event in reversed(list(events)):
        if isinstance(event, ActionEvent) and event.source == "agent":
            return bool(event.tool_name == FinishTool.name)
        if isinstance(event, MessageEvent) and event.source == "agent":
            return False
    return False


def play(conversation: Any, given: dict[str, Any]) -> str:
    """Run until the agent finishes, gives up, or has been told often enough to go on."""
    conversation.send_message(given["prompt"])
    status = ""
    for _ in range(given["max_continuations"] + 1):
        conversation.run()
        status = str(getattr(conversation.state.execution_status, "value", conversation.state.execution_status))
        if status != "finished":
            return problem_of(conversation) or status
        if has_finished(conversation.state.events):
            return status
        conversation.send_message(GO_ON)
    return "talked"


def problem_of(conversation: Any) -> str:
    """OpenHands' own word for the error that ended a run, if one did."""
    for event in reversed(list(conversation.state.events)):
        if isinstance(event, ConversationErrorEvent):
            return str(event.code)
    return ""


def run(given: dict[str, Any]) -> dict[str, Any]:
    """One episode."""
    with tempfile.TemporaryDirectory(prefix="episode-") as scratch:
        use_terminal(lines, given["workdir"], given["output_bytes"])
        use_files(lines, given["workdir"], scratch)
        agent = make_agent(given)
        conversation = Conversation(
            agent=agent,
            workspace=scratch,
            max_iteration_per_run=given["max_turns"],
            visualizer=None,
            stuck_detection=True,
        )
        try:
            require_sandboxed(conversation)
            status = play(conversation, given)
            events = list(conversation.state.events)
            calls = sum(isinstance(event, ActionEvent) for event in events)
            return {"status": status, "answer": get_agent_final_response(events), "calls": calls}
        finally:
            with contextlib.suppress(Exception):
                conversation.close()


lines.serve({"version": version("openhands-sdk")}, run)
