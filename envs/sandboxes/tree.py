r"""A folder's content as data: how it goes into a sandbox and comes out again, whoever has worked in there.

Invariant: a tree names no place outside its folder. What comes out of a sandbox is not trusted: devices, links that
lead out, files below a link, absolute names and `..` are left behind.

Example:
    >>> tree = tree_of_texts({"a/b.txt": "hi"})
    >>> read_tar(tar_of(tree)) == tree
    True
"""

import gzip
import hashlib
import io
import os
import posixpath
import stat
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sao_gym.errors import TaskFileError


@dataclass(frozen=True, slots=True)
class Entry:
    """A file's bytes, or where a link leads; neither for an empty folder."""

    data: bytes | None = None
    link: str = ""
    is_executable: bool = False


Tree = Mapping[str, Entry]


def tree_of_texts(files: Mapping[str, str]) -> Tree:
    """A tree of text by path; a first line that begins with #! makes a file executable. Raises TaskFileError."""
    made = {}
    for name, text in files.items():
        if not isinstance(text, str) or (place := safe_path(name)) is None:
            raise TaskFileError(f"a task's file {name!r} must be text under a path inside its folder")
        made[place] = Entry(text.encode("utf-8", "surrogateescape"), is_executable=text.startswith("#!"))
    return made


def tree_of_folder(folder: Path, skip: Iterable[str] = ()) -> Tree:
    """Everything of a folder of this machine; `skip` are patterns of what stays behind (see `matches`)."""
    made: dict[str, Entry] = {}
    patterns = tuple(skip)
    for root, folders, files in os.walk(folder):
        here = Path(root).relative_to(folder)
        folders[:] = sorted(name for name in folders if not matches(str(here / name), patterns))
        for name in sorted([*files, *(name for name in folders if Path(root, name).is_symlink())]):
            path, place = Path(root, name), str(here / name)
            if matches(place, patterns):
                continue
            if path.is_symlink():
                made[place] = Entry(link=str(path.readlink()))
            elif path.is_file():
                made[place] = Entry(path.read_bytes(), is_executable=bool(path.stat().st_mode & stat.S_IXUSR))
    return {place: entry for place, entry in made.items() if not entry.link or _stays_inside(place, entry.link)}


def tar_of(tree: Tree, *, compress: bool = False) -> bytes:
    """The tree as a tar archive, the same bytes for the same tree."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for place in sorted(tree):
            entry, member = tree[place], tarfile.TarInfo(place)
            member.mode = 0o755 if entry.is_executable or entry.data is None else 0o644
            if entry.link:
                member.type, member.linkname = tarfile.SYMTYPE, entry.link
            elif entry.data is None:
                member.type = tarfile.DIRTYPE
            else:
                member.size = len(entry.data)
            archive.addfile(member, io.BytesIO(entry.data or b""))
    return gzip.compress(out.getvalue(), mtime=0) if compress else out.getvalue()


def read_tar(data: bytes, *, any_links: bool = False) -> Tree:
    """What of an archive, not compressed, stays inside its folder; never larger than the archive itself.

    `any_links` also takes links that lead out, for a tree that is only looked at.

    Raises tarfile.TarError, ValueError, OSError, EOFError if it is none.
    """
    made: dict[str, Entry] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            place = safe_path(member.name)
            if place is None or member.issparse() or member.size > len(data):
                continue
            if member.issym() and (any_links or _stays_inside(place, member.linkname)):
                made[place] = Entry(link=member.linkname)
            elif member.isfile():
                file = archive.extractfile(member)
                made[place] = Entry(file.read() if file else b"", is_executable=bool(member.mode & stat.S_IXUSR))
            elif member.isdir():
                made.setdefault(place, Entry())
    return without_hidden(made)


def without_hidden(tree: Tree) -> Tree:
    """The tree without what stands below a link or a file, where it could not be, and without folders that are not empty."""
    solid = {place for place, entry in tree.items() if entry.link or entry.data is not None}
    kept = {place: entry for place, entry in tree.items() if not any(up in solid for up in _above(place))}
    filled = {up for place in kept for up in _above(place)}
    return {p: e for p, e in kept.items() if e.link or e.data is not None or p not in filled}


def laid_over(below: Tree, above: Tree) -> Tree:
    """`below` with the entries of `above` in their places; what stands in their way goes."""
    tops = set(above)
    folders = {up for place in above for up in _above(place)}
    rest = {
        place: entry
        for place, entry in below.items()
        if place not in tops
        and not any(up in tops for up in _above(place))
        and not (place in folders and (entry.link or entry.data is not None))
    }
    return without_hidden({**rest, **above})


def matches(place: str, patterns: Iterable[str]) -> bool:
    """Whether a path, or a folder above it, is named by a pattern: `name*` at any depth, `dir/name` from the top."""
    places = [place, *_above(place)]
    return any(
        fnmatch(one if "/" in pattern.rstrip("/") else posixpath.basename(one), pattern.rstrip("/"))
        for pattern in patterns
        for one in places
    )


def read_pack(path: Path, sha256: str) -> Tree:
    """A packed folder. Raises TaskFileError if it is not there or is another one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TaskFileError(
            f"the packed folder {path} of a task cannot be read ({error.strerror}); if it was moved, say where it is "
            "with the environment's option folders"
        ) from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise TaskFileError(f"the packed folder {path} is not the one that its task was made with; make the task again")
    try:
        return read_tar(gzip.decompress(data))
    except (tarfile.TarError, ValueError, OSError, EOFError, zlib.error) as error:
        raise TaskFileError(f"the packed folder {path} cannot be unpacked: {error}") from error


def safe_path(name: str) -> str | None:
    """A name as a path below a folder, None if it leads out, is the folder itself, or is none."""
    if "\0" in name or name.startswith("/"):
        return None
    place = posixpath.normpath(name)
    return None if place in (".", "..") or place.startswith("../") else place


def _above(place: str) -> list[str]:
    parts = place.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _stays_inside(place: str, link: str) -> bool:
    return not link.startswith("/") and safe_path(posixpath.join(posixpath.dirname(place), link)) is not None
