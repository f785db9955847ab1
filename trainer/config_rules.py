"""Settings that nothing reads in some set-ups: setting one there is an error, so that nobody believes in it (case CF-03).

A rule names a key, or a section, when it is inert, and why. `resolve` holds a configuration against them.
"""

from sao_gym.config import InertRule
from sao_gym.trainer.config import WINDOWS, TrainConfig


def _ratio_is_1(config: TrainConfig) -> bool:
    """One update per batch, with the policy that it starts from as reference."""
    own = config.loss.ratio_reference != "rollout" and config.loss.policy != "icepop"
    return own and config.actor.updates_per_batch == 1


TRAIN_RULES = (
    *(
        InertRule(key, lambda c: not c.loss.has_critic, "loss.advantage is not critic, so there is none")
        for key in (
            "critic",
            "loss.gamma",
            "loss.alpha",
            "loss.fixed_lambda",
            "loss.lambda_length",
            "loss.credit",
        )
    ),
    *(
        InertRule(key, lambda c: c.loss.fixed_lambda is not None, "loss.fixed_lambda is the same for all rows")
        for key in ("loss.alpha", "loss.lambda_length")
    ),
    InertRule("loss.group_std", lambda c: c.loss.advantage != "group", "loss.advantage is not group"),
    InertRule("loss.window", lambda c: c.loss.advantage not in WINDOWS, "loss.advantage is no running mean"),
    *(
        InertRule(
            key, _ratio_is_1, "with one update per batch and the policy itself as reference the ratio is always 1"
        )
        for key in ("loss.eps_low", "loss.eps_high")
    ),
    InertRule("staleness.stale_grace_s", lambda c: c.staleness.on_stale == "wait", "staleness.on_stale is wait"),
    InertRule(
        "staleness.on_stale",
        lambda c: c.staleness.max_staleness == 0,
        "staleness.max_staleness is 0, so no row is ever stale",
    ),
    InertRule(
        "staleness.stale_grace_s",
        lambda c: c.staleness.max_staleness == 0,
        "staleness.max_staleness is 0, so no row is ever stale",
    ),
    InertRule(
        "loss.detach_ratio", lambda c: c.loss.policy in ("ppo", "cispo"), "loss.policy has a rule of its own for it"
    ),
    InertRule("engine.completions", lambda c: c.engine.kind != "scripted", "engine.kind is not scripted"),
    *(
        InertRule(key, lambda c: c.engine.kind == "sglang", "engine.kind is sglang, whose servers have their own")
        for key in ("engine.slots", "engine.deterministic", "engine.threads")
    ),
    InertRule("engine.sglang", lambda c: c.engine.kind != "sglang", "engine.kind is not sglang"),
    *(
        InertRule(
            f"engine.sglang.{name}", lambda c: bool(c.engine.sglang.urls), "engine.sglang.urls names running ones"
        )
        for name in ("servers", "python", "gpus", "args", "start_s")
    ),
    InertRule("engine.sglang.folder", lambda c: c.engine.sglang.transport != "disk", "the transport is not disk"),
    *(
        InertRule(
            f"engine.sglang.{name}",
            lambda c: c.engine.sglang.transport != "distributed",
            "engine.sglang.transport is not distributed",
        )
        for name in ("host", "backend")
    ),
    InertRule(
        "engine.kv",
        lambda c: c.staleness.max_staleness == 0,
        "staleness.max_staleness is 0, so no request is in flight at a publication",
    ),
    *(
        InertRule(
            key,
            lambda c: 0 < c.steps <= c.critic_only_steps,
            "critic.only_steps takes all of the steps, so the actor is never trained",
        )
        for key in (
            "actor",
            "loss.policy",
            "loss.eps_low",
            "loss.eps_high",
            "loss.detach_ratio",
            "loss.ratio_reference",
        )
    ),
    InertRule("loss.eps_low", lambda c: c.loss.policy == "trm", "loss.policy is trm, which bounds whole rows"),
    InertRule("loss.eps_high", lambda c: c.loss.policy == "trm", "loss.policy is trm, which bounds whole rows"),
    InertRule("env.tasks", lambda c: "tasks" in c.env.options, "env.options.tasks already gives the tasks"),
    InertRule(
        "model.describe_tools", lambda c: c.model.chat in ("renderer", "template"), "model.chat is not our own template"
    ),
    *(
        InertRule(
            f"evaluation.{name}",
            lambda c: not c.evaluation.is_asked_for,
            "neither evaluation.every nor evaluation.at_ends asks for an evaluation",
        )
        for name in ("episodes", "bench", "tasks", "data", "options", "allow_overlap")
    ),
    InertRule("feedback", lambda c: not c.serves_applications, "env.name is not feedback"),
    InertRule("rollout.wall_clock_s", lambda c: c.serves_applications, "an application takes its time"),
    InertRule("env.tasks", lambda c: c.serves_applications, "an application brings what it asks"),
    InertRule("engine.parity_warning", lambda c: c.engine.canary_tokens == 0, "engine.canary_tokens is 0"),
    InertRule(
        "evaluation.weights", lambda c: c.evaluation.every is None, "evaluation.every asks for none during training"
    ),
    *(
        InertRule(f"evaluation.{name}", lambda c: c.evaluation.bench is None, "evaluation.bench names nothing")
        for name in ("data", "options")
    ),
    InertRule(
        "evaluation.allow_overlap",
        lambda c: not c.evaluation.has_own_tasks,
        "neither evaluation.bench nor evaluation.tasks names tasks, and the held-out split never overlaps",
    ),
)
"""Those of every run."""


def _always(reason: str, *keys: str) -> tuple[InertRule, ...]:
    return tuple(InertRule(key, lambda c: True, reason) for key in keys)


ROLLOUT_ONLY_RULES = _always(
    "--rollout-only trains nothing",
    "trackers",
    "group_size",
    "actor",
    "critic",
    "loss",
    "staleness",
    "checkpoint",
    "evaluation",
    "learner.micro_batch_tokens",
    "learner.gradient_checkpointing",
)
LEARN_ONLY_RULES = _always(
    "--learn-only samples nothing",
    "trackers",
    "rollout",
    "engine",
    "evaluation",
    "staleness.on_stale",
    "staleness.stale_grace_s",
)
"""What else nothing reads in those two ways to run."""
