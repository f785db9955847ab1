"""Root folders and images that tests of environments share."""

import sys
import tarfile
from pathlib import Path

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))  # swe_instances


@pytest.fixture(scope="session")
def root_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked root file system, made of this Debian's own packages."""
    if not Path("/var/lib/dpkg").is_dir():
        pytest.skip("no Debian to make a root folder of")
    docker_image = pytest.importorskip("docker_image")
    folder = tmp_path_factory.mktemp("root")
    folder.chmod(0o755)
    with tarfile.open(folder / "packed.tar", "w") as archive:
        docker_image.pack(archive, docker_image.closure(docker_image.PACKAGES) - docker_image.UNUSED)
    with tarfile.open(folder / "packed.tar") as archive:
        archive.extractall(folder / "root", filter="fully_trusted")
    (folder / "packed.tar").unlink()
    (folder / "root/testbed").mkdir()
    (folder / "root/testbed/module.py").write_text("x = 1\n")
    return folder / "root"


@pytest.fixture(scope="session")
def tiny_root(root_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny repository of `swe_instances` as a root folder."""
    import swe_instances

    return swe_instances.tiny_root(root_folder, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_image(tiny_root: Path) -> str:
    """The same as a Docker image."""
    import swe_instances

    return swe_instances.import_root(tiny_root, "sao-gym-tiny:latest")
