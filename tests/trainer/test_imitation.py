"""Imitation: labels are action tokens, whatever their ids; one seed gives one set of weights."""

import numpy as np
import pytest
import torch

from sao_gym.demonstrations import content_hash, conversations, demonstrator, read_conversations, tokenized
from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.messages import Message, ToolCall
from sao_gym.models import tiny_qwen3
from sao_gym.own_chat import OwnChat
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.registry import make_tasks
from sao_gym.trainer.batch import pack
from sao_gym.trainer.imitation import Imitation, ImitationConfig, learning_rate, row_order
from sao_gym.weights import module_tensors, weight_hash


@pytest.fixture(scope="module")
def chat():
    return OwnChat(byte_tokenizer())


def talks(chat, n=6):
    """Rows of different length, with turns that end in the middle and at the end of the row."""
    made = []
    for index in range(n):
        messages = [Message.user(f"say {index}"), Message.assistant("a" * (index + 1)), Message.user("and?")]
        made.append(tokenized([*messages, Message.assistant("b")], chat, uid=f"t{index}"))
    return made


def tiny(vocab_size=266, seed=3):
    return tiny_qwen3(vocab_size, layers=1, hidden=32, heads=2, kv_heads=1, seed=seed)


def test_labels_are_the_assistant_turns_with_their_stop_token(chat):
    packed = pack(talks(chat, 2))
    end = chat.stop_token_ids[0]
    text = chat.decode_action(packed.target_ids.astype(np.int32))
    assert text == "a<|end|>b<|end|>aa<|end|>b<|end|>"
    # Ends of the user's turns are in the packed tokens, and are no labels.
    assert (packed.token_ids == end).sum() > (packed.target_ids == end).sum() == 4


def test_padding_that_is_the_stop_token_changes_nothing(chat):
    """Case LR-03: labels and loss are the same for a tokenizer whose pad id is its stop id."""
    shared = byte_tokenizer()
    shared.pad_token = shared.eos_token
    other = OwnChat(shared)
    assert shared.pad_token_id == other.stop_token_ids[0] != byte_tokenizer().pad_token_id
    ours, theirs = pack(talks(chat)), pack(talks(other))
    assert ours.state_index.tolist() == theirs.state_index.tolist()
    assert ours.target_ids.tolist() == theirs.target_ids.tolist()
    losses = [Imitation(tiny(), ImitationConfig(), steps=1).loss(talks(c)) for c in (chat, other)]
    assert losses[0] == losses[1]


def test_the_stop_token_is_learnt(chat):
    """Case LR-03: the probability of ending the turn rises within 20 steps."""
    rows = talks(chat)
    packed = pack(rows)
    ends = torch.as_tensor(packed.target_ids == chat.stop_token_ids[0])
    imitation = Imitation(tiny(), ImitationConfig(lr=1e-2, lr_warmup_steps=0), steps=20)

    def stop_probability():
        from sao_gym.trainer.actor import Inputs

        with torch.no_grad():
            logprobs, _ = imitation.actor(Inputs.of(packed, torch.device("cpu")))
        return float(logprobs[ends].exp().mean())

    before = stop_probability()
    for _ in range(20):
        imitation.step(rows)
    assert stop_probability() > 10 * before


def test_loss_is_the_token_mean_however_the_batch_is_cut(chat):
    rows = talks(chat)
    whole = Imitation(tiny(), ImitationConfig(lr=1e-2), steps=1)
    pieces = Imitation(tiny(), ImitationConfig(lr=1e-2, micro_batch_tokens=40), steps=1)
    by_row = [(whole.loss([row]), row.n_action) for row in rows]
    expected = sum(loss * n for loss, n in by_row) / sum(n for _, n in by_row)
    first, second = whole.step(rows), pieces.step(rows)
    assert first.loss == pytest.approx(expected, rel=1e-5)
    assert second.loss == pytest.approx(first.loss, rel=1e-5)
    assert second.gradient_norm == pytest.approx(first.gradient_norm, rel=1e-4)


def test_the_loss_is_that_of_the_unmodified_model_at_action_tokens(chat):
    """Mean of -log pi(token | prefix before it), read from all logits of a plain forward pass."""
    row = talks(chat, 1)[0]
    model = tiny()
    imitation = Imitation(model, ImitationConfig(lr=0.0), steps=1)
    shown = imitation.loss([row])
    packed = pack([row])
    with torch.no_grad():
        logits = model(torch.as_tensor(packed.token_ids)[None]).logits[0].log_softmax(-1)
    chosen = logits[packed.state_index, packed.target_ids]
    assert shown == pytest.approx(-float(chosen.mean()), rel=1e-5)


def test_one_seed_gives_one_set_of_weights(chat):
    rows = talks(chat)

    def run(seed):
        model = tiny(seed=seed)
        imitation = Imitation(model, ImitationConfig(lr=1e-2), steps=5)
        for batch in row_order(len(rows), batch_size=4, steps=5, seed=seed):
            imitation.step([rows[index] for index in batch])
        return weight_hash(module_tensors(model))

    assert run(0) == run(0) != run(1)


def test_every_row_comes_once_before_one_comes_twice():
    drawn = [row for batch in row_order(5, batch_size=3, steps=5, seed=0) for row in batch]
    assert [sorted(drawn[i : i + 5]) for i in (0, 5, 10)] == [list(range(5))] * 3
    assert drawn[:5] != drawn[5:10]


def test_schedule():
    config = ImitationConfig(lr=1.0, lr_warmup_steps=4, cosine=True)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == 0.25
    assert max(rates) == pytest.approx(rates[3], abs=0.01)
    assert rates[99] < 0.001
    assert learning_rate(99, 100, ImitationConfig(lr=1.0)) == 1.0


def test_demonstrations_are_what_the_environment_would_have_recorded(chat):
    """The ids equal those of an episode in which the policy says the same."""
    call = ToolCall(id="call_0", name="python", arguments={"code": "print(1)"})
    messages = [Message.user("q"), Message.assistant(tool_calls=(call,)), Message.tool("1", call=call)]
    row = tokenized([*messages, Message.assistant("1")], chat, uid="d")
    stream = row.streams[0]
    said = chat.write(messages[1])
    expected = [*chat.prompt(messages[:1]), *said, *chat.bridge(messages[2:], last_id=int(said[-1]))]
    assert stream.token_ids.tolist() == [*expected, *chat.write(Message.assistant("1"))]
    assert [segment.is_action for segment in stream.segments] == [False, True, False, True]
    assert chat.parse(stream.actions[0].token_ids).tool_calls[0].arguments == {"code": "print(1)"}


def test_the_asked_share_of_demonstrations_is_wrong(chat):
    tasks = make_tasks("arithmetic", pool=20)
    demonstrate = demonstrator("arithmetic")
    made = conversations(demonstrate, tasks, count=40, wrong_share=0.25, seed=0)
    right = [messages[-1].content == f"\\boxed{{{task.answer}}}" for task, messages in made]
    assert right.count(False) == 10
    again = conversations(demonstrate, tasks, count=40, wrong_share=0.25, seed=0)
    hashes = [content_hash(tokenized(m, chat, uid="x") for _, m in each) for each in (made, again)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "messages",
    [[Message.user("only a question")], [Message.assistant("answers nothing")], []],
)
def test_a_conversation_needs_an_answer_to_something(chat, messages):
    with pytest.raises(ConfigError, match="assistant turn"):
        tokenized(messages, chat, uid="c")


def test_chats_from_json_lines(tmp_path, chat):
    path = tmp_path / "chats.jsonl"
    write_jsonl(path, [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}])
    rows = read_conversations(path, chat)
    assert chat.decode_action(rows[0].streams[0].actions[0].token_ids) == "ho<|end|>"
    for record in ({"prompt": "hi"}, {"messages": ["hi"]}, {"messages": [{"role": "user", "content": "hi"}]}):
        write_jsonl(path, [record])
        with pytest.raises(TaskFileError, match="line 1"):
            read_conversations(path, chat)


def test_an_environment_without_demonstrations_says_so():
    with pytest.raises(ConfigError, match="no demonstrations"):
        demonstrator("python_math")
