"""A task's repository before an agent sees it: all that came after the issue taken out, and what stays recorded.

Of git's records only what HEAD leads to is left: no later commit or tag, no remote, no reflog, stash or note, and no
object of theirs, in submodules too (see `swe_purge`). HEAD is the base commit, or the one that the image's set-up put on
top of it. The gold patch's own files must not be among the objects; they are computed here, and nothing of the patch
goes into the sandbox. Not looked at: the rest of the file system, where an image's package caches or a copy of the
project in site-packages may be newer than the base.

A repository of 223 000 objects and 110 MB, 33 000 of them to be removed, took 7 s of processor time, and 2 s where nothing
had to go.

Example:
    repository = await prepare(box, SweTask.of(task))
    repository.head, repository.removed
"""

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.swe_diff import read_diff
from sao_gym.envs.swe_files import FilesError, Listing, joined, list_files, new_name
from sao_gym.envs.swe_purge import SAFE_GIT, purge_command
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import SandboxError

KIND = "repository"
"""What such an error is counted as."""
PREPARE_S = 600.0
_BLOBS = r"""
cd PLACE && mapfile -d '' -t paths &&
for path in "${paths[@]}"; do printf '%s:%s\n' BASE "$path"; done | git cat-file --batch >NAME
"""
_PRESENT = r"""
cd PLACE && cat >"$home/ids" || exit 4
git cat-file --batch-check <"$home/ids" | awk '$2 == "blob" {print $1}' >"$home/present"
[[ -s $home/present ]] || exit 0
git rev-list --objects BASE | grep -oFf "$home/present" | sort -u | sed 's/^/past /'
sed 's/^/here /' "$home/present"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository made ready: its HEAD, its files, how many objects it has and how many were removed, its tags.

    `has_old_fix` says that a file as the gold patch makes it was part of the project before the issue: the fix takes
    something back, and history shows it to everybody.
    """

    head: str
    files: Listing
    objects: int
    removed: int
    tags: int
    has_old_fix: bool = False


async def prepare(box: ShellSandbox, said: SweTask) -> Repository:
    """Make a task's repository ready, the work tree untouched; twice is as good as once.

    Raises SandboxError, of kind `repository` where the image does not hold what the task says.
    """
    done = await box.exec(purge_command(said.workdir, said.base_commit), cwd="/", timeout_s=PREPARE_S)
    facts = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if done.timed_out or "done" not in facts:
        why = f"not done within {PREPARE_S:g} s" if done.timed_out else facts.get("fail") or _end(done.stderr)
        raise SandboxError(f"the repository of {said.instance_id} in {said.image!r} cannot be used: {why}", KIND)
    has_old_fix = await _look_for_gold(box, said)
    try:
        files = await list_files(box, said.workdir)
    except FilesError as error:
        raise SandboxError(f"{said.instance_id}: {error}", KIND) from error
    return Repository(
        head=facts["head"],
        files=files,
        objects=int(facts["objects"]),
        removed=int(facts["removed"]),
        tags=int(facts["tags"]),
        has_old_fix=has_old_fix,
    )


async def _look_for_gold(box: ShellSandbox, said: SweTask) -> bool:
    """Raises SandboxError if the repository holds what the gold patch makes; true if it did so before the issue."""
    changes = [
        change for change in read_diff(said.gold.encode("utf-8", "surrogateescape")) if change.new and change.hunks
    ]
    if not changes:
        return False
    before = await _blobs(box, said, [change.old for change in changes if change.old])
    made = []
    for change in changes:
        data = before.get(change.old, b"")
        after = change.applied(data) if change.is_text else None
        if after is not None and after != data:
            made.append(blob_id(after))
    if not made:
        return False
    command = SAFE_GIT + _filled(_PRESENT, said)
    done = await box.exec(command, cwd="/", timeout_s=PREPARE_S, stdin="".join(f"{name}\n" for name in made).encode())
    if done.exit_code:
        raise SandboxError(f"the objects of {said.instance_id} could not be looked through: {_end(done.stderr)}", KIND)
    found = {
        kind: {line[5:] for line in done.stdout.splitlines() if line.startswith(kind)} for kind in ("past", "here")
    }
    if new := found["here"] - found["past"]:
        raise SandboxError(
            f"the repository of {said.instance_id} in {said.image!r} holds the fix: {len(new)} files as the gold patch "
            f"makes them, such as object {min(new)[:12]}",
            KIND,
        )
    return bool(found["past"])


async def _blobs(box: ShellSandbox, said: SweTask, paths: Sequence[str]) -> Mapping[str, bytes]:
    """Files of the base commit as git keeps them; a path that it has not is left out."""
    name = new_name()
    named = [path for path in paths if "\n" not in path]
    command = SAFE_GIT + _filled(_BLOBS, said).replace("NAME", name)
    done = await box.exec(command, cwd="/", timeout_s=PREPARE_S, stdin=joined(named) or b"\0")
    if done.exit_code:
        raise SandboxError(f"files of a repository could not be read: {_end(done.stderr)}", KIND)
    data = await box.read(name)
    await box.exec(f"rm -f {name}", cwd="/")
    found, at = {}, 0
    for path in named:
        head, _, _ = data[at:].partition(b"\n")
        at += len(head) + 1
        if not head.endswith((b" missing", b" ambiguous")):
            size = int(head.rpartition(b" ")[2])
            found[path] = data[at : at + size]
            at += size + 1
    return found


def _filled(script: str, said: SweTask) -> str:
    return script.replace("PLACE", shlex.quote(said.workdir)).replace("BASE", shlex.quote(said.base_commit))


def blob_id(data: bytes) -> str:
    """The name that git gives to a file's content (SHA-1 repositories)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _end(text: str) -> str:
    return " ".join(text.split())[-300:] or "it said nothing"
