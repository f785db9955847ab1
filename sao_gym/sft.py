"""`python -m sao_gym.sft`: see `sao_gym.commands.sft`."""

from sao_gym.commands.sft import main

if __name__ == "__main__":
    raise SystemExit(main(None))
