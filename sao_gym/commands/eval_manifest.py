"""All that it takes to do an evaluation again, and to see what differed."""

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sao_gym import __version__
from sao_gym.commands.eval_config import EvalConfig, departures
from sao_gym.commands.eval_policy import EvalPolicy, budgets, sampling
from sao_gym.commands.eval_targets import Target
from sao_gym.config import Resolved
from sao_gym.tasks.grading import GRADER_VERSION

PACKAGES = ("torch", "transformers", "tokenizers", "renderers", "numpy", "sympy", "math-verify", "httpx")


async def manifest(
    resolved: Resolved[EvalConfig], protocol: str | None, targets: Sequence[Target], policy: EvalPolicy
) -> dict[str, Any]:
    """The facts of an evaluation, as JSON has them."""
    config, named = resolved.config, await policy.facts()
    return {
        "versions": versions(),
        "code": code(),
        "protocol": {
            "name": config.protocol,
            "departures": [
                *map(str, departures(protocol, resolved)),
                *_too_small(config, named["engine"].get("context_length")),
            ],
        },
        "benchmarks": {target.name: dict(target.facts) for target in targets},
        "env_options": config.env.options,
        "tools": config.env.tools,
        **named,
        "sampling": sampling_facts(config),
        "grader_version": GRADER_VERSION,
        "seed": config.sampling.seed,
        "first_attempt": 0,
        "budgets": asdict(budgets(config.sampling)),
        "level": config.level,
    }


def _too_small(config: EvalConfig, context_length: int | None) -> list[str]:
    """A model that holds less than its protocol asks for is measured by another protocol."""
    asked = config.sampling.max_tokens_per_episode
    if config.protocol is None or asked is None or context_length is None or context_length >= asked:
        return []
    return [f"tokens of an episode: {asked} -> {context_length}, which is what the model holds"]


def sampling_facts(config: EvalConfig) -> dict[str, Any]:
    """How everything was drawn."""
    asked = sampling(config.sampling)
    return {"temperature": asked.temperature, "top_p": asked.top_p, "top_k": asked.top_k}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Releases of what took part."""
    found = {"sao_gym": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code() -> dict[str, Any]:
    """The commit of this code, and whether files differ from it; nothing where it is installed without its history."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return {}
    commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return {} if commit is None else {"commit": commit, "is_changed": bool(changed)}


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
