"""Attention over packed documents: one function registered with transformers' attention interface.

Documents lie end to end in one row and must not see each other (trap 28). On a CPU each document is a causal `sdpa`
call of its own; on a GPU with flash attention the varlen kernel gets the same boundaries. No mask over the packed
length is ever built: at 8K tokens it was 37 times slower.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from sao_gym.errors import ModelError

NAME = "sao_packed"
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention"}
_RECURRENT = {"linear_attn", "mamba", "mixer", "recurrent", "temporal_block", "ssm", "conv"}


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    offset = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (offset >= 0) & (offset < window)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document.

    query [1, H, T, E], key and value [1, H_kv, T, E]; `cu_seq_lens_q` [D+1] are the documents' starts and T. Returns
    ([1, T, H, E], None). Dropout is off whatever the mode: the learner's log-probs must equal the engine's (trap 30).
    Raises ModelError for capped scores (`softcap`) and attention sinks (`s_aux`), which `sdpa` cannot compute.
    """
    if softcap is not None or s_aux is not None:
        what = "capped attention scores (softcap)" if softcap is not None else "attention sinks (s_aux)"
        raise ModelError(f"the model has {what}, which packed attention does not compute; train another architecture")
    starts = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    outputs = []
    for start, end in pairwise(starts):
        length = end - start
        is_cut = sliding_window is not None and length > sliding_window
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, start:end],
                value[:, :, start:end],
                attn_mask=_window_mask(length, sliding_window or length, query.device) if is_cut else None,
                is_causal=not is_cut,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def use_packed_attention(model: nn.Module) -> None:
    """Let a transformers model attend over packed documents.

    Raises ModelError for recurrent mixers, whose state runs on over document ends (such models need one document a
    row), and for kinds of layers that are not known.
    """
    config: Any = model.config
    declared = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    modules = {segment for name, _ in model.named_modules() for segment in name.split(".")}
    foreign = {*declared} - _KNOWN_LAYERS or modules & _RECURRENT
    if foreign:
        raise ModelError(
            f"the model has layers of kind {', '.join(sorted(foreign))}, not attention over whole documents or a "
            "sliding window: recurrent state would leak between packed documents; train a model with such layers only"
        )
    implementation = NAME
    if next(model.parameters()).is_cuda and _has_flash_attention():
        implementation = "flash_attention_2"
    AttentionInterface.register(NAME, packed_attention)
    backend: Any = model
    backend.set_attn_implementation(implementation)


def _has_flash_attention() -> bool:
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())
