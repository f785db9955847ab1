"""One training step: the right loss whatever the cut, the right networks moved, nothing moved that must stay."""

import copy
import math
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.errors import InvariantError
from sao_gym.models import copy_model
from sao_gym.stream import Outcome, Score
from sao_gym.trainer.actor import Inputs
from sao_gym.trainer.batch import pack
from sao_gym.trainer.critic import critic_from_model
from sao_gym.trainer.learner import StepPlan

# With a large epsilon AdamW's step is the gradient times the rate: the weights then tell the gradient.
LINEAR = {"lr": 0.5, "eps": 1.0, "grad_clip": None}
LINEAR_CRITIC = {"lr": 0.5, "eps": 1.0, "grad_clip": None}


def logprobs_alone(model: Any, stream: Any) -> np.ndarray:
    """Log-probs of a stream's action tokens by transformers' own forward pass."""
    single = copy_model(model).eval()
    single.set_attn_implementation("eager")
    ids = torch.tensor(stream.token_ids).long()
    with torch.no_grad():
        all_logprobs = torch.log_softmax(single(ids[None], use_cache=False).logits[0, :-1], dim=-1)
    every = all_logprobs.gather(1, ids[1:, None])[:, 0].double().numpy()
    result: np.ndarray = every[stream.action_positions - 1]
    return result


def expected_rows(model: Any, batch: Any, *, local: bool = False) -> list[list[tuple[float, float, float]]]:
    """(f(rho), advantage, log-prob) of each token by row, written out, where V = 0: A = R lambda^(tokens that follow)."""
    rows = []
    for trajectory in batch:
        tokens, total = [], trajectory.n_action
        seen = 0
        for stream in trajectory.streams:
            n = stream.n_action if local else total
            lam = min(max(1 - 1 / (1.5 * n), 0.0), 1.0)
            for t, (logp, old) in enumerate(zip(logprobs_alone(model, stream), stream.behavior_logprobs, strict=True)):
                follow = stream.n_action - 1 - t if local else total - 1 - seen
                rho = math.exp(logp - old)
                tokens.append((rho if 0.7 < rho < 6.0 else 0.0, trajectory.score.value * lam**follow, logp))
                seen += 1
        rows.append(tokens)
    return rows


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, atol=atol, rtol=0, err_msg=name)


def spread(batch: Any, recorded_at: Any, seed: int = 3) -> Any:
    """The batch with some tokens out of the band, on both sides."""
    n = sum(t.n_action for t in batch)
    noise = np.random.default_rng(seed).normal(0, 0.6, n)
    return recorded_at(batch, np.minimum(-math.log(48) + noise, 0.0))


# -- the loss


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize("credit", ["chain", "local"])
def test_the_policy_loss_written_out(
    aggregation, credit, make_policy, make_batch, make_config, make_learner, plan_of, recorded_at
):
    """DIS on skip-observation GAE over the global batch, against sums written out by hand (docs/paper.md rows 3, 4, 8, 27)."""
    config = make_config(loss={"aggregation": aggregation, "credit": credit}, learner={"micro_batch_tokens": 50})
    model = make_policy(seed=2)
    batch = [
        replace(t, score=Score(value=v, passed=v > 0))
        for t, v in zip(make_batch(5, streams=2), [1.0, -0.5, 0.0, 2.0, 1.0], strict=True)
    ]
    here = np.concatenate([logprobs_alone(model, s) for t in batch for s in t.streams])
    noise = np.random.default_rng(0).normal(0, 0.7, len(here))
    batch = recorded_at(batch, np.minimum(here + noise, 0.0))
    rows = expected_rows(model, batch, local=credit == "local")
    sums = [-sum(f * a * logp for f, a, logp in row) for row in rows]
    expected = {
        "token_mean": sum(sums) / sum(map(len, rows)),
        "seq_mean_token_mean": sum(s / len(row) for s, row in zip(sums, rows, strict=True)) / len(rows),
        "seq_mean_token_sum": sum(sums) / len(rows),
    }[aggregation]
    metrics = make_learner(config, model).step(plan_of(batch, config)).metrics()
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4)
    weights = [f for row in rows for f, _, _ in row]
    assert 0 < weights.count(0.0) < len(weights) / 2
    assert metrics["tokens_kept"] == len(weights) - weights.count(0.0)
    rejected = metrics["dis_reject_low"] + metrics["dis_reject_high"]
    assert rejected == pytest.approx(weights.count(0.0) / len(weights))


def test_whitened_advantages(make_policy, make_batch, make_config, make_learner, plan_of):
    """docs/paper.md row 10: over the action tokens of the whole batch, not of a micro-batch; returns stay as they are."""
    model = make_policy(seed=2)
    batch = make_batch(5)
    batch = [
        replace(t, score=Score(value=v, passed=True)) for t, v in zip(batch, [1.0, 0.0, 0.5, 2.0, 1.0], strict=True)
    ]
    plain = make_config(learner={"micro_batch_tokens": 30})
    white = make_config(learner={"micro_batch_tokens": 30}, loss={"whiten": True})
    before = make_learner(plain, copy_model(model)).step(plan_of(batch, plain)).metrics()
    metrics = make_learner(white, copy_model(model)).step(plan_of(batch, white)).metrics()
    flat = [token for row in expected_rows(model, batch) for token in row]
    advantages = np.array([a for _, a, _ in flat])
    advantages = (advantages - advantages.mean()) / advantages.std()
    expected = -np.mean([f * a * logp for (f, _, logp), a in zip(flat, advantages, strict=True)])
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["advantage_mean"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["value_loss"] == before["value_loss"]


def test_stale_tokens_weigh_nothing_and_stay_in_the_denominator(
    golden, make_policy, make_batch, make_config, make_learner, plan_of, recorded_at
):
    """Case 18 through the learner: four rows of one token, whose advantage is their score where V = 0."""
    case = golden("18")
    given, expected = case["inputs"], case["expected"]
    model = make_policy(seed=2)
    batch = [t for t in make_batch(60, turns=1) if t.n_action == 1][:4]
    batch = [replace(t, score=Score(value=a, passed=True)) for t, a in zip(batch, given["advantage"], strict=True)]
    here = np.concatenate([logprobs_alone(model, t.streams[0]) for t in batch])
    ratios = np.array(given["logp_current"]) - np.array(given["behavior_logprobs"])
    batch = recorded_at(batch, here - ratios, given["versions"])
    config = make_config(
        actor=LINEAR, learner={"micro_batch_tokens": 1}, staleness={"max_staleness": case["config"]["max_staleness"]}
    )
    learner = make_learner(config, model)
    stats = learner.step(plan_of(batch, config, version=case["config"]["learner_version"]))
    assert stats.account.stale_masked == expected["stale_masked"]
    assert stats.account.kept == expected["kept"]
    np.testing.assert_allclose(np.sort(stats.weights), np.sort(expected["weight"]), rtol=1e-4)
    # the case's gradient is -weight * advantage / 4, whatever the log-probs themselves are
    wanted = float(np.array(expected["grad_logp_current"]) @ here)
    assert stats.policy_loss == pytest.approx(wanted, rel=1e-4)
    # the critic learns nothing from the stale row either: 0 + 1 + 4 + 0.25 over 4
    assert stats.value_loss == pytest.approx((1 + 4 + 0.25) / 4, rel=1e-5)


def test_a_cut_row_goes_on_with_the_value_after_it(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 3 and docs/paper.md row 16 through the learner: V = 0.4 everywhere, no reward."""
    batch = make_batch(4, reward=0.0)
    cut = [replace(t, outcome=Outcome.truncated("turns")) if i % 2 else t for i, t in enumerate(batch)]
    tokens = [t.n_action for t in batch]
    found = {}
    for mode in ("terminal", "bootstrap"):
        model = make_policy()
        critic = critic_from_model(model)
        torch.nn.init.constant_(critic.value_head.bias, 0.4)
        config = make_config(loss={"truncation": mode}, learner={"micro_batch_tokens": 20})
        found[mode] = make_learner(config, model, critic).step(plan_of(cut, config)).metrics()
    assert found["terminal"]["value_loss"] == pytest.approx(0.16, rel=1e-5)
    ended = (tokens[0] + tokens[2]) / sum(tokens)
    assert found["bootstrap"]["value_loss"] == pytest.approx(0.16 * ended, rel=1e-5)


# -- the cut


def learn(
    batch: Any, config: Any, make_policy: Any, make_learner: Any, plan_of: Any, kind: str = "qwen3"
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    learner = make_learner(config, make_policy(kind))
    metrics = learner.step(plan_of(batch, config)).metrics()
    return metrics, learner.model.state_dict(), learner.bare_critic.state_dict()


def same_metrics(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if value is None or other[name] is None:
            assert value is other[name], name
        else:
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if not name.startswith("time_")}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("loss", [{}, {"aggregation": "seq_mean_token_mean", "whiten": True, "credit": "local"}])
def test_the_cut_changes_nothing(kind, loss, make_policy, make_batch, make_config, make_learner, plan_of, recorded_at):
    """Trap 11: micro-batches, packing and the order of rows."""
    batch = spread(make_batch(8, streams=2), recorded_at)
    settings = {"actor": LINEAR, "critic": LINEAR_CRITIC, "loss": loss}
    configs = [make_config(**settings, learner={"micro_batch_tokens": n}) for n in (100_000, 90, 1)]
    whole = learn(batch, configs[0], make_policy, make_learner, plan_of, kind)
    others = [
        learn(batch, configs[1], make_policy, make_learner, plan_of, kind),
        learn(batch, configs[2], make_policy, make_learner, plan_of, kind),
        learn(batch[::-1], configs[1], make_policy, make_learner, plan_of, kind),
    ]
    start = make_policy(kind).state_dict()
    assert max(float((whole[1][name] - value).abs().max()) for name, value in start.items()) > 1e-3
    for other in others:
        same_weights(whole[1], other[1], atol=2e-6)
        same_weights(whole[2], other[2], atol=2e-6)
        same_metrics(timeless(whole[0]), timeless(other[0]))


def test_an_empty_micro_batch_changes_nothing(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 11: 0 loss, finite gradient, and every parameter takes part."""
    config = make_config(actor=LINEAR, critic=LINEAR_CRITIC)
    batch = make_batch(3)
    plan = plan_of(batch, config)
    nothing = pack([], n_action_global=sum(t.n_action for t in batch))
    padded = replace(
        plan,
        micro_batches=((nothing, *plan.micro_batches[0], nothing),),
        updates=(replace(plan.updates[0], micro_batches=len(plan.micro_batches[0]) + 2),),
    )
    results = []
    for one in (plan, padded):
        learner = make_learner(config, make_policy("qwen3_moe"))
        metrics = learner.step(one).metrics()
        results.append((timeless(metrics), learner.model.state_dict(), learner.bare_critic.state_dict()))
    assert results[0][0] == results[1][0]
    same_weights(results[0][1], results[1][1], atol=0)
    same_weights(results[0][2], results[1][2], atol=0)


def test_accelerates_own_accumulation_setting_divides_nothing(
    monkeypatch, make_policy, make_batch, make_config, make_learner, plan_of
):
    """Trap 35: `accelerate config` sets this variable, and `backward` would divide the loss by it."""
    config = make_config(actor=LINEAR, critic=LINEAR_CRITIC)
    batch = make_batch(4)
    plain = learn(batch, config, make_policy, make_learner, plan_of)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    learner = make_learner(config, make_policy())
    assert learner.accelerator.gradient_accumulation_steps == 4
    learner.step(plan_of(batch, config))
    same_weights(plain[1], learner.model.state_dict(), atol=0)
    same_weights(plain[2], learner.bare_critic.state_dict(), atol=0)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def run_two_ranks(folder: Path, config: Any, model: Any, critic: Any, plans: list[StepPlan]) -> Any:
    (folder / "job").write_bytes(pickle.dumps((config, model, critic, plans)))
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    command = [
        sys.executable,
        str(Path(__file__).with_name("two_ranks.py")),
        str(folder / "job"),
        str(folder / "result"),
    ]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return pickle.loads((folder / "result").read_bytes())


def compare_with_two_ranks(tmp_path, config, model, batches, make_learner, plan_of):
    """The same batches on one process and on two; returns the two runs' metrics."""
    critic = critic_from_model(model) if config.loss.has_critic else None
    twins = copy.deepcopy((model, critic))
    plans = [
        [
            plan_of(rows, config, batch=i, actor_batches=i, trains_actor=trains_actor, ranks=ranks)
            for i, (rows, trains_actor) in enumerate(batches)
        ]
        for ranks in (1, 2)
    ]
    world, wrapper, after = run_two_ranks(tmp_path, config, *twins, plans[1])
    assert (world, wrapper) == (2, "DistributedDataParallel")
    learner = make_learner(config, model, critic)
    for plan, (metrics, weights, values) in zip(plans[0], after, strict=True):
        same_metrics(timeless(learner.step(plan).metrics()), timeless(metrics))
        same_weights(learner.model.state_dict(), weights, atol=2e-6)
        same_weights(learner.bare_critic.state_dict() if learner.bare_critic else {}, values, atol=2e-6)
    return plans[1], after


def test_two_processes_learn_what_one_does(
    tmp_path, make_policy, make_batch, make_config, make_learner, plan_of, recorded_at
):
    """Trap 11, world size, and case LR-04 under DDP: uneven shares, a rank without rows, nothing kept, critic alone."""
    config = make_config(actor=LINEAR, critic=LINEAR_CRITIC, learner={"micro_batch_tokens": 60}, loss={"whiten": True})
    batches = [
        (spread(make_batch(9), recorded_at), True),
        (make_batch(1, seed=1), True),
        (recorded_at(make_batch(4, seed=2), [-40.0] * sum(t.n_action for t in make_batch(4, seed=2))), True),
        (make_batch(5, seed=3), False),
        (make_batch(6, seed=4), True),
    ]
    plans, after = compare_with_two_ranks(tmp_path, config, make_policy(), batches, make_learner, plan_of)
    shares = [[sum(part.n_rows > 0 for part in rank) for rank in plan.micro_batches] for plan in plans]
    assert shares[0][0] != shares[0][1]
    assert shares[1] == [1, 0]
    assert [metrics["actor_updates"] for metrics, _, _ in after] == [1, 1, 0, 0, 1]


@pytest.mark.slow
def test_two_processes_without_a_critic_and_with_several_updates(
    tmp_path, make_policy, make_batch, make_config, make_learner, plan_of
):
    """Advantages of rows wherever a row is dealt to, running means on every rank, and a share that one rank has none of."""
    config = make_config(
        actor={**LINEAR, "updates_per_batch": 2},
        learner={"micro_batch_tokens": 60},
        loss={
            "advantage": "running_mean_global",
            "policy": "ppo",
            "eps_low": 0.02,
            "eps_high": 0.02,
            "ratio_reference": "proximal",
        },
    )
    batches = [(make_batch(8), True), (make_batch(2, seed=1), True), (make_batch(6, seed=2), True)]
    plans, after = compare_with_two_ranks(tmp_path, config, make_policy(), batches, make_learner, plan_of)
    assert [len(plan.updates) for plan in plans] == [2, 2, 2]
    assert [part.n_rows for part in plans[1].micro_batches[1]] == [0, 0]
    shares = [metrics["rejected_share_by_update"] for metrics, _, _ in after]
    assert [share[0] for share in shares] == [0.0, 0.0, 0.0]
    assert max(share[1] for share in shares) > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_two_processes_learn_what_one_does_with_experts(
    aggregation, tmp_path, make_policy, make_batch, make_config, make_learner, plan_of
):
    """Trap 11: experts that no token of a rank visits still take part in the exchange."""
    config = make_config(
        actor=LINEAR,
        critic={**LINEAR_CRITIC, "train": "full"},
        learner={"micro_batch_tokens": 60, "gradient_checkpointing": True},
        loss={"aggregation": aggregation},
    )
    batches = [(make_batch(7), True), (make_batch(1, seed=1, turns=1), True), (make_batch(5, seed=3), False)]
    compare_with_two_ranks(tmp_path, config, make_policy("qwen3_moe"), batches, make_learner, plan_of)


# -- the critic


@pytest.mark.parametrize(
    ("train", "checkpointing", "kind"),
    [
        ("mlp_only", False, "qwen3"),
        ("mlp_only", True, "qwen3"),
        ("mlp_only", False, "qwen3_moe"),
        ("all_but_attention", False, "qwen3"),
        ("full", False, "qwen3"),
        ("full", True, "qwen3_moe"),
    ],
)
def test_the_critic_learns_a_fixed_batch(
    train, checkpointing, kind, make_policy, make_batch, make_config, make_learner, plan_of, weights_of
):
    """Trap 22, case LR-04: the value loss falls, every trained tensor moves, frozen ones do not move by one bit."""
    config = make_config(
        critic={"train": train, "updates": 2, "lr": 3e-3}, learner={"gradient_checkpointing": checkpointing}
    )
    learner = make_learner(config, make_policy(kind))
    batch = make_batch(6)
    start = weights_of(learner.bare_critic)
    losses = [
        learner.step(plan_of(batch, config, batch=i, trains_actor=False)).metrics()["value_loss"] for i in range(5)
    ]
    assert all(later < earlier for earlier, later in pairwise(losses)), losses
    assert losses[-1] < 0.8 * losses[0]
    moved = {name: not torch.equal(value, start[name]) for name, value in learner.bare_critic.named_parameters()}
    table = learner.freeze_table
    assert sorted((*table.trained, *table.frozen)) == sorted(moved)
    assert {name for name, has_moved in moved.items() if has_moved} == set(table.trained)


def test_frozen_names_get_no_gradient(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 22: not even one that the optimiser would ignore."""
    config = make_config()
    learner = make_learner(config, make_policy())
    frozen = [p for p in learner.bare_critic.parameters() if not p.requires_grad]
    learner.step(plan_of(make_batch(3), config))
    assert frozen
    assert all(parameter.grad is None for parameter in frozen)
    listed = [p for group in learner.critic_optimizer.param_groups for p in group["params"]]
    assert not {id(p) for p in listed} & {id(p) for p in frozen}


def test_gradient_checkpointing_is_in_force_and_changes_no_result(
    make_policy, make_batch, make_config, make_learner, plan_of
):
    """Case LR-04 and trap 35: with frozen embeddings no input asks for a gradient; the layers really run twice."""
    batch = make_batch(5)
    results, runs = [], []
    for checkpointing in (False, True):
        config = make_config(actor=LINEAR, critic=LINEAR_CRITIC, learner={"gradient_checkpointing": checkpointing})
        learner = make_learner(config, make_policy())
        calls: list[int] = []
        for network in (learner.model.model, learner.bare_critic.backbone):
            network.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=calls: seen.append(1))
        learner.step(plan_of(batch, config))
        results.append((learner.model.state_dict(), learner.bare_critic.state_dict()))
        runs.append(len(calls))
    assert runs == [4, 7]  # 2 critic passes, 1 reading of values without gradient, 1 actor pass
    for plain, again in zip(*results, strict=True):
        same_weights(plain, again, atol=1e-6)


def test_advantages_use_the_values_before_the_passes(make_policy, make_batch, make_config, make_learner, plan_of):
    """docs/paper.md row 11: a critic that this batch moved far must not have judged it."""
    batch = make_batch(6)
    found = []
    for lr in (0.0, 0.05):
        config = make_config(critic={"lr": lr, "updates": 4})
        metrics = make_learner(config, make_policy()).step(plan_of(batch, config)).metrics()
        found.append(metrics)
    assert found[0]["policy_loss"] == found[1]["policy_loss"]
    assert found[0]["advantage_mean"] == found[1]["advantage_mean"]
    assert found[0]["ev_pre"] == found[1]["ev_pre"] == found[0]["ev_post"]
    assert found[1]["ev_post"] != found[1]["ev_pre"]


def test_advantages_may_use_the_values_after_the_passes(make_policy, make_batch, make_config, make_learner, plan_of):
    """docs/paper.md row 11, `post`: the same batch, judged by the critic that it moved; the targets stay."""
    batch = make_batch(6)
    found = {}
    for when in ("pre", "post"):
        config = make_config(critic={"lr": 0.05, "updates": 4, "advantage_values": when})
        found[when] = make_learner(config, make_policy()).step(plan_of(batch, config)).metrics()
    assert found["pre"]["ev_post"] == found["post"]["ev_post"]
    assert found["pre"]["value_loss"] == found["post"]["value_loss"]
    # A critic that fits these very returns leaves less to be surprised by.
    assert abs(found["post"]["advantage_mean"]) < abs(found["pre"]["advantage_mean"])


def test_explained_variance_is_the_whole_batchs(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 22: not an average over micro-batches."""
    config = make_config(learner={"micro_batch_tokens": 1}, critic={"lr": 1e-3})
    model = make_policy()
    critic = critic_from_model(model)
    torch.nn.init.normal_(critic.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    learner = make_learner(config, model, critic)
    batch = [replace(t, score=Score(value=float(i % 3), passed=True)) for i, t in enumerate(make_batch(6))]
    values, returns = [], []
    for trajectory in batch:
        packed = pack([trajectory])
        inputs = Inputs.of(packed, torch.device("cpu"))
        with torch.no_grad():
            values.append(critic(inputs, inputs.state_index).double().numpy())
        returns.append(np.full(trajectory.n_action, trajectory.score.value))
    flat_v, flat_r = np.concatenate(values), np.concatenate(returns)
    expected = 1 - np.var(flat_r - flat_v) / np.var(flat_r)
    stats = learner.step(plan_of(batch, config))
    assert stats.before_passes.value == pytest.approx(expected, rel=1e-6)
    assert stats.after_passes.value != stats.before_passes.value


# -- the schedule


def test_twelve_batches(golden, make_policy, make_batch, make_config, make_learner, plan_of, weights_of):
    """Case 15: critic-only steps and warm-up count batches; the actor is bitwise unchanged until it is trained."""
    case = golden("15")
    given, expected = case["config"], case["expected"]
    lr = 1e-3
    config = make_config(
        critic={
            "lr": lr,
            "updates": given["K"],
            "only_steps": given["critic_only_steps"],
            "lr_warmup_steps": given["critic_lr_warmup_steps"],
        }
    )
    learner = make_learner(config, make_policy())
    steps = {"critic": 0, "actor": 0}
    rates: list[float] = []

    def counts(name: str, optimizer: Any) -> None:
        def after(*_: Any) -> None:
            steps[name] += 1
            if name == "critic":
                rates.append(optimizer.param_groups[0]["lr"])

        optimizer.register_step_post_hook(after)

    counts("critic", learner.critic_optimizer.optimizer)
    counts("actor", learner.actor_optimizer.optimizer)
    start, version = weights_of(learner.model), 0
    for want in expected["per_step"]:
        trains_actor = want["step"] >= config.critic.only_steps  # the loop's rule
        stats = learner.step(
            plan_of(
                make_batch(3, seed=want["step"]),
                config,
                batch=want["step"],
                actor_batches=version,
                trains_actor=trains_actor,
            )
        )
        assert stats.critic_updates == want["critic_updates"]
        assert bool(stats.actor_updates) == want["actor_update"]
        version += int(trains_actor)
        if not want["actor_update"]:
            assert all(torch.equal(value, start[name]) for name, value in learner.model.named_parameters())
    assert steps["critic"] == expected["critic_optimizer_steps_after_12"]
    assert steps["actor"] == expected["actor_optimizer_steps_after_12"]
    assert version == expected["actor_weight_version_after_12"]
    multipliers = np.repeat(expected["critic_lr_multiplier_at_batch"], given["K"])
    np.testing.assert_allclose(rates, lr * multipliers, rtol=1e-12)
    assert not torch.equal(
        start["lm_head.weight" if "lm_head.weight" in start else "model.norm.weight"],
        weights_of(learner.model)["model.norm.weight"],
    )


@pytest.mark.parametrize("batches", [1, 3, 6])
def test_passes_do_not_advance_the_schedule(batches, make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 31: the rate after N batches is the same for K = 1 and 2."""
    rates = []
    for updates in (1, 2):
        config = make_config(critic={"updates": updates, "lr_warmup_steps": 4}, actor={"lr_warmup_steps": 5})
        learner = make_learner(config, make_policy())
        for i in range(batches):
            learner.step(plan_of(make_batch(2), config, batch=i, actor_batches=i))
        rates.append([o.param_groups[0]["lr"] for o in (learner.critic_optimizer, learner.actor_optimizer)])
    assert rates[0] == rates[1]
    assert rates[0] == pytest.approx([1e-2 * min(1, batches / 4), 1e-3 * min(1, batches / 5)])


def test_a_small_rate_moves_nearly_every_master_weight(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 27: at 1e-6, where a bfloat16 weight would stand still."""
    config = make_config(actor={"lr": 1e-6})
    model = make_policy()
    learner = make_learner(config, model)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    metrics = learner.step(plan_of(make_batch(8), config)).metrics()
    changed = sum(int((value != before[name]).sum()) for name, value in model.named_parameters())
    total = sum(value.numel() for value in model.parameters())
    assert changed / total > 0.9
    assert metrics["update_changed_share"] == pytest.approx(changed / total)
    cast = sum(int((v.bfloat16() != before[n].bfloat16()).sum()) for n, v in model.named_parameters())
    assert cast / total < 0.1
    assert all(value.dtype == torch.float32 for value in model.parameters())
    states = learner.actor_optimizer.state.values()
    assert all(state["exp_avg"].dtype == torch.float32 for state in states)


def test_half_precision_masters_are_refused(make_policy, make_config, make_learner):
    """Trap 27."""
    with pytest.raises(InvariantError, match="float32"):
        make_learner(make_config(), make_policy().bfloat16())


# -- steps that teach nothing


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def test_a_step_of_which_nothing_is_kept(
    make_policy, make_batch, make_config, make_learner, plan_of, weights_of, recorded_at
):
    """Trap 32 and docs/paper.md row 18: momentum and weight decay are alive, and yet nothing moves; same keys, a counter."""
    config = make_config(actor={"weight_decay": 0.1}, critic={"weight_decay": 0.1})
    learner = make_learner(config, make_policy())
    batch = make_batch(4)
    taught = learner.step(plan_of(spread(batch, recorded_at), config)).metrics()
    assert taught["actor_updates"] == 1
    assert taught["actor_steps_skipped"] == 0
    start, state = weights_of(learner.model), moments(learner.actor_optimizer)
    nothing = recorded_at(batch, [-60.0] * sum(t.n_action for t in batch))
    metrics = learner.step(plan_of(nothing, config, batch=1, actor_batches=1)).metrics()
    assert metrics.keys() == taught.keys()
    assert metrics["actor_updates"] == 0
    assert metrics["actor_steps_skipped"] == 1
    assert metrics["tokens_kept"] == 0
    assert metrics["policy_loss"] == 0.0
    assert metrics["actor_grad_norm"] == 0.0
    assert metrics["dis_reject_high"] == 1.0
    assert metrics["update_changed_share"] == 0.0
    assert all(torch.equal(value, start[name]) for name, value in learner.model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(state, moments(learner.actor_optimizer), strict=True))
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_a_batch_of_stale_tokens_moves_neither_network(
    make_policy, make_batch, make_config, make_learner, plan_of, weights_of
):
    """Trap 32 for the critic too."""
    config = make_config(actor={"weight_decay": 0.1}, critic={"weight_decay": 0.1})
    learner = make_learner(config, make_policy())
    taught = learner.step(plan_of(make_batch(4), config)).metrics()
    starts = [weights_of(learner.model), weights_of(learner.bare_critic)]
    metrics = learner.step(plan_of(make_batch(4, version=0), config, batch=1, version=5)).metrics()
    assert metrics.keys() == taught.keys()
    assert metrics["stale_masked"] == sum(t.n_action for t in make_batch(4))
    assert (metrics["critic_updates"], metrics["actor_updates"]) == (0, 0)
    for network, start in zip((learner.model, learner.bare_critic), starts, strict=True):
        assert all(torch.equal(value, start[name]) for name, value in network.named_parameters())


def test_weight_decay_reaches_no_frozen_weight(make_policy, make_batch, make_config, make_learner, plan_of, weights_of):
    """Trap 32: bitwise."""
    config = make_config(critic={"weight_decay": 0.5})
    learner = make_learner(config, make_policy())
    start = weights_of(learner.bare_critic)
    for i in range(3):
        learner.step(plan_of(make_batch(3), config, batch=i, actor_batches=i))
    now = weights_of(learner.bare_critic)
    assert all(torch.equal(now[name], start[name]) for name in learner.freeze_table.frozen)
    assert not any(torch.equal(now[name], start[name]) for name in learner.freeze_table.trained)


def test_a_critic_only_batch_leaves_the_actor_alone(
    make_policy, make_batch, make_config, make_learner, plan_of, weights_of
):
    """docs/paper.md row 12: bitwise, its moments too, and the line of metrics has the same keys."""
    config = make_config(actor={"weight_decay": 0.1})
    learner = make_learner(config, make_policy())
    taught = learner.step(plan_of(make_batch(3), config)).metrics()
    start, state = weights_of(learner.model), moments(learner.actor_optimizer)
    metrics = learner.step(plan_of(make_batch(3, seed=1), config, batch=1, trains_actor=False)).metrics()
    assert metrics.keys() == taught.keys()
    assert metrics["critic_updates"] == 2
    assert (metrics["actor_updates"], metrics["actor_steps_skipped"]) == (0, 0)
    assert metrics["policy_loss"] is None
    assert all(torch.equal(value, start[name]) for name, value in learner.model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(state, moments(learner.actor_optimizer), strict=True))


def test_clipping_bounds_each_network_and_reports_the_norm_before(
    make_policy, make_batch, make_config, make_learner, plan_of
):
    """docs/paper.md row 23."""
    batch = make_batch(6, reward=1.0)
    unclipped = make_config(actor=LINEAR, critic={**LINEAR_CRITIC, "updates": 1})
    clipped = make_config(
        actor={**LINEAR, "grad_clip": 1e-3}, critic={**LINEAR_CRITIC, "updates": 1, "grad_clip": 1e-4}
    )
    found, moves = [], []
    for config in (unclipped, clipped):
        model = make_policy()
        start = copy.deepcopy(model.state_dict())
        learner = make_learner(config, model)
        head = learner.bare_critic.value_head.bias.clone()
        found.append(learner.step(plan_of(batch, config)).metrics())
        moved = sum(float((value.detach() - start[name]).square().sum()) for name, value in model.named_parameters())
        moves.append((moved**0.5, float((learner.bare_critic.value_head.bias - head).detach().abs())))
    for name in ("actor_grad_norm", "critic_grad_norm"):
        assert found[0][name] == found[1][name] > 1e-2
    assert moves[1][0] == pytest.approx(0.5 * 1e-3, rel=0.02)
    assert moves[1][1] < 0.5 * 1e-4 < moves[0][1]


def test_tied_embeddings_are_one_weight(make_policy, make_batch, make_config, make_learner, plan_of):
    """Trap 33, learner side: trained as one, listed for publication once, after a step too."""
    learner = make_learner(make_config(), make_policy())
    learner.step(plan_of(make_batch(3), learner.config))
    model = learner.model
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    source = learner.weights()
    assert [name for name in source.names if "embed" in name or "lm_head" in name] == ["model.embed_tokens.weight"]
    listed = [p for group in learner.actor_optimizer.param_groups for p in group["params"]]
    assert len(listed) == len({id(p) for p in listed}) == len(source.names)
    untied = make_learner(make_config(), make_policy(tie_embeddings=False))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(untied.weights().names)
