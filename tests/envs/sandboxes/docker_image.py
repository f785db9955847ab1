"""An image for the tests, made without a registry: this Debian's own packages, packed and imported.

What goes in is the closure of a few named packages after their dependencies, the links of the alternatives system that
lead to a packed file, and an account list of two. Documentation stays out, and so does Perl, which few commands of git
need.
"""

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

import docker

IMAGE = "sao-gym-test:latest"
PACKAGES = (
    *("base-files", "bash", "coreutils", "dash", "diffutils", "findutils", "git", "grep", "gzip", "hostname", "mawk"),
    *("mount", "patch", "procps", "python3", "sed", "tar", "util-linux"),
)
UNUSED = {"debconf", "dpkg", "git-man", "liberror-perl", "libperl5.36", "perl", "perl-modules-5.36", "zstd"}
LEFT_OUT = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/info", "/usr/share/lintian")
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}


def missing_image(client: docker.DockerClient) -> str | None:
    """Why the tests' image cannot be had, None once it is there."""
    if client.images.list(name=IMAGE):
        return None
    if shutil.which("dpkg-query") is None:
        return f"no image {IMAGE}, and this is no Debian to make one from"
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            pack(archive, closure(PACKAGES) - UNUSED)
        file.flush()
        name, _, tag = IMAGE.partition(":")
        client.api.import_image(file.name, repository=name, tag=tag, changes=["ENV LANG=C.UTF-8", "WORKDIR /"])
    return None


def closure(names: Iterable[str]) -> set[str]:
    """Installed packages that `names` need, themselves included."""
    form = "${db:Status-Abbrev}\t${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    needs: dict[str, list[list[str]]] = {}
    provided: dict[str, str] = {}
    for line in subprocess.check_output(["dpkg-query", "-W", "-f", form], text=True).splitlines():
        status, name, provides, depends = line.split("\t")
        if status.startswith("ii"):
            needs[name] = [[_name(choice) for choice in need.split("|")] for need in depends.split(",")]
            provided.update({_name(each): name for each in provides.split(",")})
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in needs and name not in found:
            found.add(name)
            for choices in needs[name]:
                there = [each if each in needs else provided.get(each, "") for each in choices]
                pending += [each for each in there if each][:1]
    return found


def _name(text: str) -> str:
    return re.split(r"[ :(]", text.strip(), maxsplit=1)[0]


def pack(archive: tarfile.TarFile, packages: Iterable[str]) -> None:
    """Write the packages' files below their real folders (/bin may be a link), and what no package lists."""
    packed: set[str] = set()
    for listed in subprocess.check_output(["dpkg-query", "-L", *packages], text=True).splitlines():
        if listed.startswith("/") and listed != "/." and not listed.startswith(LEFT_OUT):
            _add(archive, packed, f"{os.path.realpath(Path(listed).parent)}/{Path(listed).name}".replace("//", "/"))
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        _add(archive, packed, name)
    _add_alternatives(archive, packed)
    for name, text in ACCOUNTS.items():
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(text), 0o644
        archive.addfile(member, io.BytesIO(text.encode()))


def _add(archive: tarfile.TarFile, packed: set[str], path: str) -> None:
    if path not in packed and os.path.lexists(path) and path.removeprefix("/") not in ACCOUNTS:
        packed.add(path)
        archive.add(path, recursive=False)


def _add_alternatives(archive: tarfile.TarFile, packed: set[str]) -> None:
    for link in Path("/etc/alternatives").iterdir():
        if os.path.realpath(link) in packed:
            _add(archive, packed, str(link))
    for folder in ("/usr/bin", "/usr/sbin"):
        for path in Path(folder).iterdir():
            if path.is_symlink() and os.readlink(path) in packed:  # noqa: PTH115
                _add(archive, packed, str(path))
