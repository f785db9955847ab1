"""`python -m sao_gym.grade`: see `sao_gym.commands.grade`."""

from sao_gym.commands.grade import main

if __name__ == "__main__":
    raise SystemExit(main())
