"""What the answer grader gets right: every gold against itself, against every other, against mutations of it.

A false accept is a verdict "equal" on two answers that an independent evaluation, or the way one was made from the
other, says differ. It should never happen; a false reject costs a point, a false accept the meaning of the score.

    SAO_GYM_DATA=data python benchmarks/grading.py            # 2 to 5 minutes on two cores
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sympy
from math_verify import parse

from sao_gym.tasks._answers import as_integer, meaning, normalise, spelling
from sao_gym.tasks._equality import Finding, Verdict, find, quiet, same
from sao_gym.tasks._kinds import Reading
from sao_gym.tasks._reading import read
from sao_gym.tasks.grading import close_graders, grade_answer, grade_answer_async

BENCHMARKS = (
    "aime2024", "aime2025", "aime2026", "beyond_aime", "hmmt_feb_2025", "hmmt_nov_2025", "imo_answerbench",
    "imo_answerbench_v1",
)  # fmt: skip
TRAINING = "math_train_sample"
PAIRS_FILE = Path(__file__).resolve().parents[1] / "tests" / "tasks" / "answer_pairs.txt"
MONSTERS = (
    "2^{4^{8^{16}}}",
    r"\log_{2^5}(\log_{2^4}(\log_{2^3}(\log_{2^2}(\log_{2^1}2^{2^{16^{8^4}}}))))",
    "(10^{9})!",
    r"\binom{10^9}{5\cdot10^8}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers, whether they are equal, and what kind of answers or of mutation they are."""

    kind: str
    left: str
    right: str
    equal: bool


def load_pairs(path: Path = PAIRS_FILE) -> list[Pair]:
    """The hand-written pairs."""
    pairs, kind = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            kind = line.strip("% ")
        elif line.strip():
            left, sign, right = re.split(r"  +([=#])  +", line)
            pairs.append(Pair(kind=kind, left=left, right=right, equal=sign == "="))
    return pairs


def load_golds(folder: Path, name: str) -> list[str]:
    """The gold answers of one set, in order."""
    lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line)["answer"]) for line in lines]


def finding(left: str, right: str) -> Finding:
    """What the rules say, integers first, as the grader does."""
    one, other = as_integer(left), as_integer(right)
    if one is not None and other is not None:
        return Finding(Verdict.EQUAL if one == other else Verdict.DIFFERENT, "integer")
    return find(left, right)


def accepts(left: str, right: str) -> bool:
    """Whether either order says "equal"."""
    return Verdict.EQUAL in (finding(left, right).verdict, finding(right, left).verdict)


def unmatched(golds: list[str]) -> list[str]:
    """Golds that do not match themselves, boxed."""
    return [gold for gold in dict.fromkeys(golds) if not grade_answer(gold, rf"\boxed{{{gold}}}").passed]


_NOTHING = frozenset({"nosolutions", "nopositiveintegers"})
_PREFIX = re.compile(r"allnumbersoftheform|[a-zA-Z](?:\(\w\))?=(?=[^=]*$)")


def is_truly_equal(left: str, right: str) -> bool:
    """An evaluation that shares no code with the grader: the same letters, or the same numbers to 40 digits."""
    texts = [
        _PREFIX.sub("", re.sub(r"^All|[\s$.]", lambda m: m[0].lower().strip(" $.\n"), side)) for side in (left, right)
    ]
    if texts[0] == texts[1] or {text.lower() for text in texts} <= _NOTHING:
        return True
    one, other = _numbers(left), _numbers(right)
    if not one or not other or len(one) != len(other):
        return False
    return all(abs(sympy.N(a - b, 40)) < sympy.Rational(1, 10**30) for a, b in zip(one, other, strict=True))


def _numbers(text: str) -> list[sympy.Expr] | None:
    found = [parse(f"\\boxed{{{part}}}", parsing_timeout=None) for part in text.strip(" $.").split(",")]
    values = [one[0] for one in found if one and isinstance(one[0], sympy.Expr) and one[0].is_number]
    return sorted(values, key=lambda value: float(value)) if len(values) == len(found) else None


@dataclass(frozen=True, slots=True)
class Known:
    """A gold with all that comparing it needs, worked out once."""

    gold: str
    integer: str | None
    spelled: frozenset[str]
    reading: Reading


def know(gold: str) -> Known:
    """A gold, read."""
    text = normalise(gold)
    integer = as_integer(text)
    return Known(gold, integer, frozenset({spelling(text), meaning(text)}), read(integer or text))


def are_taken_for_equal(left: Known, right: Known) -> bool:
    """What the grader says of two golds, in either order."""
    if left.integer is not None and right.integer is not None:
        return left.integer == right.integer
    return bool(left.spelled & right.spelled) or same(left.reading, right.reading) or same(right.reading, left.reading)


def false_accepts(golds: list[str], others: list[str]) -> list[tuple[str, str]]:
    """Pairs of different golds, one of either list, that the grader takes for equal and that are not."""
    one, other = ([know(gold) for gold in dict.fromkeys(them)] for them in (golds, others))
    pairs = {
        frozenset((a.gold, b.gold)): (a, b)
        for a, b in itertools.product(one, other)
        if a.spelled != b.spelled and (a.integer is None or b.integer is None or a.integer == b.integer)
    }
    accepted = [(a.gold, b.gold) for a, b in pairs.values() if are_taken_for_equal(a, b)]
    return [pair for pair in accepted if not is_truly_equal(*pair)]


def what_to_cross(golds: dict[str, list[str]], name: str) -> tuple[list[str], list[str]]:
    """All golds of a set with each other; of the old IMO-AnswerBench those that the new one does not have."""
    if name.endswith("_v1"):
        known = set(golds[name.removesuffix("_v1")])
        return [gold for gold in golds[name] if gold not in known], golds[name]
    return golds[name], golds[name]


def mutate(gold: str, draw: random.Random) -> Pair | None:
    """A gold with one change that changes what it says, or None where the drawn change finds no hold."""
    kind = draw.choice(("digit", "sign", "exponent", "bracket", "order", "drop", "operator", "extra"))
    text = normalise(gold)
    changed = {
        "digit": _change_digit, "sign": _change_sign, "exponent": _change_exponent, "bracket": _change_bracket,
        "order": _change_order, "drop": _drop, "operator": _change_operator, "extra": _append,
    }[kind](text, draw)  # fmt: skip
    if changed is None or spelling(changed) == spelling(gold):
        return None
    return Pair(kind=kind, left=gold, right=changed, equal=False)


def _replace_one(pattern: str, text: str, draw: random.Random, new: str | dict[str, str] | None = None) -> str | None:
    found = list(re.finditer(pattern, text))
    if not found:
        return None
    one = draw.choice(found)
    if new is None:
        put = draw.choice([digit for digit in "123456789" if digit != one[0]])
    else:
        put = new if isinstance(new, str) else new[one[0]]
    return text[: one.start()] + put + text[one.end() :]


def _change_digit(text: str, draw: random.Random) -> str | None:
    return _replace_one(r"(?<!_)(?<!_\{)\d", text, draw)


def _change_sign(text: str, draw: random.Random) -> str | None:
    if re.match(r"[\[({\\]*0(?![.\d])", text) or re.search("[a-zA-Z]{4}", re.sub(r"\\[a-zA-Z]+", "", text)):
        return None
    if "=" in text or "," in text or text[:1] in r"([":
        return None
    return text[1:] if text[0] == "-" else f"-({text})"


def _change_exponent(text: str, draw: random.Random) -> str | None:
    found = re.search(r"\^(\{(?:\d+)\}|\d)(?!!)", text)
    return text[: found.end(1)].rstrip("}") + "1" + ("}" if found[1][0] == "{" else "") + text[found.end(1) :] if (
        found and found[1][0] == "{"
    ) else (text[: found.start(1)] + f"{{{found[1]}1}}" + text[found.end(1) :] if found else None)  # fmt: skip


def _change_bracket(text: str, draw: random.Random) -> str | None:
    if not re.fullmatch(r"[(\[].*,.*[)\]]", text) or r"\cup" in text:
        return None
    return {"(": "[", "[": "("}[text[0]] + text[1:-1] + draw.choice((text[-1], {")": "]", "]": ")"}[text[-1]]))


def _change_order(text: str, draw: random.Random) -> str | None:
    if not re.fullmatch(r"\([^()]*,[^()]*\)", text):
        return None
    parts = [part.strip() for part in text[1:-1].split(",")]
    return f"({', '.join(reversed(parts))})" if parts != parts[::-1] else None


def _drop(text: str, draw: random.Random) -> str | None:
    parts = re.split(r",(?![^(\[{]*[)\]}])", text)
    if len(parts) < 2 or r"\ldots" in text or re.search(r"where|for|if", text):
        return None
    parts.pop(draw.randrange(len(parts)))
    return ",".join(parts)


def _change_operator(text: str, draw: random.Random) -> str | None:
    swaps = {"+": "-", "-": "+", "<": r"\le ", r"\le": "<", r"\ge": r"\le", r"\cup": r"\cap", r"\lfloor": "(", "!": ""}
    return _replace_one(r"(?<=[\w})])\s*[+-]|<|\\le(?![a-z])|\\ge(?![a-z])", text, draw, {
        **swaps, " +": "-", " -": "+"})  # fmt: skip


def _append(text: str, draw: random.Random) -> str | None:
    return text + f", {draw.randrange(10**6, 10**7)}" if re.fullmatch(r"[\d, \\{}a-z-]+", text) else None


def mutations(golds: list[str], n: int, seed: int) -> Iterator[Pair]:
    """`n` mutated golds, the same for the same seed."""
    draw, made = random.Random(seed), 0
    while made < n:
        pair = mutate(draw.choice(golds), draw)
        if pair is not None:
            made += 1
            yield pair


def wrong_pairs(pairs: list[Pair]) -> list[Pair]:
    """Pairs that are not judged as wanted in both orders."""
    return [
        pair
        for pair in pairs
        if any((finding(*two).verdict is Verdict.EQUAL) != pair.equal
               for two in ((pair.left, pair.right), (pair.right, pair.left)))
    ]  # fmt: skip


async def grade_monsters() -> dict[str, float]:
    """Wall time of 16 monsters at once, and how long a normal pair takes in the middle of them and alone."""

    async def timed(gold: str, answer: str, after_s: float = 0.0) -> float:
        await asyncio.sleep(after_s)
        start = time.monotonic()
        await grade_answer_async(gold, answer)
        return time.monotonic() - start

    alone = statistics.median([await timed("5", r"\frac{10}{2}") for _ in range(5)])
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.monotonic()
    *_, first, later = await asyncio.gather(
        *(timed("7", monster) for monster in MONSTERS * 4),
        timed("5", r"\frac{10}{2}"),
        timed("5", r"\frac{10}{2}", 0.5),
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    wall = time.monotonic() - start
    return {
        "monsters_wall_s": round(wall, 2), "normal_alone_s": round(alone, 3), "normal_among_monsters_s": round(first, 3),
        "normal_half_a_second_later_s": round(later, 3), "monsters_rss_mb": round(grown / 1024, 1),
    }  # fmt: skip


def main() -> int:
    """Measure, print one line of JSON, and fail if anything was accepted that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("SAO_GYM_DATA"))
    parser.add_argument("--mutations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None:
        parser.error("give --data FOLDER, or set SAO_GYM_DATA")
    quiet()
    golds = {name: load_golds(Path(options.data), name) for name in (*BENCHMARKS, TRAINING)}
    times = []
    for gold in [gold for gold in golds["imo_answerbench"] if as_integer(gold) is None]:
        start = time.monotonic()
        grade_answer(gold, rf"\boxed{{{gold}+0}}")
        times.append(time.monotonic() - start)
    missed = {name: len(unmatched(answers)) for name, answers in golds.items()}
    start = time.monotonic()
    crossed = {name: false_accepts(*what_to_cross(golds, name)) for name in BENCHMARKS}
    cross_s = time.monotonic() - start
    everything = [gold for name in BENCHMARKS for gold in golds[name]]
    mutated = [
        pair for pair in mutations(everything, options.mutations, options.seed) if accepts(pair.left, pair.right)
    ]
    pairs = load_pairs()
    wrong = wrong_pairs(pairs)
    for pair in (*itertools.chain(*crossed.values()), *mutated, *wrong):
        print(pair, file=sys.stderr)
    monsters = asyncio.run(grade_monsters())
    close_graders()
    n_false = sum(map(len, crossed.values())) + len(mutated) + sum(not pair.equal for pair in wrong)
    ok = (
        n_false == 0
        and not any(missed.values())
        and len(wrong) <= 0.05 * len(pairs)
        and monsters["monsters_wall_s"] < 50
    )
    print(json.dumps({
        "benchmark": "grading", "ok": ok, "self_unmatched": missed,
        "cross_false_accepts": {name: len(found) for name, found in crossed.items()}, "cross_s": round(cross_s, 1),
        "mutated": options.mutations, "mutated_false_accepts": len(mutated),
        "pairs": len(pairs), "pairs_right": len(pairs) - len(wrong),
        "grade_median_s": round(statistics.median(times), 4),
        "grade_p99_s": round(sorted(times)[int(0.99 * (len(times) - 1))], 4), **monsters,
    }))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
