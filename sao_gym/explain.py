"""`python -m sao_gym.explain`: see `sao_gym.commands.explain`."""

from sao_gym.commands.explain import main

if __name__ == "__main__":
    raise SystemExit(main(None))
