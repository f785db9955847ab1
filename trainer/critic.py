"""The critic: a backbone of its own with a float32 value head, and what of it is trained (docs/paper.md rows 13, 15).

V at an action token is the value of the prefix before it: the head reads the hidden state at `state_index`.
`critic_train = mlp_only` trains dense MLP projections, experts (shared ones too) and the head; attention, linear
attention and state-space mixers, routers, norms and embeddings stay as they are. Freezing comes before sharding and
before the optimiser.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from sao_gym.errors import CheckpointError, ConfigError
from sao_gym.trainer.actor import Inputs, hidden_states

WEIGHTS_FILE = "critic.safetensors"
PROVENANCE_FILE = "critic.json"


class ModuleKind(StrEnum):
    """What a parameter belongs to."""

    HEAD = "head"
    MLP = "mlp"
    ATTENTION = "attention"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDING = "embedding"
    OTHER = "other"


_ROUTERS = {"router", "gate", "shared_expert_gate", "gate_weight"}
_NORM = re.compile(r"(^|_)(norm|layernorm|ln)(\d|_|$)|norm$")
_ATTENTION = re.compile(r"attn|attention|mamba|ssm|mixer|recurrent|conv1d|^conv$")
_MLP = re.compile(
    r"^(mlp|experts?|shared_experts?|feed_forward|ffn|block_sparse_moe|moe|gate_proj|up_proj|down_proj|gate_up_proj)$"
)


def module_kind(name: str) -> ModuleKind:
    """The kind of a parameter by its dotted name. `gate_proj` is a projection, a segment `gate` is a router."""
    segments = name.split(".")[:-1]
    if "value_head" in name.split("."):
        return ModuleKind.HEAD
    if any(segment in _ROUTERS for segment in name.split(".")):
        return ModuleKind.ROUTER
    if any(_NORM.search(segment) for segment in segments):
        return ModuleKind.NORM
    if any(_ATTENTION.search(segment) for segment in segments):
        return ModuleKind.ATTENTION
    if any(_MLP.match(segment) for segment in segments):
        return ModuleKind.MLP
    if any("embed" in segment or segment in ("wte", "wpe", "lm_head") for segment in segments):
        return ModuleKind.EMBEDDING
    return ModuleKind.OTHER


@dataclass(frozen=True, slots=True)
class FreezeTable:
    """What is trained and what is frozen: parameter names and counts per kind."""

    trained: tuple[str, ...]
    frozen: tuple[str, ...]
    trained_counts: dict[str, int]
    frozen_counts: dict[str, int]

    def __str__(self) -> str:
        kinds = sorted({*self.trained_counts, *self.frozen_counts})
        rows = [f"{'critic':<12}{'trained':>14}{'frozen':>14}"]
        rows += [f"{k:<12}{self.trained_counts.get(k, 0):>14,}{self.frozen_counts.get(k, 0):>14,}" for k in kinds]
        return "\n".join(rows)


def freeze(critic: nn.Module, train: str | tuple[str, ...]) -> FreezeTable:
    """Freeze all that `train` does not name: `mlp_only`, `all_but_attention`, `full`, or regular expressions on names.

    Raises ConfigError if an expression is broken or if nothing but the head would be trained.
    """
    trained: list[str] = []
    frozen: list[str] = []
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for name, parameter in critic.named_parameters():
        kind = module_kind(name)
        keep = kind is ModuleKind.HEAD or _is_trained(name, kind, train)
        parameter.requires_grad_(keep)
        (trained if keep else frozen).append(name)
        counts[keep][kind.value] += parameter.numel()
    if all(module_kind(name) is ModuleKind.HEAD for name in trained):
        raise ConfigError(
            f"critic_train = {train!r} matches no parameter of this model, so only the value head would be trained; "
            f"names look like {', '.join(frozen[:3])}: give regular expressions that match some, or 'full'"
        )
    return FreezeTable(tuple(trained), tuple(frozen), dict(counts[True]), dict(counts[False]))


def _is_trained(name: str, kind: ModuleKind, train: str | tuple[str, ...]) -> bool:
    if train == "full":
        return True
    if train == "mlp_only":
        return kind is ModuleKind.MLP
    if train == "all_but_attention":
        return kind is not ModuleKind.ATTENTION
    patterns = (train,) if isinstance(train, str) else train
    try:
        return any(re.search(pattern, name) for pattern in patterns)
    except re.error as error:
        raise ConfigError(
            f"critic_train got {train!r}, which is neither mlp_only, all_but_attention, full nor a list of regular "
            f"expressions ({error})"
        ) from error


class Critic(nn.Module):
    """A transformer backbone with a value head [H -> 1], zero at first: V = 0 is a harmless baseline."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        config: Any = backbone.config
        self.backbone = backbone
        self.value_head = nn.Linear(config.hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, inputs: Inputs, index: Tensor) -> Tensor:
        """Values of the states at `index` [N] of the packed tokens, float32 [N]."""
        states = hidden_states(self.backbone, inputs)
        chosen = states[index] if len(index) else states[:1]
        with torch.autocast(states.device.type, enabled=False):
            values: Tensor = self.value_head(chosen.float())[:, 0]
        return values if len(index) else values[:0] + values.sum() * 0.0


def critic_from_model(model: nn.Module) -> Critic:
    """A critic that starts from a causal language model's backbone (a copy), with a new head."""
    policy: Any = model
    backbone = AutoModel.from_config(policy.config, dtype=torch.float32)
    state = {name: value.detach().clone().float() for name, value in policy.get_decoder().state_dict().items()}
    backbone.load_state_dict(state)
    return Critic(backbone)


def switch_off_dropout(model: nn.Module) -> None:
    """Set every drop-out to 0: the learner's log-probs must be the engine's in train mode too (trap 30).

    It may be a module, a number that a module hands to a function, or a field of the configuration.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    config: Any = getattr(model, "config", None)
    for name in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)


def save_critic(critic: Critic, folder: Path, provenance: dict[str, Any]) -> None:
    """Write the critic as a folder: its configuration, all weights with the head, and where it came from."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = critic.backbone.config
    config.save_pretrained(folder)
    state = {name: value.detach().cpu().contiguous() for name, value in critic.state_dict().items()}
    save_file(state, folder / WEIGHTS_FILE)
    (folder / PROVENANCE_FILE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")


def load_critic(folder: Path, *, like: nn.Module | None = None) -> tuple[Critic, dict[str, Any]]:
    """A critic that `save_critic` wrote, and its provenance. `like`: the policy whose shape it must have.

    Raises CheckpointError naming the first tensor that is missing or of another shape (a head silently made anew
    would turn the first updates into noise).
    """
    if not folder.is_dir():  # a name that is no folder would be asked for on the hub
        raise CheckpointError(
            f"there is no critic folder {folder}; give one that sao_gym.pretrain_critic wrote, or say --critic-init cold"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        state = load_file(folder / WEIGHTS_FILE)
        provenance = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no critic artifact ({error}); give a folder that sao_gym.pretrain_critic wrote, or say "
            "--critic-init cold to start a new one from the policy"
        ) from error
    if like is not None:
        _check_same_shape(config, like, folder)
    critic = Critic(AutoModel.from_config(config, dtype=torch.float32))
    _check_state(critic, state, folder)
    critic.load_state_dict(state)
    return critic, provenance


def _check_same_shape(config: Any, like: Any, folder: Path) -> None:
    for field in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        found, wanted = getattr(config, field, None), getattr(like.config, field, None)
        if found != wanted:
            raise CheckpointError(
                f"the critic in {folder} has {field} = {found}, the policy has {wanted}; pretrain one for this policy"
            )


def _check_state(critic: Critic, state: dict[str, Tensor], folder: Path) -> None:
    for name, value in critic.state_dict().items():
        if name not in state:
            raise CheckpointError(f"the critic in {folder} lacks {name}; write it again with sao_gym.pretrain_critic")
        if state[name].shape != value.shape:
            raise CheckpointError(
                f"the critic in {folder} has {name} of shape {tuple(state[name].shape)}, this model needs {tuple(value.shape)}"
            )
    if unknown := sorted(state.keys() - critic.state_dict().keys()):
        raise CheckpointError(
            f"the critic in {folder} has {unknown[0]}, which the model of its config.json has not; the folder mixes two "
            "critics, write it again with sao_gym.pretrain_critic"
        )
