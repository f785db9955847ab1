"""An API as the policy of an evaluation, over real sockets: every way it may answer, and every way it may fail."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock, VirtualClock
from sao_gym.conversation import conversation_of, turns_of
from sao_gym.core import Reply as EnvReply
from sao_gym.core import ToolEnv
from sao_gym.errors import ApiError, ConfigError, GradingError, SandboxError, TaskFileError
from sao_gym.evaluation import EpisodeRun, evaluate
from sao_gym.messages import CallProblem, Message
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.protocols import Sampling, Task, request_seed
from sao_gym.registry import make
from sao_gym.remote import RemoteRunner
from sao_gym.remote_policy import RemotePolicy
from sao_gym.retries import RetryRule
from sao_gym.rollout import Episode
from sao_gym.stream import OutcomeStatus, Score
from sao_gym.usage import Prices

KEY = "sk-test-0123456789abcdef"
TASK = Task(id="t", prompt="What is 2+3?", answer="5")
QUICK = RetryRule(max_retries=3, first_wait_s=0.001, max_wait_s=0.002)


@pytest.fixture(autouse=True)
def _no_key_and_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


# -- a server that says what a test tells it to


@dataclass(frozen=True)
class Sent:
    """What the server sends. `is_cut`: the connection ends in the middle of the body."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    is_cut: bool = False


@dataclass
class Server:
    """`say(request, n)` answers the n-th request; `requests` and `headers` hold what came."""

    say: Callable[[dict[str, Any], int], Sent]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    base: str = ""


@contextmanager
def serving(say: Callable[[dict[str, Any], int], Sent]) -> Iterator[Server]:
    server = Server(say)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.requests.append(request)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                n = len(server.requests) - 1
            sent = server.say(request, n)
            body = sent.body if isinstance(sent.body, bytes) else json.dumps(sent.body).encode()
            self.send_response(sent.status)
            for name, value in sent.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if sent.is_cut else body)
            self.close_connection = sent.is_cut

        def log_message(self, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: Any) -> None:
            pass

    with Quiet(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.base = f"http://127.0.0.1:{listening.server_address[1]}/v1"
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


def says(content: Any = "", *, finish: str = "stop", usage: Any = (10, 5), **more: Any) -> Sent:
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1]} if isinstance(usage, tuple) else usage
    choice = {"message": {"role": "assistant", "content": content, **more}, "finish_reason": finish}
    body = {"model": "m-1", "system_fingerprint": "fp", "choices": [choice], "usage": counts}
    return Sent({name: value for name, value in body.items() if value is not None})


def calls(*arguments: Any, name: str = "add", **more: Any) -> Sent:
    listed = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, given in enumerate(arguments)
    ]
    return says(None, finish=more.pop("finish", "tool_calls"), tool_calls=listed, **more)


def fails(status: int, message: str = "no", code: str | None = None, **headers: str) -> Sent:
    return Sent(
        {"error": {"message": message, "code": code}}, status, {k.replace("_", "-"): v for k, v in headers.items()}
    )


def in_turn(*sent: Sent) -> Callable[[dict[str, Any], int], Sent]:
    return lambda request, n: sent[n] if n < len(sent) else sent[-1]


ADD = calls('{"a": 2, "b": 3}')
FIVE = says("5")


# -- an environment, and one run in it


class Sums(ToolEnv):
    """Add with a tool; the last message holds the answer. `at` says what fails where."""

    def __init__(self, at: dict[str, Exception] | None = None, max_turns: int | None = None) -> None:
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        def grade(gold: str, response: str) -> Score:
            self.fail("grade")
            return Score(value=float(gold in response), passed=gold in response, detail=response)

        super().__init__([TASK], tools=[add], grader=grade, max_turns=max_turns)
        self.at, self.closed = at or {}, 0

    def fail(self, place: str) -> None:
        if place in self.at:
            raise self.at[place]

    def setup(self, task: Task) -> None:
        super().setup(task)
        self.fail("reset")

    async def close_async(self) -> None:
        self.closed += 1
        await super().close_async()

    async def _respond(self, call: Any, message: Message) -> EnvReply:
        self.fail("step")
        return await super()._respond(call, message)


def an_episode(attempt: int = 0, task: Task = TASK) -> Episode:
    return Episode(uid=f"e{attempt}", task=task, env_id="sums", attempt=attempt, run_seed=0)


def a_runner(
    base: str, *, env: Any = None, clock: Any = None, sampling: Sampling | None = None, **more: Any
) -> RemoteRunner:
    budgets = more.pop("budgets", Budgets(max_turns=6))
    policy = RemotePolicy(api_base=base, model="m", **{"retries": QUICK, **more})
    return RemoteRunner(
        policy=policy,
        make_env=env or Sums,
        budgets=budgets,
        sampling=sampling or Sampling(max_tokens=64),
        clock=clock or SystemClock(),
        rng=random.Random(0),
    )


async def run(server: Server, **options: Any) -> EpisodeRun:
    runner = a_runner(server.base, **options)
    try:
        return await runner.run(an_episode())
    finally:
        await runner.close()


def outcome(made: EpisodeRun) -> tuple[str, str | None, str | None]:
    return made.trajectory.outcome.status.value, made.trajectory.outcome.reason, made.stage


# -- episodes that go well


def compute(request: dict[str, Any], n: int) -> Sent:
    """Computes with the python tool what the user asked for, then boxes it."""
    last = request["messages"][-1]
    if last["role"] == "user":
        steps, _, asked = last["content"].removesuffix("=?").rpartition("; ")
        return calls(json.dumps({"code": f"{steps}\nprint({asked})"}), name="python")
    return says(rf"\boxed{{{last['content'].strip()}}}")


async def test_arithmetic_is_solved_over_two_turns_and_the_record_goes_to_parquet_and_back(tmp_path: Path) -> None:
    env = make("arithmetic")
    task = env.unwrapped.tasks[3]  # type: ignore[attr-defined]
    with serving(compute) as server:
        runner = a_runner(server.base, env=lambda: env, prices=Prices(tokens_in=1.0, tokens_out=4.0))
        made = await runner.run(an_episode(2, task))
        await runner.close()
    record = made.trajectory
    assert outcome(made) == ("terminated", None, None)
    assert record.score is not None
    assert record.score.passed
    assert (record.task_id, record.attempt, record.streams, turns_of(record)) == (task.id, 2, (), 2)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.requests) == (20, 10, 2)
    assert made.usage.cost == pytest.approx((20 * 1 + 10 * 4) / 1e6)
    assert runner.usage == made.usage
    assert runner.facts.models == {"m-1": 2}
    # what was sent
    first, second = server.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["python"]
    assert first["tools"][0]["function"]["parameters"]["required"] == ["code"]
    assert (first["model"], first["temperature"], first["top_p"], first["max_tokens"]) == ("m", 1.0, 1.0, 64)
    assert [r["seed"] for r in server.requests] == [request_seed(0, task.id, 2, 0, i) % 2**31 for i in range(2)]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]
    assert second["messages"][2]["tool_call_id"] == second["messages"][1]["tool_calls"][0]["id"] == "c0"
    assert "authorization" not in server.headers[0]
    # what was kept
    write_trajectories(tmp_path / "a.parquet", [record])
    (back,) = read_trajectories(tmp_path / "a.parquet")
    assert back == record
    said = conversation_of(back)
    assert said is not None
    assert [message.role for message in said] == ["user", "assistant", "tool", "assistant"]
    assert said[-1].content == made.text
    # graded again from the record alone
    assert env.unwrapped.grader(task.answer, said[-1].content) == record.score  # type: ignore[attr-defined]
    env.close()


async def test_python_math_is_solved_with_state_over_the_turns() -> None:
    steps = (
        calls('{"code": "x = 6"}', name="python"),
        calls('{"code": "x * 7"}', name="python"),
        says(r"So \boxed{42}."),
    )
    env = make("python_math", tasks=[TASK])
    with serving(in_turn(*steps)) as server:
        runner = a_runner(server.base, env=lambda: env)
        made = await runner.run(an_episode(0, Task(id="m", prompt="6 times 7?", answer="42")))
        await runner.close()
    assert made.trajectory.score is not None
    assert made.trajectory.score.passed
    assert server.requests[2]["messages"][-1]["content"] == "42"
    assert server.requests[0]["messages"][0]["role"] == "system"
    env.close()


async def test_an_evaluation_over_an_api_keeps_errors_apart() -> None:
    def say(request: dict[str, Any], n: int) -> Sent:
        return fails(400, "flagged", "content_filter") if "bad" in request["messages"][0]["content"] else FIVE

    tasks = [TASK, Task(id="bad", prompt="bad", answer="5"), Task(id="other", prompt="?", answer="6")]
    with serving(say) as server:
        runner = a_runner(server.base)
        made = await evaluate(runner=runner, tasks=tasks, samples=2, clock=SystemClock(), seed=0, concurrency=3)
    summary = made.summary
    assert (summary.n_scored, summary.n_passed, summary.n_error) == (4, 2, 2)
    assert summary.errors == {"generate: content_filter": 2}
    assert [result.turns for result in made.results] == [1, 1, 0, 0, 1, 1]
    assert sum(result.usage.completion_tokens for result in made.results) == runner.usage.completion_tokens == 20
    assert len({request["seed"] for request in server.requests}) == 6


# -- what a policy may write


async def test_malformed_arguments_reach_the_environment_and_go_back_as_they_came() -> None:
    with serving(in_turn(calls("{oops"), calls("[1]"), ADD, FIVE)) as server:
        made = await run(server)
    assert outcome(made) == ("terminated", None, None)
    assert made.trajectory.score is not None
    assert made.trajectory.score.passed
    assert made.trajectory.info["call_problems"] == {"invalid_json": 1, "not_an_object": 1}
    seen = server.requests[-1]["messages"]
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == "{oops"
    assert seen[2]["content"].startswith("Error (invalid_json)")
    said = conversation_of(made.trajectory)
    assert said is not None
    assert said[1].tool_calls[0].problem is CallProblem.INVALID_JSON
    assert said[3].tool_calls[0].problem is CallProblem.NOT_AN_OBJECT


async def test_a_server_that_cannot_read_such_arguments_again_gets_them_wrapped() -> None:
    def say(request: dict[str, Any], n: int) -> Sent:
        try:
            for message in request["messages"]:
                for call in message.get("tool_calls") or ():
                    json.loads(call["function"]["arguments"])
        except ValueError:
            return fails(400, "Expecting property name enclosed in double quotes")
        return (calls("{oops"), FIVE)[len(request["messages"]) > 1]

    with serving(say) as server:
        made = await run(server)
    assert outcome(made) == ("terminated", None, None)
    (call,) = server.requests[-1]["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"unreadable": "{oops"}
    assert len(server.requests) == 3


async def test_two_calls_in_one_message_get_two_answers_whatever_their_ids() -> None:
    both = calls('{"a": 1, "b": 1}', '{"a": 2, "b": 3}')
    for call in both.body["choices"][0]["message"]["tool_calls"]:
        call["id"] = ""
    with serving(in_turn(both, FIVE)) as server:
        made = await run(server)
    _, said, first, second = server.requests[1]["messages"]
    assert (first["content"], second["content"]) == ("2", "5")
    ids = [call["id"] for call in said["tool_calls"]]
    assert ids == [first["tool_call_id"], second["tool_call_id"]]
    assert len(set(ids)) == 2
    assert made.trajectory.score is not None


@pytest.mark.parametrize("content", ["", None, []])
async def test_an_empty_answer_is_a_wrong_one_and_no_failure(content: Any) -> None:
    with serving(in_turn(says(content))) as server:
        made = await run(server)
    assert outcome(made) == ("terminated", None, None)
    assert made.trajectory.score is not None
    assert (made.trajectory.score.value, made.text) == (0.0, "")


async def test_half_characters_go_back_to_the_api_and_into_the_record(tmp_path: Path) -> None:
    def say(request: dict[str, Any], n: int) -> Sent:
        if n:
            return FIVE
        sent = calls('{"a": 1}')
        sent.body["choices"][0]["message"]["content"] = "\ud83d"
        return sent

    with serving(say) as server:
        made = await run(server)
    assert server.requests[1]["messages"][1]["content"] == "\ud83d"
    write_trajectories(tmp_path / "a.parquet", [made.trajectory])
    assert turns_of(read_trajectories(tmp_path / "a.parquet")[0]) == 2


@pytest.mark.parametrize("is_returned", [True, False])
async def test_reasoning_is_kept_and_sent_back_unless_switched_off(is_returned: bool) -> None:
    steps = (calls('{"a": 2, "b": 3}', reasoning_content="let me add"), says("5", reasoning_content="done"))
    with serving(in_turn(*steps)) as server:
        made = await run(server, returns_reasoning=is_returned)
    said = conversation_of(made.trajectory)
    assert said is not None
    assert (said[1].reasoning, said[-1].reasoning, said[-1].content) == ("let me add", "done", "5")
    assert ("reasoning_content" in server.requests[1]["messages"][1]) is is_returned


# -- budgets and truncation


async def test_an_answer_cut_by_the_length_ends_the_episode_and_none_of_its_calls_runs() -> None:
    with serving(in_turn(calls('{"a": 2, "b": 3}', finish="length", usage=(10, 64)))) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "turn_tokens", None)
    assert made.trajectory.score is not None
    assert (made.trajectory.score.passed, len(server.requests)) == (False, 1)
    said = conversation_of(made.trajectory)
    assert said is not None
    assert said[-1].is_truncated
    assert said[-1].tool_calls[0].problem is CallProblem.UNCLOSED


async def test_a_cut_answer_is_graded_as_it_stands() -> None:
    with serving(in_turn(says("it is 5, bec", finish="length", usage=(10, 64)))) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "turn_tokens", None)
    assert made.trajectory.score is not None
    assert made.trajectory.score.passed


async def test_an_answer_shorter_than_asked_for_was_cut_by_the_context() -> None:
    with serving(in_turn(says("it", finish="length", usage=(10, 20)))) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "context", None)


OVER = fails(400, "This model's maximum context length is 100 tokens. However, you requested 140 tokens.")


async def test_where_the_context_is_nearly_full_the_api_gives_what_is_left() -> None:
    def say(request: dict[str, Any], n: int) -> Sent:
        return OVER if "max_tokens" in request else says("5", finish="length", usage=(90, 10))

    with serving(say) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "context", None)
    assert made.trajectory.score is not None
    assert made.trajectory.score.passed
    assert [request.get("max_tokens") for request in server.requests] == [64, None]


async def test_a_conversation_that_outgrows_the_context_is_truncated_and_graded() -> None:
    with serving(in_turn(ADD, OVER)) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "context", None)
    assert made.trajectory.score is not None
    assert (made.trajectory.score.passed, turns_of(made.trajectory)) == (False, 1)


async def test_what_a_grade_adds_after_the_last_step_is_that_actions_reward() -> None:
    said = calls('{"a": 2, "b": 3}')
    said.body["choices"][0]["message"]["content"] = "I think 5"
    with serving(in_turn(ADD, said, OVER)) as server:
        made = await run(server)
    assert outcome(made) == ("truncated", "context", None)
    assert made.trajectory.score is not None
    assert (made.trajectory.score.value, made.trajectory.info["rewards"]) == (1.0, [0.0, 1.0])


async def test_a_prompt_that_does_not_fit_is_an_error() -> None:
    with serving(in_turn(OVER)) as server:
        made = await run(server)
    assert outcome(made) == ("error", "prompt_too_long", "generate")
    assert made.trajectory.score is None


async def test_turns_are_counted_by_the_budget() -> None:
    with serving(in_turn(ADD)) as server:
        made = await run(server, budgets=Budgets(max_turns=3))
    assert outcome(made) == ("truncated", "turns", None)
    assert len(server.requests) == turns_of(made.trajectory) == 3


async def test_tokens_of_the_episode_are_what_the_api_says() -> None:
    with serving(
        in_turn(calls('{"a": 2, "b": 3}', usage=(50, 30)), calls('{"a": 2, "b": 3}', usage=(90, 20)))
    ) as server:
        made = await run(server, budgets=Budgets(max_tokens_per_episode=100))
    assert outcome(made) == ("truncated", "episode_tokens", None)
    assert [request["max_tokens"] for request in server.requests] == [64, 20]


async def test_without_usage_tokens_are_unknown_and_a_budget_of_tokens_is_refused() -> None:
    with serving(in_turn(calls('{"a": 2, "b": 3}', usage=None), FIVE)) as server:
        made = await run(server)
        assert (made.usage.unmetered, made.usage.completion_tokens, made.usage.requests) == (1, 5, 2)
        server.requests.clear()
        with pytest.raises(ConfigError, match="max_tokens_per_episode 100 cannot be kept"):
            await run(server, budgets=Budgets(max_tokens_per_episode=100))


# -- failures of the API


async def waited(server: Server, **options: Any) -> tuple[EpisodeRun, float]:
    """An episode under a virtual clock, and the seconds that it took there."""
    clock = VirtualClock()
    work = asyncio.ensure_future(run(server, clock=clock, **options))
    await clock.run(
        work.done, has_others=True
    )  # sockets; time itself is virtual, and only waits before retries spend it
    return work.result(), clock.now()


async def test_a_429_is_waited_for_as_long_as_the_server_says() -> None:
    with serving(in_turn(fails(429, retry_after="7"), FIVE)) as server:
        made, seconds = await waited(server, retries=RetryRule(first_wait_s=1.0, max_wait_s=60.0))
    assert outcome(made) == ("terminated", None, None)
    assert 7.0 <= seconds <= 8.0
    assert (made.usage.requests, made.usage.retries) == (2, 1)
    assert made.trajectory.timings["retry_wait_s"] == pytest.approx(seconds)


async def test_no_wait_is_longer_than_the_longest_and_waits_grow() -> None:
    limits = {"retries": RetryRule(max_retries=4, first_wait_s=1.0, max_wait_s=10.0)}
    with serving(in_turn(fails(429, retry_after="86400"), FIVE)) as server:
        assert (await waited(server, **limits))[1] == 10.0
    with serving(in_turn(*[fails(503)] * 4, FIVE)) as server:
        made, seconds = await waited(server, **limits)
    assert made.trajectory.score is not None
    assert 0.5 * 15 <= seconds <= 15  # 1 + 2 + 4 + 8, of each at least half


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (fails(500), "server_error"),
        (Sent(b"<html>502 Bad Gateway</html>", 502), "server_error"),
        (fails(408), "server_error"),
        (fails(429), "rate_limited"),
        (Sent(b"not json"), "bad_answer"),
        (Sent(b"\xff\xfe"), "bad_answer"),
        (Sent({"choices": []}), "bad_answer"),
        (Sent([1]), "bad_answer"),
        (Sent({"error": {"message": "upstream", "code": 502}}), "server_error"),
        (says("hm", finish="error"), "server_error"),
        (says({"no": "text"}), "bad_answer"),
        (says("", tool_calls=[7]), "bad_answer"),
    ],
)
async def test_trap_15_failures_past_the_retries_are_errors_and_no_reward(sent: Sent, kind: str) -> None:
    with serving(in_turn(ADD, sent)) as server:
        made = await run(server)
    assert outcome(made) == ("error", kind, "generate")
    assert made.trajectory.score is None
    assert len(server.requests) == 1 + 1 + QUICK.max_retries
    assert made.usage.retries == QUICK.max_retries
    assert turns_of(made.trajectory) == 1, "what was said stays in the record"


@pytest.mark.parametrize("sent", [Sent(FIVE.body, is_cut=True), Sent(b"garbage"), fails(500), fails(409)])
async def test_one_failure_is_forgotten(sent: Sent) -> None:
    with serving(in_turn(sent, FIVE)) as server:
        made = await run(server)
    assert outcome(made) == ("terminated", None, None)
    assert (made.usage.requests, made.usage.retries) == (2, 1)
    assert made.usage.unmetered == (sent.body == b"garbage")


async def test_the_runs_retries_are_a_budget_for_all_episodes() -> None:
    with serving(in_turn(FIVE, fails(500))) as server:
        runner = a_runner(server.base, retries=RetryRule(max_retries=3, first_wait_s=0.001, max_wait_s=0.002, budget=4))
        made = [await runner.run(an_episode(i)) for i in range(4)]
        await runner.close()
    assert [run.usage.retries for run in made] == [0, 3, 1, 0]
    assert [run.trajectory.outcome.status for run in made] == [OutcomeStatus.TERMINATED, *[OutcomeStatus.ERROR] * 3]


async def test_an_answer_that_never_comes_is_given_up() -> None:
    gate = threading.Event()

    def say(request: dict[str, Any], n: int) -> Sent:
        gate.wait(20)
        return FIVE

    with serving(say) as server:
        made = await run(server, timeout_s=0.1, retries=RetryRule(max_retries=1, first_wait_s=0.001, max_wait_s=0.002))
        gate.set()
    assert outcome(made) == ("error", "api_timeout", "generate")


async def test_time_that_runs_out_while_the_policy_answers_is_a_truncation() -> None:
    gate = threading.Event()

    def say(request: dict[str, Any], n: int) -> Sent:
        if n:
            gate.wait(20)
        return ADD

    with serving(say) as server:
        made = await run(server, budgets=Budgets(wall_clock_s=0.3))
        gate.set()
    assert outcome(made) == ("truncated", "wall_clock", None)
    assert made.trajectory.score is not None


async def test_time_that_runs_out_while_the_api_fails_is_an_error_and_no_wrong_answer() -> None:
    with serving(in_turn(ADD, fails(429))) as server:
        made = await run(
            server, budgets=Budgets(wall_clock_s=0.3), retries=RetryRule(first_wait_s=30.0, max_wait_s=30.0)
        )
    assert outcome(made) == ("error", "rate_limited", "generate")
    assert made.trajectory.score is None


async def test_a_content_filter_is_an_error_of_its_own_kind() -> None:
    for sent in (says("It", finish="content_filter"), fails(400, "content management policy"), fails(403, "flagged")):
        with serving(in_turn(sent)) as server:
            assert outcome(await run(server)) == ("error", "content_filter", "generate")
            assert len(server.requests) == 1


# -- failures that end the run


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (fails(401, "Incorrect API key provided"), "check the key in the environment variable OPENAI_API_KEY"),
        (fails(403, "no access"), "environment variable OPENAI_API_KEY"),
        (fails(404, "model m does not exist", "model_not_found"), "check the address and the name of the model"),
        (fails(402, "Insufficient Balance"), "no credit left"),
        (fails(429, "You exceeded your current quota", "insufficient_quota"), "no credit left"),
        (fails(400, "Unsupported parameter: 'top_p'"), "'top_p'; if it refuses a parameter"),
        (Sent(b"", 301, {"Location": "https://elsewhere/v1"}), "moved to https://elsewhere/v1"),
    ],
)
async def test_what_no_retry_can_help_ends_the_run_in_one_sentence(
    sent: Sent, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    env = Sums()
    with serving(in_turn(sent)) as server:
        with pytest.raises(ApiError) as caught:
            await run(server, env=lambda: env)
        assert len(server.requests) == 1
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert env.closed == 1


async def test_a_request_refused_after_others_passed_is_that_episodes_alone() -> None:
    with serving(in_turn(ADD, fails(400, "odd"))) as server:
        assert outcome(await run(server)) == ("error", "bad_request", "generate")


async def test_a_key_that_dies_in_the_middle_ends_the_run() -> None:
    words = "set an API key in the environment variable OPENAI_API_KEY"
    with serving(in_turn(ADD, fails(401))) as server, pytest.raises(ApiError, match=words):
        await run(server)


async def test_a_server_that_is_not_there_ends_the_run() -> None:
    with serving(in_turn(FIVE)) as server:
        pass
    with pytest.raises(ApiError, match=r"tried 4 times.*check the address"):
        await run(server)


async def test_the_key_stands_in_the_header_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    caplog.set_level(logging.DEBUG)
    echoes = (fails(503, f"key {KEY} is busy"), ADD, Sent(f"what is {KEY}?".encode(), 500))
    with serving(in_turn(*echoes)) as server:
        runner = a_runner(server.base, key_env="MY_KEY")
        made = await runner.run(an_episode())
        await runner.close()
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert outcome(made) == ("error", "server_error", "generate")
    write_trajectories(tmp_path / "a.parquet", [made.trajectory])
    shown = [caplog.text, repr(runner.policy), repr(made), (tmp_path / "a.parquet").read_bytes().decode("latin-1")]
    assert "[key]" in caplog.text
    for text in (*shown, json.dumps(server.requests)):
        assert KEY not in text
    refusal = fails(401, f"Incorrect API key provided: {KEY[:8]}***cdef")
    with serving(in_turn(refusal)) as server, pytest.raises(ApiError) as caught:
        await run(server, key_env="MY_KEY")
    assert KEY[:8] not in str(caught.value)
    assert "check the key in the environment variable MY_KEY" in str(caught.value)


# -- failures of the environment


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        ("reset", SandboxError("no image"), "sandbox"),
        ("step", SandboxError("died"), "sandbox"),
        ("step", RuntimeError("boom"), "RuntimeError"),
        ("grade", GradingError("no verdict"), "grading"),
        ("grade", ValueError("bug"), "grading"),
    ],
)
async def test_what_fails_in_the_environment_says_its_stage(place: str, error: Exception, reason: str) -> None:
    made_envs: list[Sums] = []

    def env() -> Sums:
        made_envs.append(Sums({place: error} if not made_envs else None))
        return made_envs[-1]

    with serving(in_turn(FIVE)) as server:
        runner = a_runner(server.base, env=env)
        first, second = await runner.run(an_episode()), await runner.run(an_episode(1))
        await runner.close()
    assert outcome(first) == ("error", reason, place)
    assert first.trajectory.score is None
    assert outcome(second) == ("terminated", None, None)
    assert [env.closed for env in made_envs] == [1, 1], "a failed episode's environment is thrown away"


async def test_a_users_mistake_ends_the_run_and_closes_the_environment() -> None:
    env = Sums({"step": ConfigError("wrong")})
    with serving(in_turn(FIVE)) as server, pytest.raises(ConfigError, match="wrong"):
        await run(server, env=lambda: env)
    assert env.closed == 1


class Doubled(gymnasium.RewardWrapper):  # type: ignore[type-arg]
    def reward(self, reward: Any) -> Any:
        return 2 * float(reward)


async def test_wrappers_are_not_bypassed() -> None:
    with serving(in_turn(ADD, FIVE)) as server:
        made = await run(server, env=lambda: Doubled(Sums()))
    assert made.trajectory.score is not None
    assert made.trajectory.score.value == 2.0
    assert made.trajectory.info["rewards"] == [0.0, 2.0]


# -- what is sent


async def test_parameters_are_left_out_renamed_and_added() -> None:
    with serving(in_turn(FIVE)) as server:
        await run(
            server,
            omit=("seed", "top_p"),
            max_tokens_field="max_completion_tokens",
            extra_body={"reasoning_effort": "low"},
            sampling=Sampling(max_tokens=9, temperature=0.5, top_k=20),
        )
    (request,) = server.requests
    assert {name: value for name, value in request.items() if name not in ("messages", "tools")} == {
        "model": "m",
        "temperature": 0.5,
        "max_completion_tokens": 9,
        "top_k": 20,
        "reasoning_effort": "low",
    }


# -- what may not be done with it


async def test_training_on_such_a_record_is_refused_in_one_sentence(tmp_path: Path) -> None:
    from sao_gym.trainer.loop import recorded_batches

    with serving(in_turn(FIVE)) as server:
        made = await run(server)
    write_trajectories(tmp_path / "a.parquet", [made.trajectory])
    with pytest.raises(TaskFileError, match="messages without token ids and log-probs"):
        next(recorded_batches(tmp_path, 1, 1))
