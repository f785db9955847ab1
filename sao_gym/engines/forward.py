"""An unmodified transformers language model, fed token by token or chunk by chunk over rows of a `SlotStore`.

Invariant: the logits are those of the plain forward pass over the row's whole history, to rounding. `CachedModel`
tries this on a short sequence when it is made and refuses a model for which it does not hold.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sao_gym.engines.slots import SlotStore, SlotWindow
from sao_gym.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


class CachedModel:
    """Feeds chunks of ids to a causal language model; keys and values live in a `SlotStore`.

    Raises ModelError for a model whose history is more than keys and values.
    """

    def __init__(self, model: Any, context_length: int) -> None:
        self.model = model.eval()
        _take_masks(model)
        self.context_length = context_length
        self._layer_types = layer_types(model, context_length)
        self._window = int(getattr(model.config, "sliding_window", None) or 0)
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._can_trim = "logits_to_keep" in parameters
        self._check()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def vocab_size(self) -> int:
        """Ids below this can be fed."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def feed(
        self,
        store: SlotStore,
        rows: Sequence[int],
        chunks: Sequence[Sequence[int]],
        offsets: Sequence[int],
        *,
        all_logits: bool = False,
    ) -> Tensor:
        """Logits [M, V] after the last token of each row's chunk, or [M, Q, V] after every token.

        `offsets` [M] are the tokens that each row already holds. Chunks of unequal length are padded on the left.
        """
        width = max(map(len, chunks))
        ends = [offset + len(chunk) for offset, chunk in zip(offsets, chunks, strict=True)]
        length = max(ends)
        store.reserve(max(rows) + 1, length)
        ids = torch.tensor([[0] * (width - len(chunk)) + list(chunk) for chunk in chunks], device=self.device)
        starts = torch.tensor([end - width for end in ends], device=self.device)
        positions = (starts[:, None] + torch.arange(width, device=self.device)).clamp_(min=0)
        valid = None
        if any(len(chunk) < width for chunk in chunks):
            pads = torch.tensor([width - len(chunk) for chunk in chunks], device=self.device)
            valid = torch.arange(width, device=self.device) >= pads[:, None]
        window = SlotWindow(store, rows, positions, valid, length)
        logits = self._forward(ids, positions, self._masks(positions, length), window, all_logits)
        return logits if all_logits else logits[:, -1]

    def _forward(self, ids: Tensor, positions: Tensor, masks: Any, window: SlotWindow, all_logits: bool) -> Tensor:
        trim = {"logits_to_keep": 0 if all_logits else 1} if self._can_trim else {}
        output = self.model(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: window},
            **trim,
        )
        return output.logits  # type: ignore[no-any-return]

    def _masks(self, positions: Tensor, length: int) -> Any:
        keys = torch.arange(length, device=positions.device)
        full = (keys <= positions[:, :, None])[:, None]
        if SLIDING not in self._layer_types:
            return full
        sliding = full & (keys > positions[:, :, None] - self._window)[:, None]
        if FULL not in self._layer_types and not hasattr(self.model.config, "layer_types"):
            return sliding
        return {FULL: full, SLIDING: sliding}

    @torch.inference_mode()
    def _check(self) -> None:
        width = min(self.context_length, self._window + 8 if SLIDING in self._layer_types else 12)
        ids = [(7 * i + 1) % self.vocab_size for i in range(width)]
        store = SlotStore(1, self.context_length)
        try:
            plain = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0]
            half = width // 2
            parts = [self.feed(store, [0], [ids[:half]], [0], all_logits=True)[0]] if half else []
            parts += [self.feed(store, [0], [[ids[i]]], [i]) for i in range(half, width)]
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
            raise ModelError(
                f"{type(self.model).__name__} cannot run with the local engine's key-value slots ({error}); "
                "use a plain attention model, or serve it with another engine"
            ) from error
        if not bool(torch.isfinite(plain).all()):
            raise ModelError(
                f"{type(self.model).__name__} gives logits that are not finite: its weights are damaged, or do not fit "
                f"{str(plain.dtype).removeprefix('torch.')}; copy the checkpoint again, or choose another dtype"
            )
        gap = (torch.cat(parts).float() - plain.float()).abs().max()
        allowed = (0.01 if plain.dtype == torch.float32 else 0.3) * plain.float().std()
        if not gap <= allowed:
            raise ModelError(
                f"{type(self.model).__name__} gives other logits with cached keys and values (gap {gap:.3g}, "
                f"allowed {allowed:.3g}); the local engine cannot serve it"
            )


def _take_masks(model: Any) -> None:
    # kernels for packed documents ignore masks; a learner's copy may come with one
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", "eager"):
        try:
            model.set_attn_implementation("sdpa")
        except (ValueError, ImportError):
            model.set_attn_implementation("eager")


def layer_types(model: Any, context_length: int) -> frozenset[str]:
    """The kinds of attention in a model, a sliding window that never slides counted as full.

    Raises ModelError for encoder-decoders and for layers whose state is not keys and values.
    """
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; the local engine serves causal language models")
    declared = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not declared:
        is_sliding = bool(window) and getattr(config, "use_sliding_window", True)
        declared = {SLIDING if is_sliding else FULL}
    foreign = sorted(declared - {FULL, SLIDING})
    if foreign or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{name} has layers of kind {', '.join(foreign) or 'recurrent'}; the local engine serves models whose "
            "layers are all full or sliding-window attention, use the sglang engine for this one"
        )
    if SLIDING in declared and window and window >= context_length:
        declared = (declared - {SLIDING}) | {FULL}
    return frozenset(declared)
