"""The house: what is packaged, which way imports point, where time comes from, that shipped text and files work."""

import ast
import fnmatch
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

from sao_gym import config as conf
from sao_gym.commands.main import COMMANDS

ROOT = Path(__file__).parents[1]
ROOMS = MappingProxyType(
    {"sao_gym": "sao_gym", "envs": "sao_gym.envs", "trainer": "sao_gym.trainer", "tasks": "sao_gym.tasks"}
)
JUNK = ("__pycache__", "*.pyc", ".*_cache", "*.egg-info", "build", "dist", "runs", ".venv", ".git", ".hypothesis")


def source_files(pattern: str = "*", root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Every file of the four rooms, with the place it has in an installed tree."""
    for folder, package in ROOMS.items():
        for path in sorted((root / folder).rglob(pattern)):
            parts = path.relative_to(root).parts
            is_linked = folder == "sao_gym" and len(parts) > 1 and parts[1] in ROOMS
            is_junk = any(fnmatch.fnmatch(part, junk) for part in parts for junk in JUNK)
            if path.is_file() and not is_linked and not is_junk:
                yield path, "/".join([*package.split("."), *parts[1:]])


@cache
def modules() -> dict[str, Path]:
    """Every module by its import name."""
    named = {}
    for path, place in source_files("*.py"):
        name = place.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        named[name] = path
    return named


@cache
def imports_of(path: Path, *, nested: bool = True) -> set[str]:
    """Modules that a file imports, type-checking blocks aside; without `nested`, those of its top level alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = modules()
    found: set[str] = set()
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source = node.module or ""
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                found.add(whole if whole in known else source)
        elif nested or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stack.extend(ast.iter_child_nodes(node))
    return found


FLOORS = MappingProxyType(
    {
        0: ("errors", "clock", "stream", "messages", "protocols", "statistics", "runfolder"),
        1: ("core", "chat", "registry", "engines", "workers"),
        2: ("envs", "tasks"),
        3: ("rollout", "gateway", "evaluation", "ledger"),
        4: ("trainer",),
        5: ("commands",),
    }
)


def floor(name: str, seen: tuple[str, ...] = ()) -> int:
    """Height in the house; imports never point to a higher one.

    A module that no floor names stands as high as what it imports, up to floor 3; the shims for
    `python -m sao_gym.<command>` are the roof.
    """
    first = name.partition(".")[2].partition(".")[0]
    for height, names in FLOORS.items():
        if first in names:
            return height
    if not first or first.startswith("config"):
        return 0
    targets = imports_of(modules()[name]) if name in modules() and name not in seen else set()
    if any(target.startswith("sao_gym.commands") for target in targets):
        return 6
    heights = [floor(target, (*seen, name)) for target in targets if target.startswith("sao_gym.")]
    return max([1, *(height for height in heights if height in (2, 3))])


def test_imports_point_down() -> None:
    wrong = []
    for name, path in modules().items():
        for target in imports_of(path):
            if target.startswith("sao_gym") and floor(target) > floor(name):
                wrong.append(f"{name} -> {target}")
    assert wrong == []


def test_rooms_do_not_import_each_other() -> None:
    wrong = []
    for name, path in modules().items():
        room = name.split(".")[1] if "." in name else ""
        for target in imports_of(path):
            other = target.split(".")[1] if target.startswith("sao_gym.") else ""
            if room in ("envs", "tasks", "trainer") and other in {"envs", "tasks", "trainer"} - {room}:
                wrong.append(f"{name} -> {target}")
            if not room and other in ("envs", "tasks", "trainer"):
                wrong.append(f"{name} -> {target}")
    assert wrong == []


def test_no_import_cycles() -> None:
    graph = {
        name: {target for target in imports_of(path, nested=False) if target in modules() and target != name}
        for name, path in modules().items()
    }
    done: set[str] = set()
    while ready := {name for name, targets in graph.items() if name not in done and targets <= done}:
        done |= ready
    assert set(graph) - done == set()


TORCH_FREE = ("stream", "protocols", "config", "ledger", "evaluation", "statistics", "trainer.config")


@pytest.mark.parametrize("name", [name for name in TORCH_FREE if f"sao_gym.{name}" in modules()])
def test_torch_free(name: str) -> None:
    code = f"import sys, sao_gym.{name}; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


TIME_CALLS = re.compile(
    r"^(time\.(time|sleep|monotonic|perf_counter|process_time|time_ns|monotonic_ns|perf_counter_ns)|asyncio\.sleep"
    r"|(datetime\.)?datetime\.(now|utcnow|today)|(asyncio\.get_running_loop\(\)|loop|self\._?loop)\.time)$"
)


def time_sources(text: str) -> list[str]:
    """Calls that read or spend time otherwise than through the injected clock."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and TIME_CALLS.match(ast.unparse(node.func)):
            found.append(ast.unparse(node.func))
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found.append("from time import ...")
    return found


def test_time_comes_from_the_clock() -> None:
    runtime = [
        path
        for path, place in source_files("*.py")
        if place.startswith(("sao_gym/trainer/", "sao_gym/engines/", "sao_gym/rollout"))
    ]
    assert {str(path.relative_to(ROOT)): found for path in runtime if (found := time_sources(path.read_text()))} == {}
    for bad in ("import time\ntime.sleep(1)", "import asyncio\nasyncio.sleep(0)", "from time import monotonic"):
        assert time_sources(bad)


def test_rooms_are_linked_into_the_package() -> None:
    for folder in ("envs", "trainer", "tasks"):
        link = ROOT / "sao_gym" / folder
        assert link.is_symlink()
        assert os.readlink(link) == f"../{folder}"  # noqa: PTH115
        assert (ROOT / folder / "__init__.py").is_file()


def test_every_package_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    real = {place.rpartition("/")[0].replace("/", ".") for _, place in source_files("__init__.py")}
    folders = {place.rpartition("/")[0].replace("/", ".") for _, place in source_files("*.py")}
    assert sorted(listed) == sorted(real)
    assert folders == real


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as it stands."""
    tree = tmp_path_factory.mktemp("tree") / "sao-gym"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*JUNK))
    return tree


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the tree, and the wheel that is made from the sdist."""
    out = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_wheel_holds_every_module_and_preset(built: Path, tree: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {item.filename for item in archive.infolist() if item.file_size or item.filename.endswith("py.typed")}
        every = set(archive.namelist())
        licences = [name for name in every if name.endswith("LICENSE")]
        assert b"Apache License" in archive.read(licences[0])
    expected = {place for path, place in source_files(root=tree) if path.stat().st_size}
    assert expected - names == set()
    assert {name.partition("/")[0] for name in every} == {"sao_gym", wheel.name.partition("-py3")[0] + ".dist-info"}


def test_sdist_holds_the_real_folders(built: Path, tree: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    inside = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert {str(path.relative_to(tree)) for path, _ in source_files(root=tree)} - inside == set()
    assert {"LICENSE", "README.md", "pyproject.toml", "constraints.txt", "tests/golden/golden.json"} <= inside
    assert not [member.name for member in members if member.issym() or member.islnk()]


def test_wheel_imports_without_the_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' in p or 'lib/python' in p or p.endswith('.zip')]\n"
        f"sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import sao_gym, sao_gym.trainer.advantages, sao_gym.envs, sao_gym.tasks, sao_gym.commands.main\n"
        "print(sao_gym.trainer.advantages.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "sao_gym/trainer/advantages.py")


PRESET_CLASSES = MappingProxyType(
    {
        "sft": ("sao_gym.commands.sft", "SftConfig", ("--out", "new", "--new", "qwen3_tiny")),
        "pretrain_critic": (
            "sao_gym.commands.pretrain_critic",
            "PretrainCriticConfig",
            ("--out", "new", "--model", "m"),
        ),
        "eval": ("sao_gym.commands.eval_config", "EvalConfig", ("--bench", "aime2025", "--model", "m")),
        "presets": ("sao_gym.trainer.config", "TrainConfig", ()),
    }
)


@pytest.mark.parametrize(
    "path", [path for path, _ in source_files("*.toml")], ids=lambda p: f"{p.parent.name}-{p.stem}"
)
def test_every_shipped_toml_parses(path: Path) -> None:
    """Trap 23: a preset's folder says which command it is for."""
    assert (ROOT / "trainer" / "presets") in (path.parent, path.parent.parent)
    module, name, needed = PRESET_CLASSES[path.parent.name]
    resolved = conf.resolve(getattr(importlib.import_module(module), name), preset=path, overrides=needed)
    assert conf.Origin.PRESET in resolved.origins.values()


def test_every_command_is_in_the_table() -> None:
    rooms = {
        "tasks",
        "workers",
    }  # a command of a room's or another module's name has no module of its own to start it with
    table = {entry.name: entry.target.partition(":")[0] for entry in COMMANDS if entry.name not in rooms}
    shims = {
        name.removeprefix("sao_gym.").removesuffix(".__main__"): [
            target for target in imports_of(path) if "commands" in target
        ]
        for name, path in modules().items()
        if floor(name) == 6
    }
    assert sorted(shims) == sorted(table)
    for name, targets in shims.items():
        assert targets == [table[name]]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```(?:{language})\n(.*?)^```", text, flags=re.M | re.S)


def run_python(block: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120
    )


def broken_commands(shell: str) -> list[str]:
    """Make targets that do not exist, and modules whose `--help` fails, of the commands in a shell block."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    broken = [f"make {name}" for name in re.findall(r"\bmake ([a-z-]+)", shell) if name not in targets]
    for module in sorted(set(re.findall(r"python -m (sao_gym[\w.]*)", shell))):
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        if done.returncode or not done.stdout.strip():
            broken.append(f"python -m {module}: {done.stderr[-300:]}")
    return broken


def test_readme_python_runs(tmp_path: Path) -> None:
    for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"), "python"):
        done = run_python(block, tmp_path)
        assert done.returncode == 0, block + done.stderr


def test_readme_commands_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert broken_commands("\n".join(blocks(text, "sh|bash|shell|console"))) == []


def test_the_readme_checks_can_fail(tmp_path: Path) -> None:
    text = "a\n```python\nraise SystemExit(3)\n```\n```sh\nmake tea\npython -m sao_gym.tea\nmake test\n```\n"
    assert run_python(blocks(text, "python")[0], tmp_path).returncode == 3
    first, second = broken_commands(blocks(text, "sh")[0])
    assert first == "make tea"
    assert "No module named sao_gym.tea" in second


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower().replace("_", "-") for line in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert names - pinned == set()
