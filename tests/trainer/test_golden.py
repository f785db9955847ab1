"""Every golden case of the mathematics: expectations, gradients, and the values that known mistakes give."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.errors import InvariantError
from sao_gym.trainer import advantages as adv
from sao_gym.trainer import baselines, losses

Case = dict[str, Any]


def tensor(values: Any, *, grad: bool = False) -> torch.Tensor:
    return torch.tensor([float(v) for v in values], dtype=torch.float64, requires_grad=grad)


def mean_weights(n: int) -> torch.Tensor:
    return torch.full((n,), 1.0 / max(n, 1), dtype=torch.float64)


def run_policy(
    logp: torch.Tensor,
    behavior: torch.Tensor,
    advantage: torch.Tensor,
    *,
    weights: Any = None,
    **options: Any,
) -> losses.PolicyLoss:
    extra = {name: options.pop(name) for name in ("row", "stale") if name in options}
    return losses.policy_loss(
        losses.PolicyObjective(**options),
        logp,
        behavior_logprobs=behavior,
        advantages=advantage,
        token_weights=mean_weights(len(logp)) if weights is None else weights,
        **extra,
    )


def masked_gae(inputs: Case, gamma: float, lam: float, bootstrap: float = 0.0) -> adv.Advantages:
    """GAE on the action axis, spread back over all positions with exact zeros elsewhere."""
    mask = np.array(inputs["action_mask"], dtype=bool)
    rewards = adv.place_rewards(inputs["rewards"], mask)
    got = adv.compute_gae(
        np.array(inputs["values"])[mask],
        rewards[mask],
        [mask.sum()],
        gamma=gamma,
        lam=lam,
        bootstrap=[bootstrap],
    )
    return adv.Advantages(spread(got.advantages, mask), spread(got.returns, mask))


def masked_returns(inputs: Case, gamma: float = 1.0, bootstrap: float = 0.0) -> Any:
    mask = np.array(inputs["action_mask"], dtype=bool)
    rewards = np.array(inputs["rewards"])[mask]
    return spread(adv.compute_returns(rewards, [mask.sum()], gamma=gamma, bootstrap=[bootstrap]), mask)


def spread(values: Any, mask: Any) -> Any:
    full = np.zeros(len(mask))
    full[np.array(mask, dtype=bool)] = values
    return full


def flat(rows: Any) -> list[float]:
    return [value for row in rows for value in row]


def near(expected: Any, tolerance: float) -> Any:
    return pytest.approx(expected, rel=tolerance, abs=tolerance)


def test_01_dis(golden: Any) -> None:
    case = golden("01")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    logp, behavior = tensor(inputs["logp_current"], grad=True), tensor(inputs["logp_rollout"])
    out = run_policy(logp, behavior, tensor(inputs["advantage"]), eps_low=0.3, eps_high=5.0)
    out.loss.backward()
    assert out.loss.item() == near(expected["loss"], tol)
    assert out.weight.tolist() == near(expected["weight"], tol)
    assert out.kept.tolist() == expected["keep"]
    assert logp.grad.tolist() == near(expected["grad_logp_current"], tol)
    for part in ("kept", "rejected_low", "rejected_high"):
        assert out.account.fraction(part) == near(expected[f"{part}_fraction"], tol)
    assert out.loss.item() != near(case["contrast"]["loss_if_denominator_is_kept_tokens"], 1e-3)


def test_01_dis_not_detached_is_another_gradient(golden: Any) -> None:
    case = golden("01")
    inputs, tol = case["inputs"], case["tolerance"]
    logp = tensor(inputs["logp_current"], grad=True)
    out = run_policy(
        logp, tensor(inputs["logp_rollout"]), tensor(inputs["advantage"]), eps_high=5.0, detach_ratio=False
    )
    out.loss.backward()
    assert logp.grad.tolist() == near(case["contrast"]["grad_if_ratio_not_detached"], tol)
    assert logp.grad.tolist() != near(case["expected"]["grad_logp_current"], 1e-3)


def test_01_dis_subcases(golden: Any) -> None:
    subcases = {sub["name"]: sub for sub in golden("01")["subcases"]}
    for name in (
        "coding_bounds",
        "open_interval_boundaries_exact_in_binary",
        "eps_low_zero_rejects_ratio_one",
        "sign_independent",
    ):
        sub = subcases[name]
        weight = losses.dis_weights(tensor(sub["ratio"]).log(), **sub["config"])
        assert weight.tolist() == near(sub["expected_weight"], 1e-9), name
    coding = subcases["coding_bounds"]
    assert coding["expected_weight"] != coding["wrong_if_epsilons_used_as_bounds"]
    signed = subcases["sign_independent"]
    logp = tensor(signed["ratio"]).log().requires_grad_()
    run_policy(logp, tensor([0] * 4), tensor(signed["advantage"]), **signed["config"]).loss.backward()
    assert logp.grad.tolist() == [0.0] * 4


def test_01_dis_nonfinite_and_empty(golden: Any) -> None:
    subcases = {sub["name"]: sub for sub in golden("01")["subcases"]}
    sub = subcases["overflow_and_nonfinite"]
    logp, log_ratio = tensor(sub["logp_current"], grad=True), tensor(sub["log_ratio"])
    out = run_policy(logp, logp.detach() - log_ratio, tensor(sub["advantage"]), **sub["config"])
    out.loss.backward()
    assert out.weight.tolist() == sub["expected_weight"]
    assert out.loss.item() == near(sub["expected_loss"], 1e-9)
    assert logp.grad.isfinite().all()
    assert out.account.total == 5
    empty = subcases["empty_mask"]
    everything = tensor([-1, -1, -1], grad=True)
    on_actions = everything[tensor(empty["action_mask"]).bool()]
    weights = losses.token_weights(torch.zeros(0, dtype=torch.long), torch.zeros(0), denominator=0)
    nothing = run_policy(on_actions, tensor([]), tensor([]), weights=weights, **empty["config"])
    nothing.loss.backward()
    assert nothing.loss.item() == empty["expected_loss"]
    assert everything.grad.tolist() == empty["expected_grad"]
    assert nothing.account == losses.TokenAccount()


def test_02_skip_observation(golden: Any) -> None:
    case = golden("02")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    mask = np.array(inputs["action_mask"], dtype=bool)
    got = masked_gae(inputs, 1.0, 0.9)
    assert got.advantages.tolist() == near(expected["advantages"], tol)
    assert got.returns.tolist() == near(expected["returns_lambda_policy"], tol)
    deltas = masked_gae(inputs, 1.0, 0.0).advantages[mask]
    assert deltas.tolist() == near(expected["delta_action_positions"], tol)
    naive = adv.gae_all_positions(inputs["values"], inputs["rewards"], gamma=1.0, lam=0.9).advantages
    assert naive.tolist() == near(case["contrast"]["naive_all_positions_advantages"], tol)
    assert naive.tolist() != near(expected["advantages"], 1e-3)
    for sub in case["subcases"]:
        changed = inputs | {"rewards": sub.get("rewards", inputs["rewards"])}
        gamma = sub.get("config", {}).get("gamma", 1.0)
        assert masked_gae(changed, gamma, 0.9).advantages.tolist() == near(sub["expected_advantages"], tol)
        if "expected_effective_rewards" in sub:
            placed = adv.place_rewards(changed["rewards"], mask)
            assert placed.tolist() == sub["expected_effective_rewards"]


def test_03_observation_at_end(golden: Any) -> None:
    case = golden("03")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    index = adv.reward_index(inputs["action_mask"])
    rewards = [0.0] * 4
    rewards[index] = inputs["scalar_reward"]
    assert (index, rewards) == (expected["reward_index"], expected["rewards"])
    full = inputs | {"rewards": rewards}
    got = masked_gae(full, 1.0, 0.5)
    assert got.advantages.tolist() == near(expected["advantages"], tol)
    assert got.returns.tolist() == near(expected["returns_lambda_policy"], tol)
    assert masked_returns(full).tolist() == near(expected["returns_lambda_1"], tol)
    wrong = case["contrast"]["advantages_if_reward_on_last_attended_token"]
    assert got.advantages.tolist() != near(wrong, 1e-3)
    assert adv.reward_index(case["subcases"][0]["action_mask"]) == case["subcases"][0]["expected_reward_index"]
    with pytest.raises(InvariantError, match="no action tokens"):
        adv.compute_gae([], [], [0])


def test_04_truncation(golden: Any) -> None:
    case = golden("04")
    inputs, tol = case["inputs"], case["tolerance"]
    for name, bootstrap in (("truncated_bootstrap", inputs["bootstrap_value"]), ("treated_as_terminal", 0.0)):
        expected = case["expected"][name]
        got = masked_gae(inputs, 1.0, 0.8, bootstrap)
        assert got.advantages.tolist() == near(expected["advantages"], tol)
        assert got.returns.tolist() == near(expected["returns_lambda_policy"], tol)
        assert masked_returns(inputs, 1.0, bootstrap).tolist() == near(expected["returns_lambda_1"], tol)
    expected = case["expected"]["truncated_bootstrap"]["returns_lambda_1_gamma_0_9"]
    assert masked_returns(inputs, 0.9, inputs["bootstrap_value"]).tolist() == near(expected, tol)


def test_05_length_adaptive_lambda(golden: Any) -> None:
    case = golden("05")
    tol = case["tolerance"]
    table = case["expected"]["table"]
    lams = adv.length_adaptive_lambda(case["inputs"]["lengths"], 1.5)
    assert lams.tolist() == near([row["lam"] for row in table], tol)
    subs = {sub["name"]: sub for sub in case["subcases"]}
    four = subs["gae_with_l_4"]
    lam = adv.length_adaptive_lambda(sum(four["action_mask"]))
    assert float(lam) == near(four["expected_lambda"], tol)
    assert float(lam) != near(four["wrong_lambda_if_l_counts_observations"], 1e-3)
    assert masked_gae(four, 1.0, float(lam)).advantages.tolist() == near(four["expected_advantages"], 1e-9)
    for name in ("vapo_alpha_small_is_clamped", "vapo_alpha_l_1000"):
        sub = subs[name]
        assert float(adv.length_adaptive_lambda(sub["l"], sub["alpha"])) == near(sub["expected"], tol)
    far = subs["horizon"]
    power = float(adv.length_adaptive_lambda(far["l"], far["alpha"])) ** far["l"]
    assert power == near(far["lam_pow_l"], 1e-9)
    assert power == near(far["limit"], far["tolerance"])
    assert far["limit"] == near(math.exp(-1 / far["alpha"]), 1e-9)
    long = subs["float32_warning"]
    assert 1 - float(adv.length_adaptive_lambda(long["l"])) == near(long["one_minus_lambda"], tol)
    with pytest.raises(InvariantError):
        adv.length_adaptive_lambda([3, 0])


def test_06_decoupled_critic(golden: Any) -> None:
    case = golden("06")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    mask = np.array(inputs["action_mask"], dtype=bool)
    lam = float(adv.length_adaptive_lambda(mask.sum()))
    assert lam == near(expected["lam_policy"], tol)
    got = masked_gae(inputs, 1.0, lam)
    assert got.advantages.tolist() == near(expected["advantages"], tol)
    assert masked_returns(inputs).tolist() == near(expected["critic_returns"], tol)
    assert masked_returns(inputs, 0.9).tolist() == near(expected["critic_returns_gamma_0_9"], tol)
    assert got.returns.tolist() == near(case["contrast"]["coupled_returns_advantage_plus_value"], tol)
    assert got.returns.tolist() != near(expected["critic_returns"], 1e-3)
    values = tensor(np.array(inputs["values"])[mask], grad=True)
    targets = tensor(masked_returns(inputs)[mask])
    loss = losses.value_loss(values, targets, mean_weights(len(values)))
    loss.backward()
    assert loss.item() == near(expected["value_loss_mse"], tol)
    assert loss.item() / 2 == near(expected["value_loss_half_mse"], tol)
    assert values.grad.tolist() == near((2 * (values - targets) / 5).tolist(), tol)


def test_07_step_level(golden: Any) -> None:
    case = golden("07")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    steps = inputs["token_values_per_step"]
    lam = adv.length_adaptive_lambda([len(steps)])
    assert float(lam[0]) == near(expected["lam_policy"], tol)
    for name in ("average", "last"):
        want = expected[f"step_{name}"]
        got = adv.compute_step_advantages(
            flat(steps),
            inputs["step_rewards"],
            [len(step) for step in steps],
            [len(steps)],
            step_value=name,  # type: ignore[arg-type]
            lam=lam,
        )
        assert got.step_values.tolist() == near(want["step_values"], tol)
        assert got.step_advantages.tolist() == near(want["step_advantages"], tol)
        assert got.advantages.tolist() == near(want["token_advantages"], tol)
        assert got.value_mask.astype(int).tolist() == want["value_loss_mask"]
        assert got.step_returns.tolist() == near(expected["critic_step_returns_lambda_1"], tol)
        deltas = adv.compute_gae(got.step_values, inputs["step_rewards"], [3], lam=0.0).advantages
        assert deltas.tolist() == near(want["delta"], tol)


def test_08_running_means(golden: Any) -> None:
    case = golden("08")
    rewards, expected, tol = case["inputs"]["prompt_a_rewards"], case["expected"], case["tolerance"]
    window = baselines.RunningMean(baselines.PROMPT_WINDOW)
    got = [(window.baseline("a"), window.advantage(reward, "a")) for reward in rewards]
    assert [b for b, _ in got] == near(expected["per_prompt_baseline"], tol)
    assert [a for _, a in got] == near(expected["per_prompt_advantage"], tol)
    assert [b for b, _ in got] != near(case["contrast"]["include_current_baseline"], 1e-3)
    sequences = {
        "global_64_ones_64_zeros_then_1": [1.0] * 64 + [0.0] * 64,
        "global_lag_after_shift": [1.0] * 128 + [0.0] * 32,
    }
    for sub in case["subcases"][:2]:
        window = baselines.RunningMean(baselines.GLOBAL_WINDOW)
        for reward in sequences[sub["name"]]:
            window.advantage(reward)
        assert window.baseline() == near(sub["expected_baseline"], tol)
        assert window.advantage(1.0) == near(sub["expected_advantage"], tol)
    window = baselines.RunningMean(8)
    seen = []
    for key, reward in (("A", 1.0), ("B", 0.0), ("A", 0.0)):
        seen.append(window.baseline(key))
        window.advantage(reward, key)
    assert seen == case["subcases"][2]["expected_baseline"]
    assert baselines.RunningMean(8, window.state()).state() == {"A": [1.0, 0.0], "B": [0.0]}


def test_09_grpo(golden: Any) -> None:
    case = golden("09")
    rewards, expected, tol = case["inputs"]["rewards"], case["expected"], case["tolerance"]
    names = {"population": "advantage_population", "sample": "advantage_sample", "none": "advantage_no_std"}
    for std, key in names.items():
        got = baselines.group_advantages(rewards, std=std)  # type: ignore[arg-type]
        assert got.tolist() == near(expected[key], tol)
    degenerate, alone, loo = case["subcases"]
    for std in names:
        for sub in (degenerate, alone):
            got = baselines.group_advantages(sub["rewards"], std=std)  # type: ignore[arg-type]
            assert got.tolist() == sub["expected_advantage"]
    assert baselines.leave_one_out(loo["rewards"]).tolist() == near(loo["expected_advantage"], tol)


def test_10_clip_higher(golden: Any) -> None:
    case = golden("10")
    for row in case["expected"]:
        logp = tensor([math.log(row["ratio"])], grad=True)
        out = run_policy(logp, tensor([0]), tensor([row["advantage"]]), kind="ppo", eps_low=0.2, eps_high=0.28)
        out.loss.backward()
        assert -out.loss.item() == near(row["surrogate"], case["tolerance"])
        assert -logp.grad.item() == near(row["grad_logp"], case["tolerance"])
        assert bool(out.kept) == (row["grad_logp"] != 0)
        assert out.weight.item() * row["advantage"] == near(row["grad_logp"], case["tolerance"])
        if row["dis_0p3_5p0_grad"] is not None:
            other = tensor([math.log(row["ratio"])], grad=True)
            run_policy(other, tensor([0]), tensor([row["advantage"]]), eps_low=0.3, eps_high=5.0).loss.backward()
            assert -other.grad.item() == near(row["dis_0p3_5p0_grad"], case["tolerance"])


def test_11_cispo(golden: Any) -> None:
    case = golden("11")
    for row in case["expected"]:
        logp = tensor([math.log(row["ratio"])], grad=True)
        out = run_policy(logp, tensor([0]), tensor([row["advantage"]]), kind="cispo", eps_low=None, eps_high=4.0)
        out.loss.backward()
        assert out.weight.item() == near(row["weight"], case["tolerance"])
        assert -logp.grad.item() == near(row["grad_logp_of_objective"], case["tolerance"])
        dis = losses.dis_weights(tensor([math.log(row["ratio"])]), 0.3, 5.0)
        assert dis.item() == near(row["dis_0p3_5p0_weight"], case["tolerance"])


def test_12_trust_region_mask(golden: Any) -> None:
    case = golden("12")
    ratios, advantages, expected = (
        case["inputs"]["ratio"],
        case["inputs"]["sequence_advantage"],
        case["expected"],
    )
    row = torch.tensor([i for i, r in enumerate(ratios) for _ in r])
    log_ratio = tensor(flat(ratios)).log()
    k3 = (log_ratio.exp() - 1 - log_ratio).tolist()
    assert k3 == near(flat(expected["k3"]), case["tolerance"])
    logp = log_ratio.clone().requires_grad_()
    options = {"kind": "trm", "row": row, "delta_max": case["config"]["delta_max"]}
    out = run_policy(logp, torch.zeros_like(log_ratio), tensor(advantages)[row], **options)
    out.loss.backward()
    starts = [0, 3, 6]
    assert out.kept[starts].tolist() == expected["keep_sequence"]
    assert logp.grad.tolist() == near(flat(expected["grad_logp_current"]), case["tolerance"])
    assert out.kept[starts].double().mean().item() == near(expected["kept_sequence_fraction"], 1e-9)
    average, dis = case["subcases"]
    again = run_policy(
        logp, torch.zeros_like(log_ratio), tensor(advantages)[row], **options, delta_avg=average["delta_avg"]
    )
    assert again.kept[starts].tolist() == average["expected_keep"]
    in_band = losses.is_in_band(tensor(ratios[1]).log(), dis["eps_low"], dis["eps_high"])
    assert in_band.tolist() == dis["expected_token_keep"]


def test_13_aggregation(golden: Any) -> None:
    case = golden("13")
    per_token, expected, tol = case["inputs"]["per_token_loss"], case["expected"], case["tolerance"]
    row = torch.tensor([i for i, r in enumerate(per_token) for _ in r])
    lengths = torch.tensor([len(r) for r in per_token])
    terms = tensor(flat(per_token))
    for aggregation, denominator in (
        ("token_mean", 3),
        ("seq_mean_token_mean", 2),
        ("seq_mean_token_sum", 2),
    ):
        weights = losses.token_weights(row, lengths, denominator=denominator, aggregation=aggregation)  # type: ignore[arg-type]
        assert (terms * weights).sum().item() == near(expected[aggregation], tol)
    constant = losses.token_weights(row, lengths, denominator=128)
    assert (terms * constant).sum().item() == near(expected["batch_constant_128"], tol)
    (partition,) = case["subcases"]
    weights = losses.token_weights(row, lengths, denominator=3)
    parts = [(terms * weights)[row == members[0]].sum().item() for members in partition["micro_batches"]]
    assert parts == near(partition["contributions"], tol)
    assert sum(parts) == near(expected["token_mean"], tol)
    assert sum(parts) != near(partition["wrong_sum_of_local_means"], 1e-3)


def test_14_explained_variance(golden: Any) -> None:
    case = golden("14")
    returns, values, expected = case["inputs"]["returns"], case["inputs"]["values"], case["expected"]
    whole = losses.ExplainedVariance.of(returns, values)
    assert whole.value == near(expected["ev"], case["tolerance"])
    assert whole.value != near(expected["ev_second_moment_variant"], 1e-3)
    parts = [losses.ExplainedVariance.of(returns[i : i + 1], values[i : i + 1]) for i in range(4)]
    assert [part.value for part in parts] == [None] * 4
    assert sum(parts, losses.ExplainedVariance()).value == near(expected["ev"], case["tolerance"])
    assert losses.ExplainedVariance.of(case["subcases"][0]["returns"], [0.3, 0.4]).value is None
    assert losses.ExplainedVariance().value is None


def test_16_two_streams(golden: Any) -> None:
    case = golden("16")
    streams = [case["inputs"]["stream_1"], case["inputs"]["stream_2"]]
    masks = [np.array(s["action_mask"], dtype=bool) for s in streams]
    values = np.concatenate([np.array(s["values"])[m] for s, m in zip(streams, masks, strict=True)])
    lengths = [int(m.sum()) for m in masks]
    rewards = {"chain": [0, 0, 0, 0, 1.0], "local": [0, 0, 1.0, 0, 1.0]}
    for credit in ("chain", "local"):
        got = adv.compute_stream_advantages(values, rewards[credit], [5], lengths, credit=credit, lam=0.8)  # type: ignore[arg-type]
        assert sum(rewards[credit]) == case["expected"]["reward_mass"][credit]
        for part, mask, name in zip(np.split(got.advantages, [3]), masks, ("stream_1", "stream_2"), strict=True):
            assert spread(part, mask).tolist() == near(case["expected"][credit][name], case["tolerance"])
    perfect, wrong = case["subcases"]
    for credit in ("chain", "local", "compactionrl"):
        one = rewards["local" if credit == "local" else "chain"]
        got = adv.compute_stream_advantages([1.0] * 5, one, [5], lengths, credit=credit, lam=0.8)  # type: ignore[arg-type]
        assert got.advantages.tolist() == near([perfect["expected_advantages"]] * 5, case["tolerance"])
    factored = adv.compute_gae([1.0] * 3, [0, 0, 0.8**2], [3], lam=0.8).advantages[-1]
    assert factored == near(wrong["wrong_delta_last_token_stream_1"], case["tolerance"])


def test_16_compactionrl_factor_by_hand() -> None:
    # Streams of 2, 1 and 1 tokens, lambda 1/2, reward 1 at the end, V = 0: what enters stream 2 comes from 1 later
    # token (factor 1/2), what enters stream 1 from 2 later tokens (factor 1/4), each after the ordinary link's 1/2.
    got = adv.compute_stream_advantages([0.0] * 4, [0, 0, 0, 1.0], [4], [2, 1, 1], credit="compactionrl", lam=[0.5])
    assert got.advantages.tolist() == [1 / 64, 1 / 32, 1 / 4, 1.0]


def test_18_stale_tokens_masked(golden: Any) -> None:
    case = golden("18")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    age = case["config"]["learner_version"] - np.array(inputs["versions"])
    logp = tensor(inputs["logp_current"], grad=True)
    out = run_policy(
        logp,
        tensor(inputs["behavior_logprobs"]),
        tensor(inputs["advantage"]),
        stale=torch.tensor(age > case["config"]["max_staleness"]),
    )
    out.loss.backward()
    assert out.weight.tolist() == near(expected["weight"], tol)
    assert out.loss.item() == near(expected["loss"], tol)
    assert logp.grad.tolist() == near(expected["grad_logp_current"], tol)
    assert out.account == losses.TokenAccount(kept=expected["kept"], stale_masked=expected["stale_masked"])
    assert out.loss.item() != near(case["contrast"]["loss_if_stale_leaves_the_denominator"], 1e-3)


def test_19_bootstrap_after_observation(golden: Any) -> None:
    case = golden("19")
    inputs, expected, tol = case["inputs"], case["expected"], case["tolerance"]
    after = inputs["bootstrap_value"]
    assert masked_gae(inputs, 1.0, 0.9, after).advantages.tolist() == near(expected["advantages"], tol)
    assert masked_returns(inputs, 1.0, after).tolist() == near(expected["returns_lambda_1"], tol)
    terminal = masked_gae(inputs, 1.0, 0.9).advantages.tolist()
    assert terminal == near(case["contrast"]["advantages_if_terminal"], tol)
    assert terminal != near(expected["advantages"], 1e-3)


def test_20_global_leave_one_out(golden: Any) -> None:
    case = golden("20")
    rewards = np.array(case["inputs"]["rewards"])
    got = baselines.leave_one_out(rewards)
    assert got.tolist() == near(case["expected"]["advantage"], case["tolerance"])
    assert (rewards - got).tolist() == near(case["expected"]["baseline"], case["tolerance"])
    alone = case["subcases"][0]
    assert baselines.leave_one_out(alone["rewards"]).tolist() == [alone["expected_advantage"]]
