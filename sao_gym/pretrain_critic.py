"""`python -m sao_gym.pretrain_critic`: see `sao_gym.commands.pretrain_critic`."""

from sao_gym.commands.pretrain_critic import main

if __name__ == "__main__":
    raise SystemExit(main(None))
