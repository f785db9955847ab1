"""One process of a run on several: rank 0 steps through plans and keeps the weights after each, the others serve.

Started by test_learner.py with RANK, WORLD_SIZE and MASTER_ADDR set: python two_ranks.py JOB RESULT
"""

import pickle
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.trainer.learner import Learner


def main(job: Path, result: Path) -> None:
    torch.set_num_threads(1)
    config, model, critic, plans = pickle.loads(job.read_bytes())
    learner = Learner(config, model, critic, Accelerator(cpu=True), SystemClock())
    if not learner.accelerator.is_main_process:
        learner.serve()
        learner.accelerator.end_training()
        return
    after = []
    for plan in plans:
        metrics = learner.step(plan).metrics()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        values = {name: value.clone() for name, value in (critic.state_dict() if critic else {}).items()}
        after.append((metrics, weights, values))
    wrapper = type(learner.actor).__name__
    learner.stop()
    result.write_bytes(pickle.dumps((learner.world, wrapper, after)))
    learner.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
