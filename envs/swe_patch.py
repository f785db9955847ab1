r"""An agent's work as a patch: what its files are now against what they were, as bytes.

Left out are what the repository's own ignore rules name and git does not track, caches of tools (`swe_files.CACHES`),
links that lead out of the repository, names that git refuses, and of all that the largest files beyond the bounds. The
files of the test patch stay as they were.

Nobody asks the agent's git, its settings or its records: from its sandbox come files alone, and a fresh one, in which no
agent was, says what they were and writes the difference. A patch is text in UTF-8, whatever the files are: what is none
goes in as git's binary form. It ends in a line of its own, as a mail's patch does, so a client may strip it.

Example:
    work = await take_work(box, said, repository)             # in the agent's sandbox, which may end then
    patch = await write_patch(fresh_box, said, work)
    patch.data, patch.left_out
"""

import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sao_gym.envs.sandboxes.spec import MIB, ShellSandbox
from sao_gym.envs.sandboxes.tree import Entry, Tree, read_tar
from sao_gym.envs.swe_diff import paths_of
from sao_gym.envs.swe_files import FILES_S, FilesError, differences, free_disk, joined, list_files, new_name, pack_files
from sao_gym.envs.swe_purge import SAFE_GIT
from sao_gym.envs.swe_repository import Repository
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import ConfigError, SandboxError

END = b"-- \nsao-gym\n"
"""What follows the last change, as in patches that are sent by mail: git and patch pass it over."""
_REFUSED = re.compile(r"(?:^|[/\\])(?:\.git|git~1)[ .]*(?::[^/]*)?(?:[/\\]|$)", re.I)
_BEFORE = r"""
cat >"$home/paths" && cd PLACE || exit 4
mkdir "$home/rules" && git init -q "$home/rules" && mkdir -p "$home/rules/.git/info" || exit 4
[[ ! -f .git/info/exclude ]] || cp .git/info/exclude "$home/rules/.git/info/exclude" || exit 4
find . -name .git -prune -o -name .gitignore -type f -print0 |
  tar --null --no-recursion -T - -cf - | tar -C "$home/rules" --no-same-owner -xf - || exit 4
git -C "$home/rules" check-ignore --no-index -z --stdin <"$home/paths" >NAME.ignored
(( $? < 2 )) || exit 4
git ls-files -z >NAME.tracked || exit 4
while IFS= read -r -d '' path; do
  [[ ! -L ./$path && ! -f ./$path ]] || printf './%s\0' "$path"
done <"$home/paths" | tar --null --no-recursion --hard-dereference -T - -cf NAME.tar
"""
"""Ignore rules and files as they were. The rules are asked in a folder that holds nothing else, so no link misleads."""
_WRITE = r"""
repo=$home/made.git
git init -q --bare "$repo" && mkdir -p "$repo/info" && cp NAME.attributes "$repo/info/attributes" || exit 4
git --git-dir="$repo" fast-import --quiet || exit 4
git --git-dir="$repo" diff-tree -r -p --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \
  refs/heads/before refs/heads/after >NAME.patch
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchLimits:
    """Bounds of what is carried: bytes of one file, and of all together (before and after, the larger)."""

    file_bytes: int = 8 * MIB
    total_bytes: int = 24 * MIB

    def __post_init__(self) -> None:
        if not 0 < self.file_bytes <= self.total_bytes <= 128 * MIB:
            raise ConfigError(
                f"a patch carries file_bytes = {self.file_bytes} and total_bytes = {self.total_bytes}; give numbers "
                f"above 0, the first at most the second, and that at most {128 * MIB}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What came out of an agent's sandbox: files as they are now, paths that are gone, what was left out by reason."""

    tree: Tree = field(default_factory=dict)
    gone: Collection[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A diff in UTF-8, empty where nothing changed; files in it; files left out by reason."""

    data: bytes = b""
    files: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The same for JSON."""
        return self.data.decode("utf-8")


async def take_work(
    box: ShellSandbox, said: SweTask, repository: Repository, limits: PatchLimits | None = None
) -> Work:
    """The files that an agent changed. Raises FilesError where it left none that can be taken, SandboxError."""
    limits = limits or PatchLimits()
    try:
        return await _take_work(box, said, repository, limits)
    except FilesError:
        await free_disk(box, said.workdir, repository.files.now, limits.file_bytes)
        return await _take_work(box, said, repository, limits)
    except SandboxError as error:
        if not await box.is_alive():
            raise
        await free_disk(box, said.workdir, repository.files.now, limits.file_bytes)
        try:
            return await _take_work(box, said, repository, limits)
        except SandboxError:
            raise FilesError(f"the repository's folder could not be packed: {error}") from error


async def _take_work(box: ShellSandbox, said: SweTask, repository: Repository, limits: PatchLimits) -> Work:
    changed, gone = differences(repository.files, await list_files(box, said.workdir))
    kept, left_out = chosen({**changed, **gone}, tests_of(said), limits)
    data = await pack_files(box, said.workdir, [path for path in kept if path in changed])
    try:
        taken = read_tar(data)
    except (tarfile.TarError, ValueError, OSError, EOFError) as error:
        raise FilesError("the repository's folder was packed as no archive") from error
    tree = {path: entry for path, entry in taken.items() if path in changed and (entry.link or entry.data is not None)}
    lost = sum(path in changed and path not in tree for path in kept)
    return Work(
        tree=tree,
        gone=frozenset(path for path in kept if path in gone),
        left_out={**left_out, **({"not taken": lost} if lost else {})},
    )


def tests_of(said: SweTask) -> frozenset[str]:
    """Files that a task's test patch names."""
    return paths_of(said.test_patch.encode("utf-8", "surrogateescape"))


def chosen(
    costs: Mapping[str, int], tests: Collection[str], limits: PatchLimits
) -> tuple[frozenset[str], Mapping[str, int]]:
    """(paths that are carried, the smallest first, and how many are left out by reason) of paths with their bytes."""
    kept, left_out, total = set(), Counter[str](), 0
    folders = {up for path in tests for up in _above(path)}
    for path, cost in sorted(costs.items(), key=lambda item: (item[1], item[0])):
        total += cost
        if path in tests or path in folders or any(up in tests for up in _above(path)):
            left_out["test"] += 1
        elif _REFUSED.search(path):
            left_out["name"] += 1
        elif cost > limits.file_bytes or total > limits.total_bytes:
            left_out["size"] += 1
        else:
            kept.add(path)
            continue
        total -= cost
    return frozenset(kept), dict(left_out)


async def write_patch(box: ShellSandbox, said: SweTask, work: Work) -> Patch:
    """The patch that makes of the task's files what the work is, written in a fresh sandbox of the task's image.

    Raises SandboxError.
    """
    paths = sorted({*work.tree, *work.gone})
    if not paths:
        return Patch(left_out=work.left_out)
    before, ignored = await _before(box, said, paths)
    after = {path: entry for path, entry in work.tree.items() if path not in ignored}
    before = {path: entry for path, entry in before.items() if path not in ignored}
    before = {path: entry for path, entry in before.items() if path in after or path in work.gone}
    left_out = {**work.left_out, **({"ignored": len(ignored)} if ignored else {})}
    same = {path for path, entry in after.items() if before.get(path) == entry}
    before, after = ({path: tree[path] for path in tree if path not in same} for tree in (before, after))
    if not before and not after:
        return Patch(left_out=left_out)
    data = await _difference(box, before, after)
    return Patch(data=data + END if data else b"", files=len({*before, *after}), left_out=left_out)


async def _before(box: ShellSandbox, said: SweTask, paths: Collection[str]) -> tuple[Tree, Collection[str]]:
    """(files as they were, paths that the repository ignores and does not track)."""
    name = new_name()
    command = SAFE_GIT + _BEFORE.replace("PLACE", shlex.quote(said.workdir)).replace("NAME", name)
    done = await box.exec(command, cwd="/", timeout_s=FILES_S, stdin=joined(paths))
    if done.exit_code:
        raise SandboxError(f"what {said.instance_id} was before could not be read: {_end(done.stderr)}")
    ignored, tracked = [_split(await box.read(f"{name}.{part}")) for part in ("ignored", "tracked")]
    return read_tar(await box.read(f"{name}.tar"), any_links=True), frozenset(ignored) - frozenset(tracked)


async def _difference(box: ShellSandbox, before: Tree, after: Tree) -> bytes:
    name = new_name()
    binary = {path for tree in (before, after) for path, entry in tree.items() if not _is_text(entry)}
    await box.write(f"{name}.attributes", b"".join(b'"/%s" -diff\n' % _pattern(path) for path in sorted(binary)))
    stream = b"".join((*_commit("before", before), *_commit("after", after)))
    done = await box.exec(SAFE_GIT + _WRITE.replace("NAME", name), cwd="/", timeout_s=FILES_S, stdin=stream)
    if done.exit_code:
        raise SandboxError(f"a patch could not be written: {_end(done.stderr)}")
    return await box.read(f"{name}.patch")


def _commit(name: str, tree: Tree) -> Iterable[bytes]:
    """A tree as a commit, in the form of git fast-import: bytes go in as they are."""
    yield b"commit refs/heads/%s\ncommitter x <x> 0 +0000\ndata 0\n" % name.encode()
    for path, entry in sorted(tree.items()):
        mode = b"120000" if entry.link else b"100755" if entry.is_executable else b"100644"
        data = entry.link.encode("utf-8", "surrogateescape") if entry.link else entry.data or b""
        yield b'M %s inline "%s"\ndata %d\n%s\n' % (mode, _quoted(path), len(data), data)


def _is_text(entry: Entry) -> bool:
    try:
        (entry.data or b"").decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _quoted(path: str) -> bytes:
    """A path between double quotes, as git reads it: whatever is no letter or digit as an octal number."""
    data = path.encode("utf-8", "surrogateescape")
    return b"".join(bytes([c]) if (chr(c).isalnum() and c < 128) or c in b"/._-" else b"\\%03o" % c for c in data)


def _pattern(path: str) -> bytes:
    """The same as a pattern that matches this path alone."""
    return re.sub(rb"\\(052|077|133|134)", rb"\\\\\\\1", _quoted(path))


def _split(data: bytes) -> Collection[str]:
    return [path.decode("utf-8", "surrogateescape") for path in data.split(b"\0") if path]


def _above(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _end(text: str) -> str:
    return " ".join(text.split())[-300:] or "it said nothing"
