"""What an episode leaves once it is closed.

Invariant: the streams hold every token that was sampled for a trained call exactly once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao_gym.errors import InvariantError
from sao_gym.gateway.counts import Counts
from sao_gym.gateway.streams import auxiliary_streams_of, streams_of
from sao_gym.gateway.tree import Tree
from sao_gym.protocols import AGENT_FAILED
from sao_gym.rollout import Episode
from sao_gym.stream import Outcome, TokenStream, Trajectory, TruncationReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """`streams` are to be trained on, `auxiliary` ones not; `info` holds JSON values for `Trajectory.info`."""

    streams: tuple[TokenStream, ...]
    auxiliary: tuple[TokenStream, ...]
    outcome: Outcome
    info: Mapping[str, Any]
    engine_s: float
    admitted_version: int

    def trajectory(
        self, episode: Episode, outcome: Outcome, *, timings: Mapping[str, float], info: Mapping[str, Any]
    ) -> Trajectory:
        """The record as one of an episode of ours, without a score."""
        return Trajectory(
            uid=episode.uid,
            task_id=episode.task.id,
            env_id=episode.env_id,
            attempt=episode.attempt,
            streams=self.streams,
            outcome=outcome,
            group_id=episode.group_id,
            admitted_version=self.admitted_version,
            timings={**timings, "engine_s": self.engine_s},
            seed=episode.seed(0),
            info={**info, "gateway": dict(self.info)},
        )


def make_record(
    tree: Tree,
    counts: Counts,
    *,
    outcome: Outcome,
    asked: Sequence[Mapping[str, Any]],
    engine_s: float,
    admitted_version: int,
) -> EpisodeRecord:
    """The record of a tree; `counts` learns of its streams. Raises InvariantError."""
    streams = streams_of(tree.nodes)
    sampled = sum(len(node.generation.token_ids) for node in tree.nodes if not node.is_auxiliary)
    found = sum(stream.n_action for stream in streams)
    if found != sampled:
        raise InvariantError(f"{sampled} tokens were sampled, and the streams hold {found}")
    counts.streams += len(streams)
    counts.stream_tokens += sum(len(stream) for stream in streams)
    counts.delivered += sum(node.is_delivered for node in tree.nodes)
    return EpisodeRecord(
        streams=streams,
        auxiliary=auxiliary_streams_of(tree.nodes),
        outcome=outcome,
        info={**counts.as_info(), "asked_sampling": [dict(sampling) for sampling in asked]},
        engine_s=engine_s,
        admitted_version=admitted_version,
    )


def final_outcome(given: Outcome | None, *, failure: str | None, truncation: TruncationReason | None) -> Outcome:
    """A failure of ours or the driver's first, then a budget that was run into, then what the driver said."""
    if failure is not None:
        return Outcome.error(failure)
    if given is not None and given.is_error and given.reason != AGENT_FAILED:
        return given
    if truncation is not None:
        return Outcome.truncated(truncation)
    return given or Outcome.terminated()
