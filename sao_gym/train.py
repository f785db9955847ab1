"""`python -m sao_gym.train`."""

from sao_gym.commands.train import main

if __name__ == "__main__":
    raise SystemExit(main())
