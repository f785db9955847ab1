"""Where each command's presets lie: those of the training in `trainer/presets`, the others in a folder named as they."""

from pathlib import Path

TRAIN_PRESETS = Path(__file__).resolve().parent.parent / "trainer" / "presets"
SFT_PRESETS = TRAIN_PRESETS / "sft"
CRITIC_PRESETS = TRAIN_PRESETS / "pretrain_critic"
EVAL_PRESETS = TRAIN_PRESETS / "eval"
