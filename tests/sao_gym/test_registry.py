"""Names of environments."""

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from sao_gym import registry
from sao_gym.envs.arithmetic import ArithmeticEnv, grade_integer
from sao_gym.errors import ConfigError, RegistryError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.registry import GYMNASIUM_IDS, make, make_tasks, names, register, resolve, spec

OWN = """
from sao_gym.core import AgentEnv, Reply
from sao_gym.protocols import Task

class Echo(AgentEnv):
    def __init__(self, tasks=(Task(id="t", prompt="hi"),), reward=1.0):
        super().__init__(tasks)
        self.reward = reward

    def respond(self, message):
        return Reply(reward=self.reward, is_final=True)

number = 3

def nothing():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "own_environment.py"
    path.write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_registered", {})
    return path


def test_importing_the_package_imports_no_environment() -> None:
    code = (
        "import sys, gymnasium, sao_gym, sao_gym.registry\n"
        "heavy = ('sao_gym.envs', 'sao_gym.tasks', 'sao_gym.trainer', 'torch')\n"
        "assert not [m for m in sys.modules if m.startswith(heavy)]\n"
        "env = gymnasium.make('sao_gym/PythonMath-v0')\n"
        "print(type(env.unwrapped).__name__, env.spec.id)\n"
        "env.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("PythonMathEnv sao_gym/PythonMath-v0\n", "")


@pytest.mark.parametrize("name", ["arithmetic", "sao_gym/Arithmetic-v0", "sao_gym.envs.arithmetic:ArithmeticEnv"])
def test_a_built_in_has_three_names(name: str) -> None:
    arguments = {"tasks": make_tasks("arithmetic", pool=3)} if ":" in name else {"pool": 3}
    env = make(name, max_turns=2, **arguments)
    assert type(env) is ArithmeticEnv
    assert (len(env.tasks), env.max_turns, env.grader) == (3, 2, grade_integer)


def test_the_task_set_alone() -> None:
    assert make_tasks("sao_gym/Arithmetic-v0", split="heldout", pool=3).name == "arithmetic-heldout"
    assert len(make_tasks("python_math")) > 0


def test_tasks_may_be_a_file_with_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"text": "1+1=?", "answer": "2"}])
    env: Any = make("arithmetic", tasks=str(path), mapping={"prompt": "text"})
    assert env.tasks[0].prompt == make_tasks("arithmetic", tasks=path, mapping={"prompt": "text"})[0].prompt == "1+1=?"
    with pytest.raises(TaskFileError, match=r"none\.jsonl"):
        make("arithmetic", tasks=tmp_path / "none.jsonl")


def test_a_grader_may_be_named() -> None:
    env: Any = make("python_math", grader="sao_gym.envs.arithmetic:grade_integer")
    assert env.grader is grade_integer


def test_environments_from_a_module_and_from_a_file(own: Path) -> None:
    for name in (f"{own}:Echo", "own_environment:Echo"):
        env = make(name, reward=2.0)
        env.reset(seed=0)
        assert env.step("x")[1] == 2.0
        assert spec(name).id == name
    assert type(make(f"{own}:Echo")) is type(make(f"{own}:Echo"))


def test_a_registered_environment(own: Path) -> None:
    made = register("echo", entry_point=f"{own}:Echo", description="says it", reward=3.0)
    assert register("echo", entry_point=f"{own}:Echo", description="says it", reward=3.0) == spec("echo") == made
    assert "echo" in names()
    assert vars(make("echo"))["reward"] == 3.0
    assert vars(make("echo", reward=4.0))["reward"] == 4.0
    for taken in ("echo", "arithmetic", "sao_gym/Arithmetic-v0"):
        with pytest.raises(RegistryError, match="is taken"):
            register(taken, entry_point="other:Thing")
    with pytest.raises(RegistryError, match="holds ':'"):
        register("a:b", entry_point="other:Thing")


def test_an_installed_plugin(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugged = EntryPoints([EntryPoint("plugged", "own_environment:Echo", "sao_gym.envs")])
    monkeypatch.setattr(registry, "entry_points", lambda group: plugged.select(group=group))
    assert type(make("plugged")).__name__ == "Echo"
    with pytest.raises(RegistryError, match="did you mean 'plugged'"):
        make("pluged")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("arithmetics", "unknown environment 'arithmetics'; did you mean 'arithmetic'"),
        ("sao_gym/PythonMath-v1", "did you mean 'sao_gym/PythonMath-v0'"),
        ("zzz", "known environments: 'arithmetic'"),
        ("none/such.py:Echo", "there is no file none/such.py"),
        ("no_such_package.module:Echo", "cannot import 'no_such_package.module'"),
        ("{own}:Ecko", "has no 'Ecko'; did you mean 'Echo'?"),
        ("own_environment:Ecko", "did you mean 'Echo'?"),
        ("{own}:number", "is a int, expected a class"),
        ("{own}:nothing", "made a int, expected a gymnasium.Env"),
        (":Echo", "names nothing"),
        ("own_environment:", "names nothing"),
    ],
)
def test_a_name_that_means_nothing_is_one_sentence(name: str, words: str, own: Path) -> None:
    with pytest.raises(RegistryError) as caught:
        make(name.format(own=own))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["raise ValueError('oh')", "import no_such_package", "def"])
def test_a_file_that_fails_is_named_and_may_be_mended(text: str, own: Path) -> None:
    broken = own.with_name("broken.py")
    broken.write_text(text, encoding="utf-8")
    with pytest.raises(RegistryError, match=r"broken\.py failed"):
        make(f"{broken}:Echo")
    broken.write_text(OWN, encoding="utf-8")
    assert isinstance(make(f"{broken}:Echo"), gymnasium.Env)
    assert callable(resolve(f"{broken}:nothing"))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"max_turn": 3}, "takes no argument 'max_turn'; did you mean 'max_turns'"),
        ({"pol": 3}, "did you mean 'pool'"),
        ({"pool": -1}, "at least 1"),
        ({"tasks": []}, "no tasks"),
        ({"tasks": [], "pool": 3}, "takes no argument 'pool'"),
    ],
)
def test_arguments_that_nothing_reads_are_refused(kwargs: dict[str, Any], words: str) -> None:
    """Trap 23."""
    with pytest.raises(ConfigError) as caught:
        make("arithmetic", **kwargs)
    assert words in str(caught.value)


def test_gymnasium_knows_every_name_that_is_said_to_be_its_own() -> None:
    known = {name: gymnasium.spec(name).kwargs for name in GYMNASIUM_IDS}
    assert known == {name: {"name": short} for name, short in GYMNASIUM_IDS.items()}
