"""`python -m sao_gym.swe`: see `sao_gym.commands.swe`."""

from sao_gym.commands.swe import main

if __name__ == "__main__":
    raise SystemExit(main())
