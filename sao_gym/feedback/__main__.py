"""`python -m sao_gym.feedback`."""

from sao_gym.commands.feedback import main

if __name__ == "__main__":
    raise SystemExit(main())
