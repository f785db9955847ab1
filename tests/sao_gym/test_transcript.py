"""Episodes shown to people."""

from hypothesis import given
from hypothesis import strategies as st

from sao_gym.policy_loading import byte_tokenizer
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory, TruncationReason
from sao_gym.text_codec import TextCodec
from sao_gym.transcript import show_episode

CODEC = TextCodec(byte_tokenizer())


def make(*streams: list[tuple[str, list[int] | None]], outcome: Outcome | None = None) -> Trajectory:
    """Segments are (text, versions); None is an observation."""
    made = []
    for parts in streams:
        segments = []
        for text, versions in parts:
            ids = CODEC.encode(text)
            if versions is None:
                segments.append(Segment.observation(ids))
                continue
            spread = [versions[0]] * (len(ids) - 1) + versions[-1:] if ids else []
            segments.append(
                Segment.action(ids, logprobs=[-1.0] * len(ids), versions=spread, temperature=1.0, stop=StopReason.STOP)
            )
        made.append(TokenStream(segments=tuple(segments)))
    return Trajectory(
        uid="r17",
        task_id="t9",
        env_id="e",
        attempt=0,
        streams=tuple(made),
        outcome=outcome or Outcome.terminated(),
    )


def test_one_block_per_segment() -> None:
    row = make([("<|user|>2+2?", None), ("so\nfour<|end|>", [3, 5]), ("<|user|>sure?", None), ("yes<|end|>", [5])])
    row = row.scored(Score(value=0.5, passed=True, detail="right"))
    assert show_episode(row, CODEC).split("\n") == [
        "episode r17 · task t9 · terminated · score 0.5: right · 12 action tokens of 23",
        "  observation · 5 tokens",
        "    | <|user|>2+2?",
        "  action 0 · 8 tokens · versions 3 to 5 · stop",
        "    | so",
        "    | four<|end|>",
        "  observation · 6 tokens",
        "    | <|user|>sure?",
        "  action 1 · 4 tokens · version 5 · stop",
        "    | yes<|end|>",
    ]


def test_several_streams_cut_episodes_and_empty_actions() -> None:
    row = make([("a", None), ("b", [0])], [("c", None), ("", [0]), ("d", [1])])
    row = Trajectory(
        uid=row.uid,
        task_id="t",
        env_id="e",
        attempt=0,
        streams=row.streams,
        outcome=Outcome.truncated(TruncationReason.TURNS),
    )
    shown = show_episode(row, byte_tokenizer())
    assert "truncated (turns) · not scored · 2 action tokens of 4" in shown
    assert [line for line in shown.split("\n") if line.startswith("  stream")] == ["  stream 0", "  stream 1"]
    assert "action 1 · 0 tokens · stop" in shown
    assert "action 1 · 1 token · version 1" in shown


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_all_text_is_shown(texts: list[str]) -> None:
    row = make([(text, None) for text in texts])
    bodies = [line.removeprefix("    | ") for line in show_episode(row, CODEC).split("\n") if line.startswith("    | ")]
    encodable = [CODEC.decode(CODEC.encode(text)) for text in texts]
    assert bodies == [line for text in encodable for line in text.split("\n")]
