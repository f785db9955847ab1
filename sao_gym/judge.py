"""`python -m sao_gym.judge`: see `sao_gym.commands.judge`."""

from sao_gym.commands.judge import main

if __name__ == "__main__":
    raise SystemExit(main())
