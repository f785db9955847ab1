"""`python -m sao_gym.study`."""

from sao_gym.commands.study import main

if __name__ == "__main__":
    raise SystemExit(main())
