"""Other ways of writing than our own: a family of `renderers`, and a checkpoint's own template."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_world import TOOLS, Agent, reasons, result, system, user
from tokenizers import AddedToken

from sao_gym.chat import make_chat
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.tokenizer import train_tokenizer

CONTROLS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "é"}}\n</tool_call>'


def template(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer(["user\nassistant\nsystem\n.\n\n"] * 4, vocab_size=300, specials=("<e>",))
    controls = [*CONTROLS, "<think>", "</think>"]
    made.add_tokens([AddedToken(text, special="|" in text, normalized=False) for text in controls])
    made.eos_token = "<|im_end|>"
    made.chat_template = template("qwen3")
    return made


@pytest.fixture(params=["renderer", "template", "own"])
def chat(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    if request.param == "renderer":
        return make_chat(tokenizer, "renderer", family="qwen3")
    return make_chat(tokenizer, request.param)


def saying(chat: Any, *texts: str) -> ScriptedEngine:
    left = [[*chat.codec.encode(text), chat.stop_token_ids[0]] for text in texts]
    return ScriptedEngine(lambda prompt: left.pop(0))


async def test_an_episode_is_one_stream(chat: Any) -> None:
    engine = saying(chat, "<think>\nhm\n</think>\n\nI run. " + CALL, CALL + CALL, "<think>so</think>done", "bye")
    agent = Agent(engine, chat=chat)
    messages = [system("You work."), user([{"type": "text", "text": "Do it."}])]
    for _ in range(2):
        message = await agent.ask(messages)
        echo = {key: value for key, value in message.items() if key != "reasoning_content"}
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"code": "é"}
        messages += [echo, *(result(message, f"r{place}", place) for place in range(len(message["tool_calls"])))]
    last = await agent.ask(messages)
    assert (last["content"], last["reasoning_content"]) == ("done", "so")
    await agent.ask([*messages, last, user("thanks")])
    record = await agent.close()
    assert reasons(record) == {"start": 1, "continued": 3}
    (stream,) = record.streams
    text = chat.codec.decode(stream.token_ids)
    assert text.count("<think>\nhm\n</think>") == 1  # sampled reasoning stays, though the template would drop it
    assert text.count("r0") == 2
    assert [chat.codec.decode(action.token_ids) for action in stream.actions][-1] == "bye<|im_end|>"


async def test_system_messages_where_the_family_takes_one(chat: Any) -> None:
    agent = Agent(saying(chat, "a", "b"), chat=chat)
    begun = [system("one"), system("two"), user("hi")]
    message = await agent.ask(begun)
    await agent.ask([*begun, message, system("three"), user("and?")])
    record = await agent.close()
    text = "".join(chat.codec.decode(stream.token_ids) for stream in record.streams)
    assert all(word in text for word in ("one", "two", "three", "and?"))
    assert record.info["calls"] == 2


async def test_an_assistant_turn_that_the_client_wrote(chat: Any) -> None:
    """Not sampled, so context wherever it stands; where a family cannot write it after an answer, a new stream begins."""
    agent = Agent(saying(chat, "a", "b"), chat=chat)
    shots = [user("1+1?"), {"role": "assistant", "content": "2"}, user("2+2?")]
    message = await agent.ask(shots)
    invented = {"role": "assistant", "content": "I also said this."}
    await agent.ask([*shots, message, user("hm"), invented, user("go on")])
    record = await agent.close()
    assert "I also said this." in "".join(chat.codec.decode(stream.token_ids) for stream in record.streams)
    assert set(reasons(record)) <= {"start", "continued", "unbridgeable"}
    assert sum(stream.n_action for stream in record.streams) == record.info["sampled_tokens"]


async def test_roles_in_an_order_that_cannot_be_written(chat: Any) -> None:
    said = [*chat.codec.encode("a"), chat.stop_token_ids[0]]
    agent = Agent(ScriptedEngine(lambda prompt: said), chat=chat)
    for messages in ([{"role": "tool", "content": "1"}], [{"role": "assistant", "content": "x"}], [system("only")]):
        answer = await agent.post("/chat/completions", {"messages": messages, "tools": TOOLS})
        assert answer.status_code in (200, 400)
    assert agent.episode.session.failure is None
    await agent.close()
