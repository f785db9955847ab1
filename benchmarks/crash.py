"""What kill -9 costs: a trainer is killed at random moments and resumed each time, and its history is audited.

Run: python benchmarks/crash.py [--kills 10] [--seed 0]

One process imports everything once and forks a trainer for each life, so that a life costs seconds. Runs take turns:
lock step (max_staleness 0, deterministic engine), whose final weights must equal those of a run that nobody killed, and
asynchronous. The last line is one JSON object. `lost`: prompts that were drawn and are neither trained, dropped for a
reason, nor outstanding. `repeated`: prompts trained twice along the history that survived. `ok`: both are 0, every
final weight hash is the undisturbed run's, and no life ended in any other way than by the kill.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  as the next line: imported once, for all forks

from sao_gym.commands import composition, training  # noqa: F401
from sao_gym.commands.train import main as train
from sao_gym.core import AgentEnv, Reply
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.messages import Message
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.protocols import Task
from sao_gym.stream import Score
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.files import TRAJECTORIES, row_uid

BATCH = 4
STEPS = 24
LOCK_STEP = ("--staleness.max-staleness", "0", "--engine.deterministic", "--rollout.wall-clock-s", "null")


class Parity(AgentEnv):
    """Pays for an answer of even length: a random policy earns something now and then."""

    def __init__(self) -> None:
        super().__init__([Task(id=f"t{i}", prompt=f"{i}?") for i in range(11)])

    def respond(self, message: Message) -> Reply:
        """The first answer is the last."""
        return Reply(is_final=True)

    def grade(self) -> Score:
        """1 for an even number of characters."""
        passed = self.last_action is not None and len(self.last_action.content) % 2 == 0
        return Score(value=float(passed), passed=passed)


def make_model(folder: Path) -> int:
    """A policy of one layer, on disk; returns 0, an exit code."""
    tokenizer = train_tokenizer(["a?"] * 4, vocab_size=268)
    model = tiny_qwen3(vocab_size=len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=128)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return 0


def words(model: Path, seed: int, *, is_lock_step: bool) -> list[str]:
    """The settings of a run: the actor is trained from the second batch on, every third batch gets a checkpoint."""
    given = ["--env", f"{Path(__file__).resolve()}:Parity", "--model", str(model), "--critic-init", "cold"]
    given += ["--batch-size", str(BATCH), "--max-tokens", "6", "--engine.context-length", "128"]
    given += ["--critic.only-steps", "1", "--actor.lr", "1e-2", "--critic.lr", "1e-2", "--checkpoint.every", "3"]
    given += ["--rollout.max-in-flight", "8", "--seed", str(seed), "--steps", str(STEPS)]
    return [*given, *(LOCK_STEP if is_lock_step else ())]


def forked(body: Callable[[], int], log: Path) -> int:
    """The pid of a child that runs `body`; its words go to `log`. No thread of this process may be running."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with log.open("a") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            code = body()
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, limit_s: float) -> int | None:
    """The child's exit code, minus the signal's number for one that was killed; None if it still runs after `limit_s`."""
    limit = time.monotonic() + limit_s
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= limit:
            return None
        time.sleep(0.002)


@dataclass
class Audit:
    """What was seen of one run. `drawn`: the prompt of each row, from the first time that it stood in the ledger."""

    run: Path
    drawn: dict[int, tuple[str, int]] = field(default_factory=dict)
    lost: int = 0

    def look(self) -> None:
        """After a death: rows that were there before must be there, and be the same."""
        path = self.run / "ledger.sqlite"
        if not path.exists():
            self.lost += len(self.drawn)
            return
        ledger = Ledger(path)
        now = {row.number: (row.task_id, row.attempt) for row in ledger.rows()}
        ledger.close()
        self.lost += sum(now.get(number) != prompt for number, prompt in self.drawn.items())
        self.drawn |= now

    def close(self) -> tuple[int, int]:
        """(lost, repeated) of the finished run."""
        self.look()
        ledger = Ledger(self.run / "ledger.sqlite")
        rows = ledger.rows()
        ledger.close()
        files = sorted((self.run / TRAJECTORIES).glob("step_*.parquet"))
        trained = [(row.uid, int(path.stem[5:])) for path in files for row in read_trajectories(path)]
        times = Counter(uid for uid, _ in trained)
        steps = [json.loads(line)["step"] for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        missing = set(range(1, STEPS + 1)) - set(steps)
        lost = self.lost + BATCH * len(missing) + sum(not _is_accounted(row, dict(trained)) for row in rows)
        repeated = sum(count - 1 for count in times.values()) + BATCH * (len(steps) - len(set(steps)))
        return lost + abs(len(trained) - BATCH * STEPS), repeated


def _is_accounted(row: LedgerRow, trained: dict[str, int]) -> bool:
    """Whether ledger and trajectories say the same of a row."""
    if row.status is RowStatus.TRAINED:
        return trained.get(row_uid(row.number)) == row.trained_at_step
    return row_uid(row.number) not in trained and (row.status is not RowStatus.DROPPED or row.reason is not None)


def weights(run: Path) -> list[str]:
    """The hash of the weights after each step."""
    return [json.loads(line)["weight_hash"] for line in (run / "metrics.jsonl").read_text().splitlines()]


class Crashes:
    """Kills until there were enough. `kinds` counts the lives by the step at which they ended."""

    def __init__(self, folder: Path, kills: int, seed: int) -> None:
        self.folder = folder
        self.wanted = kills
        self.draw = random.Random(seed)
        self.kills = self.lost = self.repeated = self.runs = self.different = 0
        self.at_steps: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []

    def measure(self) -> None:
        """Run after run, until `wanted` kills were made and the last run has ended."""
        while self.kills < self.wanted and not self.wrong:
            self._one_run(self.runs, is_lock_step=self.runs % 2 == 0)
            self.runs += 1

    def _one_run(self, number: int, *, is_lock_step: bool) -> None:
        given = words(self.folder / "model", number, is_lock_step=is_lock_step)
        whole, cut = self.folder / f"whole{number}", self.folder / f"cut{number}"
        started = time.monotonic()
        pid = forked(lambda: train([*given, "--out", str(whole)]), self.folder / f"whole{number}.log")
        if (code := ended(pid, 300.0)) != 0:
            self.wrong.append(f"the undisturbed run {number} ended with {code}")
            return
        life = time.monotonic() - started
        audit = Audit(cut)
        while self._one_life(given, cut, audit, life):
            pass
        if self.wrong:
            return
        lost, repeated = audit.close()
        self.lost, self.repeated = self.lost + lost, self.repeated + repeated
        if is_lock_step and weights(cut) != weights(whole):
            self.different += 1

    def _one_life(self, given: Sequence[str], cut: Path, audit: Audit, life: float) -> bool:
        """One trainer, killed at a random moment unless enough were; whether the run goes on."""
        begun = (cut / "config.toml").exists() and (cut / "manifest.json").exists()
        argv = ["--resume", str(cut)] if begun else [*given, "--out", str(self._fresh(cut, audit))]
        started = time.monotonic()
        pid = forked(lambda: train(argv), cut.with_suffix(".log"))
        may_kill = self.kills < self.wanted
        code = ended(pid, self.draw.uniform(0.0, 0.8 * life) if may_kill else 300.0)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            code = ended(pid, 60.0)
        self.seconds.append(time.monotonic() - started)
        if code == 0:
            return False
        if code != -signal.SIGKILL or not may_kill:
            self.wrong.append(f"{' '.join(argv[:2])} ended with {code}: see {cut.with_suffix('.log')}")
            return False
        self.kills += 1
        if (cut / "metrics.jsonl").exists():
            self.at_steps[(cut / "metrics.jsonl").read_bytes().count(b"\n")] += 1
            audit.look()
        else:
            self.at_steps[0] += 1
        return True

    def _fresh(self, cut: Path, audit: Audit) -> Path:
        """Killed before the folder came to hold a run: what was begun is put aside, and the run starts anew."""
        if cut.exists():
            cut.rename(cut.with_name(f"{cut.name}.begun{self.kills}"))
            audit.drawn.clear()
        return cut

    def report(self) -> dict[str, object]:
        """The figures of the last line."""
        is_ok = not (self.lost or self.repeated or self.different or self.wrong) and self.kills >= self.wanted
        return {
            "benchmark": "crash",
            "ok": is_ok,
            "kills": self.kills,
            "lost": self.lost,
            "repeated": self.repeated,
            "runs": self.runs,
            "runs_with_other_weights": self.different,
            "life_median_s": round(statistics.median(self.seconds), 2) if self.seconds else None,
            "killed_at_step": {str(step): count for step, count in sorted(self.at_steps.items())},
            "wrong": self.wrong,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0 if nothing was lost, repeated or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments at which it kills")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="sao-crash-") as name:
        pid = forked(lambda: make_model(Path(name) / "model"), Path(name) / "model.log")
        if ended(pid, 120.0) != 0:
            raise SystemExit((Path(name) / "model.log").read_text())
        crashes = Crashes(Path(name), options.kills, options.seed)
        crashes.measure()
        for line in crashes.wrong:
            print(line)
            for log in sorted(Path(name).glob("*.log")):
                print(log, log.read_text()[-2000:], sep="\n")
    print(json.dumps(crashes.report()))
    return 0 if crashes.report()["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
