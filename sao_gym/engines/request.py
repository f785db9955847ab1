"""One request on its way through a decoder, from its prompt to its generation.

Invariant: log-probs and versions are one per sampled token, the stop token included; nothing is sampled after it.
"""

from dataclasses import dataclass, field

import numpy as np

from sao_gym.engines.sampling import Draws
from sao_gym.errors import EngineError
from sao_gym.protocols import Generation, Sampling
from sao_gym.stream import StopReason


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way. `ids` are prompt and completion; the row holds keys and values of `filled` of them."""

    ids: list[int]
    sampling: Sampling
    session: str | None
    limit: int
    draws: Draws
    prompt_length: int
    filled: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopReason | None = None
    error: str | None = None

    @property
    def lacks(self) -> int:
        """Tokens that must be fed before the next one can be sampled."""
        return len(self.ids) - self.filled

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, well or not."""
        return self.stop is not None or self.error is not None

    def accept(self, token_id: int, logprob: float, version: int) -> None:
        """Append a sampled token; a stop token wins over the limit."""
        if not np.isfinite(logprob):
            self.error = f"the model's logits are not finite under version {version}"
            return
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.sampling.stop_token_ids:
            self.stop = StopReason.STOP
        elif len(self.logprobs) >= self.limit:
            self.stop = StopReason.LENGTH

    def generation(self) -> Generation:
        """What was sampled. Raises EngineError if the request failed."""
        if self.error is not None or self.stop is None:
            raise EngineError(self.error or "the request has not ended")
        return Generation(
            token_ids=np.array(self.ids[self.prompt_length :], dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            stop=self.stop,
            temperature=self.sampling.temperature,
        )
