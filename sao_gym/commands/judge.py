"""`sao-gym judge calibrate`: how far a judge of texts can be trusted, against labels by hand.

Example:
    $ sao-gym judge calibrate
    $ sao-gym judge calibrate --judge openai --judge-model glm-4.7 --judge-base http://localhost:8000/v1
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.envs.judges.calibration import Calibration, Share, calibrate
from sao_gym.envs.judges.gold import OURS, read_gold
from sao_gym.envs.judges.make import JudgeOptions, make_judge
from sao_gym.errors import ConfigError
from sao_gym.loops import run_blocking
from sao_gym.writing_styles import PLAIN, STYLES

USAGE = """usage: sao-gym judge calibrate [options]   (or python -m sao_gym.judge calibrate ...)

Ask a judge about texts that were labelled by hand, four times each: twice alike, with the styles listed the other way round,
and with plain sentences added. Shows agreement, and what flips. Nothing is read from or kept in a cache.

  --judge NAME           rule (default), openai or ensemble
  --judge-model NAME     model of an OpenAI-compatible API
  --judge-base URL       its address
  --judge-options TABLE  further options as in the environment, e.g. '{orders = 3, concurrency = 8}'
  --gold FILE            JSON lines with request, text, style and quality (default gold-1, ours; seen-1 is ours too)
  --out FILE.json        write the figures as well

examples
  sao-gym judge calibrate
  sao-gym judge calibrate --judge openai --judge-model glm-4.7 --judge-base http://localhost:8000/v1 --out judge.json
"""


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `sao-gym judge`."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if argv[0] != "calibrate":
        raise ConfigError(f"sao-gym judge knows no {argv[0]!r}; the one thing that it does is: sao-gym judge calibrate")
    words = take_options(argv[1:], values=("judge", "judge-model", "judge-base", "judge-options", "gold", "out"))
    if words.rest:
        raise ConfigError(f"sao-gym judge calibrate does not know {words.rest[0]!r}; --help lists its words")
    out = Path(words.value("out") or "")
    if words.value("out") and not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.absolute().parent}")
    kind, options = words.value("judge") or "rule", read_options(words)
    gold = read_gold(words.value("gold") or OURS[0])
    found = run_blocking(calibrate(lambda: make_judge(kind, options), gold))
    print(table(found))
    if words.value("out"):
        out.write_text(json.dumps(record(found), indent=1) + "\n", encoding="utf-8")
    return 0


def read_options(words: Options) -> JudgeOptions:
    """What the words say of the judge. Raises ConfigError."""
    text = words.value("judge-options") or "{}"
    try:
        given = tomllib.loads(f"given = {text}")["given"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--judge-options {text!r} is no TOML table such as '{{orders = 3}}': {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"--judge-options {text!r} is no TOML table such as '{{orders = 3}}'")
    named = {"model": words.value("judge-model"), "base": words.value("judge-base")}
    made = JudgeOptions.of(**{**given, **{name: value for name, value in named.items() if value is not None}})
    return replace(made, cache=None)


def table(found: Calibration) -> str:
    """For people."""
    lines = [f"judge                  {found.judge}", f"texts                  {found.texts}"]
    rows = (
        ("style as labelled", found.style),
        ("of the styles named", found.named),
        ("quality as labelled", found.quality),
        ("flips, asked again", found.flips),
        ("flips, styles turned", found.order_flips),
        ("flips, text padded", found.padding_flips),
        ("bad made good by it", found.padding_gains),
    )
    lines += [f"{name:<22} {_spoken(share)}" for name, share in rows]
    kappa = "undefined" if found.kappa is None else f"{found.kappa:.2f}"
    lines += [f"kappa of style         {kappa}", f"first style, excess    {found.first_excess:+.3f}"]
    lines += [f"not judged             {', '.join(f'{kind} {n}' for kind, n in found.errors.items()) or 'none'}", ""]
    return "\n".join([*lines, *_confusion(found)])


def _spoken(share: Share) -> str:
    if share.value is None:
        return "nothing to count"
    return f"{share.value:.3f} ({share.interval.low:.3f}-{share.interval.high:.3f}), {share.hits} of {share.n}"


def _confusion(found: Calibration) -> list[str]:
    names = (*STYLES, PLAIN)
    head = f"{'label, verdict:':<16}" + "".join(f"{name:>12}" for name in names)
    rows = [f"{one:<16}" + "".join(f"{found.confusion.get((one, other), 0):>12}" for other in names) for one in names]
    return [head, *rows]


def record(found: Calibration) -> dict[str, Any]:
    """The figures as JSON values."""
    shares = {
        name: {"value": share.value, "low": share.interval.low, "high": share.interval.high, "n": share.n}
        for name in ("style", "named", "quality", "flips", "order_flips", "padding_gains", "padding_flips")
        if isinstance(share := getattr(found, name), Share)
    }
    confusion = {f"{label} -> {verdict}": n for (label, verdict), n in sorted(found.confusion.items())}
    known = {"judge": found.judge, "texts": found.texts, "errors": dict(found.errors), "kappa": found.kappa}
    return {**known, **shares, "first_excess": found.first_excess, "confusion": confusion}
