"""`python -m sao_gym.quickstart`: see `sao_gym.commands.quickstart`."""

from sao_gym.commands.quickstart import main

if __name__ == "__main__":
    raise SystemExit(main())
