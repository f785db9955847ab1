"""Runs a study: one process a run, so many at a time, each on one thread; what is done stays done.

Invariant: a run is begun once its start policy, and its critic where it has one, are whole; they are made aside and renamed. A
run that failed is named and does not end the others. An interrupt ends the runs in progress with a checkpoint, from which the
same command goes on.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sao_gym.commands.study_plan import Arm, Places, Study
from sao_gym.runfolder import CONFIG

PATIENCE_S = 120.0


@dataclass(slots=True)
class StudyRunner:
    """Runs what is left of a study. `say` hears a line for each run that begins, ends or fails."""

    study: Study
    places: Places
    jobs: int
    say: Callable[[str], None]
    failed: list[str] = field(default_factory=list)
    is_stopping: bool = False
    _living: set[asyncio.subprocess.Process] = field(default_factory=set)

    async def run(self) -> list[str]:
        """Names of the runs that failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, self.stop)
        gate = asyncio.Semaphore(self.jobs)
        locks = {seed: asyncio.Lock() for seed in self.study.seeds}
        await asyncio.gather(*(self._one(arm, seed, gate, locks[seed]) for arm, seed in self.study.pairs))
        return self.failed

    def stop(self) -> None:
        """Begin no more, and ask those that run for a checkpoint."""
        self.is_stopping = True
        for process in self._living:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _one(self, arm: Arm, seed: int, gate: asyncio.Semaphore, lock: asyncio.Lock) -> None:
        name = f"{arm.name} seed {seed}"
        if self.places.is_done(self.study, arm, seed):
            return
        async with gate:
            async with lock:  # one of the arms makes what all of them start from
                if not self.is_stopping and not await self._made(arm, seed):
                    self._fail(name)
                    return
            if self.is_stopping:
                return
            self.say(f"{name}: begun")
            if await self._call(self._words(arm, seed), f"{arm.name}-{seed}") and self._is_done(arm, seed):
                self.say(f"{name}: done")
            elif not self.is_stopping:
                self._fail(name)

    def _is_done(self, arm: Arm, seed: int) -> bool:
        return self.is_stopping or self.places.is_done(self.study, arm, seed)

    def _fail(self, name: str) -> None:
        if not self.is_stopping:
            self.failed.append(name)
            self.say(f"{name}: FAILED, see {self.places.out / 'logs'}")

    async def _made(self, arm: Arm, seed: int) -> bool:
        """Whether the start policy and the critic are there, made now where they are not."""
        start, critic = self.places.start(seed), self.places.critic(seed)
        imitate = ("sao_gym.sft", "--preset", self.study.start, "--seed", str(seed))
        if not await self._folder(imitate, start, f"start-{seed}"):
            return False
        fit = ("sao_gym.pretrain_critic", "--preset", self.study.critic, "--model", str(start), "--seed", str(seed))
        return not arm.has_fitted_critic or await self._folder(fit, critic, f"critic-{seed}")

    async def _folder(self, words: Sequence[str], folder: Path, log: str) -> bool:
        if folder.is_dir():
            return True
        draft = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        if not await self._call([*words, "--out", str(draft)], log):
            return False
        draft.rename(folder)
        return True

    def _words(self, arm: Arm, seed: int) -> list[str]:
        run = self.places.run(arm, seed)
        if (run / CONFIG).is_file():
            return ["sao_gym.train", "--resume", str(run)]
        if run.exists():  # nothing in it counts yet
            shutil.rmtree(run)
        words = ["sao_gym.train", "--preset", self.study.preset, "--model", str(self.places.start(seed))]
        words += ["--out", str(run), "--seed", str(seed), "--steps", str(self.study.steps)]
        words += ["--checkpoint.every", str(self.study.steps)]
        if arm.has_fitted_critic:
            words += ["--critic-init", str(self.places.critic(seed))]
        return [*words, *arm.words, *self.study.settings]

    async def _call(self, words: Sequence[str], log: str) -> bool:
        """Whether a command of ours ended well. What it said goes to its log."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.places.out / "logs" / f"{log}.txt").open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *words, stdout=out, stderr=out, env=environment, start_new_session=True
            )
            self._living.add(process)
            try:
                return await process.wait() == 0
            finally:
                self._living.discard(process)
