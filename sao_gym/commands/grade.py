r"""`sao-gym grade GOLD RESPONSE`: what the answer grader says of one response, and why.

Example:
    $ sao-gym grade '1/2' 'So the answer is \boxed{0.5}.'
    score   1
    passed  yes
    method  symbolic
    why     ...
"""

import sys

from sao_gym.commands.base import run_command
from sao_gym.errors import ConfigError
from sao_gym.tasks.grading import close_graders, grade_answer

USAGE = r"""usage: sao-gym grade GOLD RESPONSE   (or python -m sao_gym.grade GOLD RESPONSE)

Grade one response against the gold answer as the mathematics environments do; prints the score, how it was reached, and why.
RESPONSE may be - to be read from standard input. The exit code is 0 whatever the score.

examples
  sao-gym grade 70 'So the answer is \boxed{070}.'
  sao-gym grade '\frac{2}{3}' - < answer.txt
  sao-gym grade -5 '\boxed{-5}'
"""


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `sao-gym grade`."""
    if argv in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    words = argv[1:] if argv[:1] == ["--"] else argv
    if len(words) != 2:
        raise ConfigError(f"grade takes a gold answer and a response, got {len(words)} words; quote each of them")
    gold, response = words[0], sys.stdin.read() if words[1] == "-" else words[1]
    try:
        score = grade_answer(gold, response)
    finally:
        close_graders()
    print(f"score   {score.value:g}\npassed  {'yes' if score.passed else 'no'}\nmethod  {score.method}")
    print(f"why     {score.detail or 'not said'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
