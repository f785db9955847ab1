"""A repository as an image has it, careless in every way that git knows, and what an agent still finds in it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import swe_instances

from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.envs.swe_repository import Repository, prepare
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import SandboxError

SECRET = "from-the-future"
GIT = """
export GIT_NO_REPLACE_OBJECTS=1 GIT_CONFIG_COUNT=4 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' \
  GIT_CONFIG_KEY_1=user.name GIT_CONFIG_VALUE_1=x GIT_CONFIG_KEY_2=user.email GIT_CONFIG_VALUE_2=x@y \
  GIT_CONFIG_KEY_3=protocol.file.allow GIT_CONFIG_VALUE_3=always
set -e
# later NAME: a commit on a branch of its own that holds a secret; HEAD goes back
later() {
  git checkout -q -b "$1" && echo "from-the-future $1" >"$1.py" && git add "$1.py" && git commit -qm "from-the-future $1"
  git checkout -q --detach "$BASE"
}
"""
FUTURES = {
    "a commit graph": "later one; git commit-graph write --reachable; git branch -qD one",
    "a branch": "later one",
    "a tag": "later one; git tag v2 one; git tag -a -m from-the-future v3 one; git branch -qD one",
    "a remote": "later one; git update-ref refs/remotes/up/main one; git symbolic-ref refs/remotes/up/HEAD "
    "refs/remotes/up/main; git config remote.up.url https://from-the-future; git branch -qD one; git pack-refs --all",
    "only the reflog": "later one; git branch -qD one",
    "an unreachable blob": "echo from-the-future | git hash-object -w --stdin",
    "the index": "f=$(echo from-the-future | git hash-object -w --stdin); git update-index --add --cacheinfo 100644,$f,new.py",
    "a stash": "echo '# from-the-future' >>m.py; git stash -q; echo from-the-future >u; git stash -q -u",
    "a note": "git notes add -m from-the-future HEAD",
    "a worktree": "git worktree add -q /tmp/wt; cd /tmp/wt; echo from-the-future >x; git add x; git commit -qm from-the-future",
    "a replacement": "later one; git replace HEAD one; git branch -qD one; git config core.useReplaceRefs true",
    "FETCH_HEAD and ORIG_HEAD": "later one; git rev-parse one | tee .git/FETCH_HEAD >.git/ORIG_HEAD; git branch -qD one",
    "an alternate": "git init -q /srv/other; cd /srv/other; echo from-the-future >x; git add x; git commit -qm x; cd /testbed; "
    "echo /srv/other/.git/objects >.git/objects/info/alternates",
    "a pack that is kept": "later one; git repack -qad; for p in .git/objects/pack/*.pack; do touch ${p%.pack}.keep; done; "
    "git branch -qD one",
    "a hook and a description": "mkdir -p .git/hooks; echo from-the-future >.git/hooks/post-commit; "
    "echo from-the-future >.git/MERGE_MSG; mkdir -p .git/rebase-merge .git/lfs; echo from-the-future >.git/lfs/x",
    "settings": "git config url.https://from-the-future/.insteadOf x; git config branch.main.remote from-the-future; "
    "git config include.path from-the-future",
    "a cruft pack": "later one; git branch -qD one; git reflog expire --expire=now --all; git repack -q --cruft -d; true",
    "a submodule": "git init -q /srv/lib; cd /srv/lib; echo 1 >lib.py; git add .; git commit -qm 1; cd /testbed; "
    "git clone -q /srv/lib lib; cd lib; b=$(git rev-parse HEAD); echo from-the-future >lib.py; git commit -qam from-the-future; "
    "git tag v9; git checkout -q $b",
    "a pack without an index": "later one; git repack -qad; for p in .git/objects/pack/*.pack; do cp -f $p /tmp/p; done; git branch -qD one; "
    "cp /tmp/p .git/objects/pack/pack-1234.pack; cp /tmp/p .git/objects/pack/tmp_pack_1; cp /tmp/p .git/later.pack",
}
LEFT = """
cd /testbed
for r in . $(find . -mindepth 2 -name .git -printf '%h '); do
  git -C $r cat-file --batch-all-objects --batch | grep -ac from-the-future
done
grep -ralE 'from-the-future' .git $(find . -mindepth 2 -name .git)
git rev-list --all --count; git for-each-ref --format='%(refname)'; git remote; git stash list; git worktree list | wc -l
"""
STATE = "cd /testbed && tar --exclude=./.git --exclude=./lib/.git --sort=name -cf - . | sha256sum; git -c core.useReplaceRefs=false status --short"


@pytest.fixture
def said(tiny_root: Path) -> SweTask:
    return SweTask.of(swe_instances.task_of(swe_instances.tiny_row(str(tiny_root))))


@pytest.fixture
async def box(said: SweTask) -> AsyncIterator[LocalSandbox]:
    limits = ShellLimits(output_bytes=MIB)
    async with await LocalSandbox.start(SandboxSpec(image=said.image, workdir=said.workdir, limits=limits)) as box:
        yield box


async def run(box: LocalSandbox, script: str, base: str = "") -> str:
    done = await box.exec(f"BASE={base}\n{GIT}\n{script}", timeout_s=60)
    assert done.exit_code == 0, done.stderr
    return done.stdout


ALL = "\n".join(f"( {script} )".replace(" one", f" one{n}") for n, script in enumerate(FUTURES.values()))
ALL = ALL.replace("; git config core.useReplaceRefs true", "")  # with it, git itself packs objects that are none


@pytest.mark.parametrize("future", ["all at once", *(pytest.param(name, marks=pytest.mark.slow) for name in FUTURES)])
async def test_nothing_of_the_future_is_left_and_the_work_tree_is_as_it_was(
    box: LocalSandbox, said: SweTask, future: str
) -> None:
    await run(box, FUTURES.get(future, ALL), said.base_commit)
    before = await run(box, STATE)
    repository = await prepare(box, said)
    left = (await box.exec(f"{GIT}set +e\n{LEFT}")).stdout.split("\n")
    zeros = 2 if future in ("a submodule", "all at once") else 1
    assert left == ["0"] * zeros + ["1", "refs/tags/v1.0", "1", ""], left
    if future not in ("the index", "all at once"):  # the index, which said what the work tree did not
        assert await run(box, STATE) == before
    assert await run(box, "git fsck --full --no-progress 2>&1 || true") == ""
    again = await prepare(box, said)
    assert again == replace(repository, removed=0, files=again.files)


async def test_what_stays_is_what_the_base_leads_to(box: LocalSandbox, said: SweTask) -> None:
    """Also where HEAD is on a branch, with a tag that has a message, and the set-up's commit above the base."""
    await run(
        box,
        "git checkout -q -B work; git tag -a -m words v1.0.1; later two; git checkout -q work; "
        "echo set-up >setup.txt; git add setup.txt; git commit -qm set-up; git branch -qD two main; "
        "echo '# changed' >>README.md; echo new >new.txt; chmod +x m.py",
        said.base_commit,
    )
    repository = await prepare(box, said)
    assert repository.tags == 2
    assert {"setup.txt", "new.txt"} <= set(repository.files.files)
    facts = await run(
        box, "git symbolic-ref HEAD; git describe; git log --format=%s; git status --short; git diff --stat"
    )
    lines = facts.splitlines()
    assert lines[:1] == ["refs/heads/work"]
    assert lines[1].startswith("v1.0.1-1-g")
    assert lines[2:4] == ["set-up", "As it was"]
    assert sorted(lines[4:7]) == [" M README.md", " M m.py", "?? new.txt"]


async def test_an_agent_can_go_on_with_git(box: LocalSandbox, said: SweTask) -> None:
    await prepare(box, said)
    assert await run(box, "git checkout -q -b fix; echo 1 >x; git add x; git commit -qm mine; git log --format=%s") == (
        "mine\nAs it was\n"
    )


async def test_nothing_is_packed_again_where_nothing_has_to_go(box: LocalSandbox, said: SweTask) -> None:
    assert (await prepare(box, said)).removed == 3
    packs = await run(box, "ls -i .git/objects/pack")
    assert (await prepare(box, said)).removed == 0
    assert await run(box, "ls -i .git/objects/pack") == packs


WRONG = {
    "there is no git in it": "rm -f /usr/bin/git",
    "is no git repository of its own": "rm -rf .git",
    "no git repository of its own": "mv .git /tmp/g; echo 'gitdir: /tmp/g' >.git",
    "it has no commit": "rm -rf .git; git init -q; git add -A; git commit -qm other",
    "neither .* nor one commit above it": "for n in 1 2; do git commit -q --allow-empty -m $n; done",
    "HEAD names no commit|nor one commit above": "git checkout -q --orphan nothing",
    "history is not whole|cannot be": "git rev-parse HEAD^{tree} | sed 's|^..|.git/objects/&/|' | xargs rm -f",
    "holds the fix: 1 files": "git checkout -q main",
    "holds the fix": "git checkout -q --detach; git read-tree main; git commit -qm set-up; git reset -q --hard",
}


@pytest.mark.parametrize("words", WRONG)
async def test_an_image_that_does_not_hold_the_task_is_named(box: LocalSandbox, said: SweTask, words: str) -> None:
    await run(box, WRONG[words], said.base_commit)
    with pytest.raises(SandboxError, match=words) as caught:
        await prepare(box, said)
    assert caught.value.kind == "repository"
    assert said.instance_id in str(caught.value)


async def test_a_fix_that_takes_something_back_is_told_from_one_that_leaked(box: LocalSandbox, said: SweTask) -> None:
    """The file as the fix makes it was part of the project before: history shows it to everybody, the benchmark too."""
    made = await run(
        box,
        "git checkout -q --orphan old; sed -i 's/a - b/a + b/' m.py; git add -A; git commit -qm right; "
        "sed -i 's/a + b/a - b/' m.py; git commit -qam wrong; git rev-parse HEAD",
    )
    repository = await prepare(box, replace(said, base_commit=made.strip()))
    assert repository.has_old_fix
    assert not (await prepare(box, replace(said, base_commit=made.strip(), gold=""))).has_old_fix


async def test_a_patch_that_does_not_fit_says_nothing(box: LocalSandbox, said: SweTask) -> None:
    odd = replace(said, gold=said.gold.replace("return a - b", "return b - a"))
    assert isinstance(await prepare(box, odd), Repository)
