"""An agent's work becomes a patch, whatever it did to the repository, and the patch makes the same tree elsewhere."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import swe_instances

from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.envs.swe_files import FilesError
from sao_gym.envs.swe_patch import Patch, PatchLimits, chosen, take_work, write_patch
from sao_gym.envs.swe_repository import prepare
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import ConfigError

FIX = "sed -i 's/a - b/a + b/' m.py"
SHOWN = (
    "cd /testbed; find . -name .git -prune -o -type f -printf '%P %m ' -exec sha256sum -z {} \\; -printf '\\n' "
    "-o -type l -printf '%P -> %l\\n' | sed 's/\\x0/\\n/g' | grep -v '^ *$' | sort"
)
ME = "git config --global user.name x; git config --global user.email x@y; git config --global safe.directory '*'; "


@pytest.fixture
def said(tiny_root: Path) -> SweTask:
    return SweTask.of(swe_instances.task_of(swe_instances.tiny_row(str(tiny_root))))


async def start(said: SweTask, disk: int = 128) -> LocalSandbox:
    limits = ShellLimits(output_bytes=MIB, disk_bytes=disk * MIB)
    return await LocalSandbox.start(SandboxSpec(image=said.image, workdir=said.workdir, limits=limits))


async def patch_of(said: SweTask, *commands: str, limits: PatchLimits | None = None, disk: int = 128) -> Patch:
    """The patch of what an agent did, in an image that is as `said` names it."""
    async with await start(said, disk) as box:
        repository = await prepare(box, said)
        for command in commands:
            await box.exec(command, timeout_s=60)
        work = await take_work(box, said, repository, limits)
    async with await start(said) as fresh:
        return await write_patch(fresh, said, work)


async def tree_after(said: SweTask, *commands: str, patch: bytes = b"") -> Mapping[str, str]:
    """What each file of a fresh sandbox is, after commands, and after a patch."""
    async with await start(said) as box:
        await box.write("/tmp/patch", patch)
        apply = "git -c safe.directory='*' apply /tmp/patch" if patch else "true"
        for command in (*commands, apply):
            done = await box.exec(command, timeout_s=60)
            assert done.exit_code == 0, done.stderr
        lines = (await box.exec(SHOWN)).stdout.splitlines()
    return {line.split(" ")[0]: line for line in lines}


@contextmanager
def image_of(said: SweTask, command: str) -> Iterator[SweTask]:
    """The task in an image of its own: a root folder in whose repository a command was run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder, "root")
        subprocess.run(["cp", "-al", said.image, str(root)], check=True)
        shutil.rmtree(root / "testbed")
        shutil.copytree(Path(said.image, "testbed"), root / "testbed", symlinks=True)
        environment = {"HOME": folder, "PATH": "/usr/bin:/bin"}
        subprocess.run(["bash", "-ec", command], cwd=root / "testbed", env=environment, check=True)
        yield replace(said, image=str(root))


ODD = r"""
printf 'a\0b\xff' >tool.bin; printf 'caf\xe9\nx\n' >latin.txt; printf 'no end' >>README.md; printf 'q\n \n\n' >zz
chmod +x setup.py; ln -s m.py link; mkdir 'a dir*[b]\'; printf '\xe9' >'a dir*[b]\/"q
n'; : >empty; printf 'x\r\ny\r\nz' >crlf.txt; printf '\xef\xbb\xbfbom\n' >bom; rm setup.cfg
"""


@pytest.mark.parametrize(
    "carried", [bytes, bytes.strip, lambda data: data.strip() + b"\n"], ids=["as is", "strip", "end"]
)
async def test_sw_04_bytes_survive(said: SweTask, carried: Callable[[bytes], bytes]) -> None:
    """A fix with a binary file, latin-1, CRLF, no last line end, a mode and a link; shipped as JSON, stripped or not."""
    setup = "printf 'a\\r\\nb\\r\\nc\\r\\n' >old.txt; " + ME + "git add -A; git commit -qm set-up"
    with image_of(said, setup) as image:
        changes = (FIX, ODD, r"sed -i 's/b\r/B\r/' old.txt")
        patch = await patch_of(image, *changes)
        shipped = json.loads(json.dumps({"patch": patch.text}))["patch"].encode()
        assert shipped == patch.data
        got = await tree_after(image, patch=carried(shipped) + (b"" if carried(b"\n") else b"\n"))
        assert got == await tree_after(image, *changes)
        assert not patch.left_out


MEDDLING = {
    "committed": ME + "git add -A; git commit -qm mine",
    "staged in part": ME + "git add m.py",
    "git gone": "rm -rf .git",
    "git is a file": "mv .git /tmp/g; echo 'gitdir: /tmp/g' >.git",
    "git is another program": "printf '#!/bin/sh\\nexit 0\\n' >/usr/bin/git; hash -r",
    "git has other settings": ME + "git config core.autocrlf true; git config diff.external /bin/true; "
    "git config core.fileMode false; git config core.worktree /tmp; git config core.bare true; "
    "git config core.excludesFile /tmp/all; echo '*' >/tmp/all",
    "git looks away": ME + "git update-index --assume-unchanged m.py; git update-index --skip-worktree m.py",
    "everything is ignored": "echo '*' >.git/info/exclude",
    "an attribute hides it": "echo '*.py -diff filter=x' >.git/info/attributes",
    "the environment lies": "export GIT_DIR=/nowhere GIT_INDEX_FILE=/nowhere; printf 'exit 1' >~/.bashrc",
    "HEAD is elsewhere": ME + "git checkout -q --orphan other; git add -A; git commit -qm x; git reflog expire --all",
    "a lock is left": "touch .git/index.lock .git/HEAD.lock",
    "time was set back": "touch -d 2001-01-01 m.py",
    "tools are gone": "rm -f /usr/bin/patch /usr/bin/diff /usr/bin/python3",
}


FAST = (
    "committed",
    "git gone",
    "git is another program",
    "git looks away",
    "the environment lies",
    "time was set back",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MEDDLING]
)
async def test_a_fix_arrives_whatever_was_done_to_git(said: SweTask, name: str) -> None:
    patch = await patch_of(said, FIX, MEDDLING[name])
    assert patch.data.startswith(b"diff --git a/m.py b/m.py\nindex ")
    assert patch.data.endswith(b"-    return a - b\n+    return a + b\n \n \n def double(a):\n-- \nsao-gym\n")
    assert (patch.files, patch.left_out) == (1, {})


async def test_what_is_left_out(said: SweTask) -> None:
    """By-products, tests of the test patch and what could be no patch; a nested repository's files are files."""
    patch = await patch_of(
        said,
        FIX,
        "mkdir -p x.egg-info __pycache__ .tox sub .Git; touch x.egg-info/a __pycache__/m.pyc .tox/t .Git/config b.pyc; "
        "cd sub; git init -q; echo 1 >kept; cd ..; rm tests/test_m.py; mkdir tests/test_m.py; echo 1 >tests/test_m.py/x; "
        "ln -s /etc/passwd out; ln -s ../.. up; mkfifo fifo; mkdir nothing; head -c 9000000 /dev/zero >big",
    )
    assert [line for line in patch.text.splitlines() if line.startswith("diff")] == [
        "diff --git a/m.py b/m.py",
        "diff --git a/sub/kept b/sub/kept",
    ]
    assert patch.left_out == {"ignored": 1, "name": 1, "not taken": 2, "size": 1, "test": 2}


async def test_what_the_image_has_that_git_does_not_know_is_no_change(said: SweTask) -> None:
    """New files of the set-up are there in every sandbox: a patch that made them again would not apply."""
    with image_of(said, "echo 1 >built.txt; echo 2 >other.txt; echo '# local' >>README.md") as image:
        patch = await patch_of(image, "echo 3 >>other.txt; rm built.txt; touch README.md")
        got = await tree_after(image, patch=patch.data)
        assert "built.txt" not in got
        assert b"README" not in patch.data
        assert patch.data.count(b"diff --git") == 2


async def test_an_ignored_file_that_git_tracks_is_carried(said: SweTask) -> None:
    setup = ME + "mkdir .pytest_cache a.egg-info; echo 1 >a.egg-info/x; git add -f a.egg-info; git commit -qm set-up"
    with image_of(said, setup) as image:
        patch = await patch_of(image, "echo 2 >a.egg-info/x; echo 3 >a.egg-info/new; echo '!*' >.gitignore")
        assert b"a/a.egg-info/x" in patch.data
        assert patch.left_out == {"ignored": 1}


async def test_a_link_that_leads_out_may_go_but_not_come(said: SweTask) -> None:
    with image_of(said, "ln -s /etc/hosts hosts; ln -s /etc/passwd kept") as image:
        patch = await patch_of(image, "rm hosts; echo 1 >hosts; ln -sfn /etc/shadow kept; ln -s /etc/group new")
        got = await tree_after(image, patch=patch.data)
        assert got["hosts"].startswith("hosts 644 ")
        assert (got["kept"], "new" in got) == ("kept -> /etc/passwd", False)
        assert patch.left_out == {"not taken": 2}


async def test_folders_and_files_change_places(said: SweTask) -> None:
    changes = (
        "rm README.md; mkdir README.md; echo 1 >README.md/x; mkdir d; mv setup.py d/setup.py; ln -s d e; rm -rf tests"
    )
    patch = await patch_of(said, changes)
    got, wanted = await tree_after(said, patch=patch.data), dict(await tree_after(said, changes))
    wanted["tests/test_m.py"] = got["tests/test_m.py"]
    assert got == wanted


async def test_a_disk_filled_to_the_brim_loses_nothing_but_what_fills_it(said: SweTask) -> None:
    fill = "head -c 500000000 /dev/zero >full 2>/dev/null; head -c 500000000 /dev/zero >/tmp/full 2>/dev/null"
    patch = await patch_of(said, FIX, fill, disk=32)
    assert patch.files == 1
    assert b"+    return a + b" in patch.data


async def test_a_folder_that_is_gone_or_broken_is_said(said: SweTask) -> None:
    with pytest.raises(FilesError, match="could not be listed"):
        await patch_of(said, "rm -rf /testbed")
    with pytest.raises(FilesError, match="could not be"):
        await patch_of(said, "rm -f /usr/bin/find")


async def test_nothing_changed_is_an_empty_patch(said: SweTask) -> None:
    assert await patch_of(said) == Patch()
    touched = await patch_of(said, "touch m.py; chmod u+x m.py; chmod u-x m.py; sed -i 's/a/a/' setup.py")
    assert (touched.data, touched.files) == (b"", 0)


def test_the_smallest_come_first() -> None:
    limits = PatchLimits(file_bytes=10, total_bytes=20)
    kept, left_out = chosen({"a": 9, "b": 11, "c": 8, "d": 1, "t": 1, "t/x": 1, "f": 5}, {"t"}, limits)
    assert kept == {"d", "f", "c"}
    assert left_out == {"size": 2, "test": 2}
    with pytest.raises(ConfigError, match="file_bytes = 5"):
        PatchLimits(file_bytes=5, total_bytes=4)


def test_names_that_git_refuses_are_known() -> None:
    refused = (".git", "a/.GIT/x", "git~1", ".git ", "x/.git...", ".git::$INDEX", "a\\.git\\x")
    allowed = (".gitignore", ".github/x", "git", "x.git", ".gitlab-ci.yml", "a.git/x")
    kept, _ = chosen(dict.fromkeys((*refused, *allowed), 1), (), PatchLimits())
    assert kept == frozenset(allowed)
