"""`python -m sao_gym.eval`: see `sao_gym.commands.eval`."""

from sao_gym.commands.eval import main

if __name__ == "__main__":
    raise SystemExit(main())
