"""Policies from disk and from nothing: checkpoint folders (safetensors or GGUF) and tiny random models.

Invariant: what is loaded is whole. A missing folder, a damaged file, a weight that the checkpoint does not hold or a
missing tokenizer is a `ModelError` with one sentence, never a model with random parts.

Example:
    >>> model = tiny_qwen3(vocab_size=64, layers=1, hidden=32, heads=2, kv_heads=1)
    >>> sum(p.numel() for p in model.parameters()) > 0
    True
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sao_gym.errors import ModelError
from sao_gym.protocols import Chat


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars out of what a command prints."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPolicy:
    """A causal language model and its tokenizer. `generation_config` is only read for its stop ids."""

    model: Any
    tokenizer: Any
    path: Path
    generation_config: Any = None

    def stop_token_ids(self, chat: Chat | None = None) -> tuple[int, ...]:
        """Every id that the checkpoint, its tokenizer or the chat declares as an end of turn."""
        return stop_ids(self.tokenizer, self.generation_config, chat)


def stop_ids(tokenizer: Any = None, generation_config: Any = None, chat: Chat | None = None) -> tuple[int, ...]:
    """All declared end ids, the chat's first, each once. An `eos_token_id` may be an int, a list or None.

    Raises ModelError for what is no token id.
    """
    declared = [
        getattr(chat, "stop_token_ids", None),
        getattr(tokenizer, "eos_token_id", None),
        getattr(generation_config, "eos_token_id", None),
    ]
    ids: list[int] = []
    for value in declared:
        if value is not None:
            try:
                ids.extend(int(token_id) for token_id in (value if isinstance(value, Iterable) else [value]))
            except (TypeError, ValueError) as error:
                raise ModelError(f"eos_token_id is {value!r}; expected a token id, a list of them, or null") from error
    return tuple(dict.fromkeys(ids))


def load_policy(path: str | Path, *, dtype: torch.dtype = torch.float32) -> LoadedPolicy:
    """The model and tokenizer of a folder in transformers' format, or of one that holds a single GGUF file.

    Raises ModelError.
    """
    folder, gguf = _locate(Path(path))
    from transformers import AutoModelForCausalLM, AutoTokenizer  # slow to import, and not needed to refuse

    # said outright: unsaid, transformers asks on the terminal whether to run a checkpoint's own code
    options: dict[str, Any] = {"trust_remote_code": False} | ({"gguf_file": gguf} if gguf else {})
    with quiet():
        tokenizer = _read("tokenizer", folder, lambda: AutoTokenizer.from_pretrained(folder, **options))
    _check_tokenizer(folder, tokenizer, gguf)
    # mismatches are let through to the report, where they are refused by name
    options |= {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with quiet():
        model, report = _read("weights", folder, lambda: AutoModelForCausalLM.from_pretrained(folder, **options))
    _check_whole(folder, report)
    if gguf:
        _forget_quantization(model)
    return LoadedPolicy(model=model, tokenizer=tokenizer, path=folder, generation_config=model.generation_config)


def _locate(path: Path) -> tuple[Path, str | None]:
    if path.suffix == ".gguf" and path.is_file():
        return path.parent, path.name
    if not path.is_dir():
        raise ModelError(f"there is no model folder at {path}; give a local folder that holds a checkpoint")
    if (path / "config.json").is_file():
        return path, None
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) != 1:
        found = f"{len(files)} GGUF files" if files else "neither config.json nor a GGUF file"
        raise ModelError(f"{path} holds {found}; give a folder with a config.json or with exactly one GGUF file")
    return path, files[0]


def _read(what: str, folder: Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        raise ModelError(f"the {what} in {folder} need a package that is not installed ({error})") from error
    except Exception as error:  # whatever the readers of half a dozen formats raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(
            f"the {what} in {folder} cannot be read ({reason}); the checkpoint is incomplete or damaged, copy it again"
        ) from error


def _check_tokenizer(folder: Path, tokenizer: Any, gguf: str | None) -> None:
    # without files transformers makes up an empty tokenizer from the model's type
    names = sorted(set(getattr(tokenizer, "vocab_files_names", {}).values()))
    if gguf is None and not any((folder / name).is_file() for name in names):
        raise ModelError(
            f"{folder} holds no tokenizer (none of {', '.join(names)}); put the checkpoint's tokenizer files beside "
            "its weights"
        )


def _check_whole(folder: Path, report: dict[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    mismatched = sorted(str(key[0]) for key in report.get("mismatched_keys") or ())
    if missing or mismatched:
        raise ModelError(
            f"the checkpoint in {folder} lacks {len(missing)} weights and has {len(mismatched)} of another shape "
            f"(first: {(missing + mismatched)[0]}); it does not fit its config.json"
        )


def _forget_quantization(model: Any) -> None:
    # the weights were expanded on loading; the marks that are left behind would forbid saving
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def copy_model(model: Any, dtype: torch.dtype | None = None) -> Any:
    """A model of its own with the same weights, for an engine beside a learner; tied weights stay tied."""
    twin = copy.deepcopy(model)
    return twin if dtype is None else twin.to(dtype)


def tiny_qwen3(
    vocab_size: int,
    layers: int = 2,
    hidden: int = 128,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    context_length: int = 4096,
    tie_embeddings: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random float32 Qwen3 on the CPU; `overrides` go to its configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **_shape(vocab_size, layers, hidden, heads, kv_heads, context_length, tie_embeddings),
        **{"intermediate_size": intermediate or 3 * hidden, **overrides},
    )
    return _random(Qwen3ForCausalLM, config, seed)


def tiny_qwen3_moe(
    vocab_size: int,
    layers: int = 2,
    hidden: int = 128,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    experts: int = 8,
    experts_per_token: int = 2,
    intermediate: int | None = None,
    context_length: int = 4096,
    tie_embeddings: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random float32 Qwen3-MoE on the CPU, `intermediate` wide per expert; untied, as SGLang needs it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    width = intermediate or hidden
    sizes = {"intermediate_size": 3 * hidden, "moe_intermediate_size": width, "norm_topk_prob": True}
    config = Qwen3MoeConfig(
        **_shape(vocab_size, layers, hidden, heads, kv_heads, context_length, tie_embeddings),
        num_experts=experts,
        num_experts_per_tok=experts_per_token,
        **{**sizes, **overrides},
    )
    return _random(Qwen3MoeForCausalLM, config, seed)


def tiny_llama(
    vocab_size: int,
    layers: int = 2,
    hidden: int = 48,
    *,
    heads: int = 3,
    kv_heads: int = 1,
    intermediate: int | None = None,
    context_length: int = 256,
    tie_embeddings: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random float32 Llama on the CPU, by default in SmolLM2's proportions: tied, with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **_shape(vocab_size, layers, hidden, heads, kv_heads, context_length, tie_embeddings),
        **{"intermediate_size": intermediate or 2 * hidden, **overrides},
    )
    return _random(LlamaForCausalLM, config, seed)


def _shape(
    vocab_size: int, layers: int, hidden: int, heads: int, kv_heads: int, context_length: int, tie: bool
) -> dict[str, Any]:
    if hidden % heads or heads % kv_heads:
        raise ModelError(f"{hidden} hidden units, {heads} heads and {kv_heads} key-value heads do not divide")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _random(kind: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).to(torch.float32).eval()
