"""The other protocols: the same calls, the same tree. Case GW-07."""

import json
from typing import Any

import openai
import pytest
from gateway_world import CHAT, TOOLS, Agent, calls, engine_of, reasons, said, system, user

from sao_gym.gateway.turns import results_first

HISTORY = [system("You work."), user("Weather in Paris?")]
TWO = calls("paris", "new york", before="Both. ")
AFTER = "<|tool|>A<|end|><|tool|>Error: B<|end|><|user|>and New York?\n\ngo on<|end|><|assistant|>"
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}}
ANTHROPIC = {"system": "You work.", "tools": [{"name": "python", "description": "Runs.", "input_schema": SCHEMA}]}
FLAT = [{"type": "function", "name": "python", "description": "Runs.", "parameters": SCHEMA}]


async def posted(agent: Agent, path: str, body: Any) -> dict[str, Any]:
    answer = await agent.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_results_among_other_blocks_of_anthropics_protocol() -> None:
    """Case GW-07: in call order, directly after the call; then the texts as one turn; the error marked."""
    agent = Agent(engine_of(TWO, "done"))
    body: dict[str, Any] = {**ANTHROPIC, "max_tokens": 500, "messages": [user("Weather in Paris?")]}
    first = await posted(agent, "/messages", body)
    kinds = [block["type"] for block in first["content"]]
    assert (kinds, first["stop_reason"]) == (["text", "tool_use", "tool_use"], "tool_use")
    t1, t2 = (block["id"] for block in first["content"][1:])
    blocks = [
        {"type": "text", "text": "and New York?"},
        {"type": "tool_result", "tool_use_id": t2, "content": "B", "is_error": True},
        {"type": "tool_result", "tool_use_id": t1, "content": [{"type": "text", "text": "A"}]},
        {"type": "text", "text": "go on"},
    ]
    body["messages"] += [{"role": "assistant", "content": first["content"]}, user(blocks)]
    second = await posted(agent, "/messages", body)
    assert second["content"] == [{"type": "text", "text": "done"}]
    assert second["stop_reason"] == "end_turn"
    await check_two_turns(agent)


async def test_results_among_other_items_of_responses() -> None:
    """Case GW-07."""
    agent = Agent(engine_of(TWO, "done"))
    body: dict[str, Any] = {"instructions": "You work.", "tools": FLAT, "input": [user("Weather in Paris?")]}
    first = await posted(agent, "/responses", body)
    assert [item["type"] for item in first["output"]] == ["message", "function_call", "function_call"]
    c1, c2 = (item["call_id"] for item in first["output"][1:])
    body["input"] += [
        *first["output"],
        user([{"type": "input_text", "text": "and New York?"}]),
        {"type": "function_call_output", "call_id": c2, "output": "Error: B"},
        {"type": "function_call_output", "call_id": c1, "output": [{"type": "input_text", "text": "A"}]},
        user("go on"),
    ]
    second = await posted(agent, "/responses", body)
    assert second["output"][0]["content"][0]["text"] == "done"
    await check_two_turns(agent)


async def test_a_response_is_continued_by_its_id() -> None:
    agent = Agent(engine_of(TWO, "done", "again"))
    body: dict[str, Any] = {"instructions": "You work.", "tools": FLAT}
    first = await posted(agent, "/responses", {**body, "input": "Weather in Paris?"})
    c1, c2 = (item["call_id"] for item in first["output"][1:])
    items = [
        user("and New York?"),
        {"type": "function_call_output", "call_id": c2, "output": "Error: B"},
        {"type": "function_call_output", "call_id": c1, "output": "A"},
        user("go on"),
    ]
    await posted(agent, "/responses", {**body, "input": items, "previous_response_id": first["id"]})
    await check_two_turns(agent)
    unknown = await agent.post("/responses", {"input": "x", "previous_response_id": "resp_9"})
    assert unknown.status_code == 401  # the episode was closed by the check
    agent = Agent(engine_of("a"))
    unknown = await agent.post("/responses", {"input": "x", "previous_response_id": "resp_9"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "previous_response_id")


async def check_two_turns(agent: Agent) -> None:
    record = await agent.close()
    (stream,) = record.streams
    assert CHAT.codec.decode(stream.segments[2].token_ids) == AFTER
    assert stream.actions[0].token_ids.tolist() == said(TWO)
    assert reasons(record) == {"start": 1, "continued": 1}
    assert record.info["echoes"] == {"exact": 1}


async def test_three_protocols_make_one_prompt() -> None:
    for path, body in (
        ("/chat/completions", {"messages": HISTORY, "tools": TOOLS}),
        ("/messages", {**ANTHROPIC, "messages": [user([{"type": "text", "text": "Weather in Paris?"}])]}),
        ("/responses", {"instructions": "You work.", "tools": FLAT, "input": "Weather in Paris?"}),
    ):
        agent = Agent(engine_of("a"))
        await posted(agent, path, body)
        (call,) = agent.engine.calls
        assert call.prompt.tolist() == CHAT.prompt(*_read(HISTORY, TOOLS)).tolist(), path


def _read(messages: Any, tools: Any) -> Any:
    from sao_gym.openai_format import message_from_openai, tool_from_openai

    return [message_from_openai(m) for m in messages], [tool_from_openai(t) for t in tools]


async def test_anthropics_events_spell_the_whole_answer() -> None:
    agent = Agent(engine_of(*["<think>hm</think>" + TWO] * 2))
    body = {**ANTHROPIC, "messages": [user("hi")]}
    wanted = await posted(agent, "/messages", body)
    raw = (await agent.post("/messages", {**body, "stream": True})).text
    blocks: list[dict[str, Any]] = []
    ends: dict[str, Any] = {}
    names = []
    for lines in raw.strip().split("\n\n"):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        names.append(event["type"])
        assert name == f"event: {event['type']}"
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            blocks[event["index"]]["said"] += next(v for k, v in delta.items() if k != "type")
        elif event["type"] == "message_delta":
            ends = event["delta"]
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert ends == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [b["said"] for b in blocks[:2]] == ["hm", wanted["content"][1]["text"]]
    assert [json.loads(b["said"]) for b in blocks[2:]] == [b["input"] for b in wanted["content"][2:]]


async def test_openais_client_reads_responses() -> None:
    agent = Agent(engine_of(*["<think>hm</think>" + TWO] * 2))
    async with openai.AsyncOpenAI(
        base_url="http://gateway" + agent.episode.path, api_key="x", http_client=agent.http
    ) as client:
        whole = await client.responses.create(model="policy", input="hi", tools=FLAT)  # type: ignore[call-overload]
        assert whole.output_text == "Both."
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        events = [e async for e in await client.responses.create(model="policy", input="hi", tools=FLAT, stream=True)]  # type: ignore[call-overload]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    spelled = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert spelled == [item.arguments for item in whole.output if item.type == "function_call"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Both."


async def test_a_cut_answer_in_each_protocol() -> None:
    for path, body, found in (
        ("/messages", {"messages": HISTORY[1:], "max_tokens": 3}, lambda a: a["stop_reason"] == "max_tokens"),
        ("/responses", {"input": "hi", "max_output_tokens": 3}, lambda a: a["status"] == "incomplete"),
        ("/completions", {"prompt": "hi", "max_tokens": 3}, lambda a: a["choices"][0]["finish_reason"] == "length"),
    ):
        agent = Agent(engine_of("long answer"))
        assert found(await posted(agent, path, body)), path
        assert (await agent.close()).outcome.reason == "turn_tokens"


async def test_stop_sequences_of_anthropics_protocol() -> None:
    agent = Agent(engine_of("one. STOP two"))
    answer = await posted(agent, "/messages", {"messages": HISTORY[1:], "stop_sequences": ["STOP"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
    assert answer["content"][0]["text"] == "one."


@pytest.mark.parametrize("as_ids", [False, True])
async def test_raw_completions_keep_their_ids(as_ids: bool) -> None:
    agent = Agent(engine_of("un der stand", "b", "c"))
    prompt = "<|user|>hi<|end|><|assistant|>"
    given: Any = CHAT.codec.encode(prompt) if as_ids else prompt
    first = await posted(agent, "/completions", {"prompt": given, "logprobs": 1})
    assert first["choices"][0]["text"] == "un der stand"
    assert first["choices"][0]["logprobs"]["tokens"][0] == "u"
    if as_ids:
        more: Any = [*agent.nodes[0].token_ids().tolist(), *CHAT.codec.encode("<|user|>more<|end|><|assistant|>")]
    else:
        more = prompt + "un der stand" + "<|end|><|user|>more<|end|><|assistant|>"
    await posted(agent, "/completions", {"prompt": more})
    await posted(agent, "/completions", {"prompt": "other"})
    record = await agent.close()
    assert reasons(record) == {"start": 1, "continued": 1, "new_conversation": 1}
    assert [len(stream.actions) for stream in record.streams] == [2, 1]
    for bad in ([-1], [10**6], [], [1.5], ["a", "b"], None, ""):
        agent = Agent(engine_of("a"))
        assert (await agent.post("/completions", {"prompt": bad})).status_code == 400


UNSERVED = [
    ("/messages", {"messages": [user([{"type": "image", "source": {}}])]}),
    ("/messages", {"messages": [user("hi"), {"role": "assistant", "content": "Sure, "}]}),
    ("/messages", {"messages": [user("hi")], "tools": [{"type": "computer_20250124", "name": "computer"}]}),
    ("/messages", {"messages": [system("x"), user("hi")]}),
    ("/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/responses", {"input": "hi", "tools": [{"type": "web_search"}]}),
    ("/responses", {}),
    ("/completions", {"prompt": "hi", "best_of": 2}),
    ("/completions", {"prompt": "hi", "echo": True}),
    ("/chat/completions", {"messages": [user("hi")], "n": 2}),
    ("/chat/completions", {"messages": [user("hi")], "functions": [{"name": "f"}]}),
    ("/chat/completions", {"messages": [user("hi")], "tool_choice": "sometimes"}),
    ("/chat/completions", {"messages": []}),
]


@pytest.mark.parametrize(("path", "body"), UNSERVED)
async def test_what_is_not_served_is_said(path: str, body: Any) -> None:
    agent = Agent(engine_of("a"))
    answer = await agent.post(path, body)
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"]) > 10
    assert agent.engine.calls == []


def test_a_conversation_without_results_stays_as_it_is() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}
    records = [system("s"), user("a"), user("b"), called, user("never mind"), user("go on")]
    assert list(results_first(records)) == records
