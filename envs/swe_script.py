r"""The evaluation script of an instance, run as the row has it between lines that only its reader knows.

What a script prints is cut by marks with a random word in them, which no code under test has seen: the script is read
whole and its file removed before its first line runs, and what was printed can be taken back by nobody. Between the
installation and the tests nothing that the installation left behind goes on running, and what it changed of programs,
of the test runner and of git is listed.

Example:
    >>> script = EvalScript.of("set -x\n: '>>>>> Start Test Output'\npytest\n: '>>>>> End Test Output'\n", "ab")
    >>> script.cut("ab-began\nx\nab-settled\n/etc/.sao-gym-end\nab-listed\nab-start\nok\nab-end 0\n").section
    'ok\n'
"""

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass

from sao_gym.errors import GradingError

START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""What SWE-Bench's scripts and its reader know the test command's output by."""
BEGIN = r"""
rm -f FOLDER/eval.sh
: >FOLDER/stamp
read -rt 0.02 <> <(:)
SAO_BEFORE=$(printf '%s ' /proc/[0-9]*) SAO_BEFORE=${SAO_BEFORE//\/proc\//}
printf '%s\n' MARK-began
"""
SETTLE = r"""
for sao_p in /proc/[0-9]*; do
  sao_p=${sao_p#/proc/}
  [[ " $SAO_BEFORE $BASHPID $$ " == *" $sao_p "* ]] || kill -KILL "$sao_p"
done 2>/dev/null
: >/etc/.sao-gym-end
printf '%s\n' MARK-settled
command -p find /etc /root /opt /usr/bin /usr/sbin /usr/local PLACE \
  \( -path /opt/miniconda3/pkgs -o -path PLACE/.git/objects -o -path PLACE/.git/logs \) -prune \
  -o -cnewer FOLDER/stamp -not -type d \( -not -path '*/__pycache__/*' -o -path '*/_pytest/*' -o -path '*/pluggy/*' \) \
  -print 2>/dev/null
command -p find /opt PLACE -name entry_points.txt -cnewer FOLDER/stamp -exec grep -sl pytest11 {} + 2>/dev/null |
  command -p sed 's/^/pytest11 in /'
printf '%s\n' MARK-listed
rm -f /etc/.sao-gym-end
printf '[safe]\n\tdirectory = *\n[core]\n\thooksPath = /dev/null\n' >"$HOME/.gitconfig"
"""
QUIET = """\
{ SAO_SET=$-; set +xeu; } 2>/dev/null
BODY
{ [[ $SAO_SET == *u* ]] && set -u; [[ $SAO_SET == *x* ]] && set -x; [[ $SAO_SET == *e* ]] && set -e; :; } 2>/dev/null"""
CANARY = "/etc/.sao-gym-end"
"""Changed by the script itself just before it looks: a look that does not show it was not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a script printed, cut: before the tests, what the installation changed, and what the test command printed.

    `began` and `is_whole` say how far the script came; `exit_code` is the test command's.
    """

    began: bool = False
    prelude: str = ""
    changed: tuple[str, ...] | None = None
    section: str = ""
    is_whole: bool = False
    exit_code: int | None = None

    @property
    def log(self) -> str:
        """The section as SWE-Bench's reader wants it."""
        code = "" if self.exit_code is None else f"{EXIT_CODE}: {self.exit_code}\n"
        end = f"+ : '{END}'\n" if self.is_whole else ""
        return f"+ : '{START}'\n{self.section}{end}{code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScript:
    """A script to run, and the word that its output is cut by; nothing but its text may ever hold that word."""

    text: str
    mark: str

    @classmethod
    def of(
        cls, script: str, mark: str, *, place: str = "/testbed", folder: str = "/tmp", before_tests: str = ""
    ) -> "EvalScript":
        """Wrap a row's script.

        `place` is the repository, `folder` where this script is and what it needs. `before_tests` are lines to run before the test command. Raises GradingError.
        """
        lines = script.strip("\n").split("\n")
        start = next((at for at, line in enumerate(lines) if START in line), -1)
        end = next((at for at, line in enumerate(lines) if END in line), -1)
        if not 0 <= start < end:
            raise GradingError(f"the evaluation script says nowhere where the tests' output is ({START!r}, {END!r})")
        settle = next((at for at, line in enumerate(lines[:start]) if line.startswith("git checkout ")), start)
        parts = [
            quiet(BEGIN),
            *lines[:settle],
            quiet(SETTLE),
            *lines[settle:start],
            quiet(f"{before_tests}\nprintf '\\n%s\\n' MARK-start"),
            *lines[start + 1 : end],
            "SWEBENCH_TEST_EXIT_CODE=$?",
            quiet("printf '\\n%s %s\\n' MARK-end $SWEBENCH_TEST_EXIT_CODE"),
            *lines[end + 1 :],
        ]
        own = {"PLACE": shlex.quote(place), "FOLDER": folder, "MARK": mark}
        ours = re.compile(r"\b(PLACE|FOLDER|MARK)\b")
        text = "\n".join(
            ours.sub(lambda found: own[found[1]], part) if part.startswith("{ SAO") else part for part in parts
        )
        return cls(text=text + "\n", mark=mark)

    def cut(self, output: str) -> Cut:
        """Cut what was printed: each mark counts where it first stands after the one before it."""
        mark = re.escape(self.mark)
        _, began, rest = _split(output, rf"^{mark}-began\n")
        prelude, settled, rest = _split(rest, rf"^{mark}-settled\n")
        listing, listed, rest = _split(rest, rf"^{mark}-listed\n")
        between, started, rest = _split(rest, rf"^{mark}-start\n")
        section, ended, _ = _split(rest, rf"^{mark}-end (\d+)\n")
        changed = tuple(listing.splitlines()) if settled and listed else ()
        return Cut(
            began=bool(began),
            prelude=prelude + between,
            changed=changed if CANARY in changed else None,
            section=section if started else "",
            is_whole=bool(ended),
            exit_code=int(ended[1]) if ended else None,
        )


def quiet(body: str) -> str:
    """Lines that leave no trace in the output and do not end a script that was told to end at errors."""
    return QUIET.replace("BODY", body.strip("\n"))


def _split(text: str, pattern: str) -> tuple[str, re.Match[str] | None, str]:
    found = re.search(pattern, text, re.M)
    return (text[: found.start()], found, text[found.end() :]) if found else (text, None, "")


PROGRAMS = re.compile(
    r"/envs/[^/]+/bin/(python|pip|tox|git|bash|sh|env|find|sed|grep|cat|rm|ls|patch)[\w.]*$"
    r"|/lib/python[\d.]+/(?!site-packages/|.*__pycache__/)|^/opt/miniconda3/(bin|condabin|etc)/"
    r"|^/root/(\.local|\.config/(git|pip)|\.pydistutils|\.bash|\.profile|\.condarc|\.tox)|^/usr/(local/)?s?bin/"
    r"|^/etc/(?!\.sao-gym-|locale|default/locale|ld\.so\.cache)"
    r"|/site-packages/(sitecustomize|usercustomize)(\.py|/)"
)
"""What no installation of a repository changes: programs, Python's own library, settings."""
RUNNER = re.compile(
    r"/bin/(pytest|py\.test)$|/site-packages/(_?pytest|pluggy|py|iniconfig|tox|virtualenv)([-_./]|$)|^pytest11 in "
)
"""What only the installation of a test runner changes."""
HOW_TESTS_RUN = re.compile(
    r"/(conftest\.py|\.?pytest\.ini|tox\.ini|setup\.cfg|pyproject\.toml|(site|user)customize\.py|runtests\.py|test_[^/]*\.py)$"
)
GIT = re.compile(r"^\.git/(?!index$|FETCH_HEAD$|ORIG_HEAD$|.*\.lock$)")


def meddled(changed: Collection[str], place: str, *, is_runner: bool = False) -> str:
    """The first thing that the installation changed and no honest one does, or nothing.

    `is_runner` says that the repository is the test runner itself, whose installation replaces it.
    """
    for path in changed:
        inside = path.removeprefix(f"{place}/")
        if inside != path and not inside.startswith("build/"):
            if GIT.search(inside) or HOW_TESTS_RUN.search(f"/{inside}"):
                return path
        elif PROGRAMS.search(path) or (not is_runner and RUNNER.search(path)):
            return path
    return ""
