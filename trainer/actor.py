"""What the learner asks of its two networks: log-probs and entropies at action tokens, values before them.

The LM head runs only at `state_index`, in chunks: logits of observations and prompts are never made.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sao_gym.errors import ModelError
from sao_gym.trainer.batch import Packed

CHUNK_TOKENS = 4096
_AFTER_THE_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True)
class Inputs:
    """A `Packed` micro-batch on the device: token_ids, position_ids [1, T]; cu_seq_lens [D+1]; the rest [A]."""

    token_ids: Tensor
    position_ids: Tensor
    cu_seq_lens: Tensor
    max_length: int
    state_index: Tensor
    target_ids: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> "Inputs":
        """Move a micro-batch. An empty one becomes a single document of one token without action tokens.

        Every rank must run the same forward and backward passes, so an empty micro-batch still needs a token.
        """
        has_tokens = len(packed.token_ids) > 0
        starts = packed.doc_starts if has_tokens else [0, 1]
        lengths = [int(b) - int(a) for a, b in pairwise(starts)]

        def move(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype).to(device)

        return cls(
            token_ids=move(packed.token_ids if has_tokens else [0], torch.long)[None],
            position_ids=move(packed.position_ids if has_tokens else [0], torch.long)[None],
            cu_seq_lens=move(starts, torch.int32),
            max_length=max(lengths),
            state_index=move(packed.state_index, torch.long),
            target_ids=move(packed.target_ids, torch.long),
            temperature=move(packed.temperature, torch.float32),
        )


def hidden_states(backbone: nn.Module, inputs: Inputs) -> Tensor:
    """Last hidden states [T, H] of packed documents."""
    output = backbone(
        input_ids=inputs.token_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        cu_seq_lens_q=inputs.cu_seq_lens,
        cu_seq_lens_k=inputs.cu_seq_lens,
        max_length_q=inputs.max_length,
        max_length_k=inputs.max_length,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _chunk_logprobs(head: nn.Module, states: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logits = head(states).float() / temperature[:, None]
    all_logprobs = torch.log_softmax(logits, dim=-1)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return all_logprobs.gather(-1, targets[:, None])[:, 0], entropy


class Actor(nn.Module):
    """A causal language model seen as a policy. `model` is the unmodified transformers model.

    Raises ModelError for one that changes its logits after the head, which this class applies by itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config: Any = model.config
        for name in _AFTER_THE_HEAD:
            if getattr(config, name, None) not in (None, 1.0):
                raise ModelError(
                    f"the model has {name} = {getattr(config, name)}, applied after its head; log-probs would differ "
                    "from the engine's: train another architecture"
                )
        self.model = model

    def forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Log-prob of each action token at the temperature it was sampled with, and entropy (detached), both [A]."""
        model: Any = self.model
        states = hidden_states(model.get_decoder(), inputs)
        head = model.get_output_embeddings()
        chosen = states[inputs.state_index]
        if not len(chosen):
            # Keeps every parameter in the graph, so that all ranks reduce the same gradients (docs/paper.md row 18).
            zero = (states.sum() + head(states[:1]).sum()) * 0.0
            return zero[None][:0] + zero, zero[None][:0].detach()
        if len(chosen) <= CHUNK_TOKENS:
            return _chunk_logprobs(head, chosen, inputs.target_ids, inputs.temperature)
        pieces = [
            checkpoint(
                _chunk_logprobs,
                head,
                chosen[i:j],
                inputs.target_ids[i:j],
                inputs.temperature[i:j],
                use_reentrant=False,
            )
            for i, j in ((i, i + CHUNK_TOKENS) for i in range(0, len(chosen), CHUNK_TOKENS))
        ]
        return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])
