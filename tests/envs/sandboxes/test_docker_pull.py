"""Images fetched by a real engine from a registry of the tests' own, and what `sao-gym swe pull` makes of it."""

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from registry_stand_in import Registry, serving

from sao_gym.commands.swe import main
from sao_gym.envs.sandboxes.docker_images import open_engine, own_bytes, present, tagged
from sao_gym.envs.sandboxes.docker_pull import Layers, PullError, PullProblem, pull
from sao_gym.envs.sandboxes.registry_limits import remaining_pulls
from sao_gym.envs.swe_preflight import IMAGES, preflight
from sao_gym.preflight import CheckState
from sao_gym.tasks.swe import swe_tasks

ROW = {
    "repo": "a/b",
    "base_commit": "0" * 40,
    "problem_statement": "It fails.",
    "FAIL_TO_PASS": ["t.py::t"],
    "PASS_TO_PASS": [],
    "test_patch": "",
    "patch": "",
}


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving() as made:
        yield made


# -- without an engine


@pytest.mark.parametrize(
    ("name", "as_listed"),
    [
        ("a/b", "a/b:latest"),
        ("docker.io/a/b:1", "a/b:1"),
        ("h:5000/a/b", "h:5000/a/b:latest"),
        ("library/x", "x:latest"),
    ],
)
def test_names_are_compared_as_engines_list_them(name: str, as_listed: str) -> None:
    assert tagged(name) == as_listed


def test_layers_are_counted_by_what_came() -> None:
    layers = Layers()
    for event in (
        {"status": "Pulling from a/b", "id": "latest"},
        {"status": "Already exists", "id": "l0", "progressDetail": {}},
        {"status": "Downloading", "id": "l1", "progressDetail": {"current": 10, "total": 100}},
        {"status": "Downloading", "id": "l2", "progressDetail": {"current": 30}},
        {"status": "Downloading", "id": "l1", "progressDetail": {"current": 60, "total": 100}},
    ):
        layers.note(event)
    assert (layers.bytes_done, layers.bytes_total) == (90, 130)
    layers.note({"status": "Download complete", "id": "l1"})
    assert (layers.bytes_done, layers.bytes_total) == (130, 130)


def test_what_a_registry_has_left_is_asked_without_a_pull(registry: Registry) -> None:
    registry.add("owner/one", b"1")
    assert remaining_pulls("owner/one:latest", registry.address) is None, "it does not say"
    registry.tells, registry.most = True, 7
    assert remaining_pulls("owner/one:latest", registry.address) == 7
    assert remaining_pulls(f"{registry.address}/owner/one") == 7
    assert registry.pulls == 0
    assert remaining_pulls("owner/none", registry.address) is None
    assert remaining_pulls("owner/one", "127.0.0.1:1") is None
    assert remaining_pulls("owner/one", "not a host") is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("push",), "knows the word pull, got push"),
        (("pull",), "say what the images are for"),
        (("pull", "--bench", "aime2025"), "is not about repositories: it needs no images"),
        (("pull", "--bench", "swe_verify"), "unknown benchmark 'swe_verify'; did you mean 'swe_verified'"),
        (("pull", "--tasks", "rows.jsonl", "--limit", "some"), "--limit is 'some'; give a whole number"),
        (("pull", "--tasks", "folders.jsonl"), "/roots/a is a folder and no image of containers"),
        (("pull", "--tasks", "rows.jsonl", "--size", "4"), "unexpected argument '--size'"),
    ],
)
def test_words_that_are_none(
    words: tuple[str, ...],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, image in (("rows", "a/b:1"), ("folders", "/roots/a")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**ROW, "instance_id": "a__b-1", "image": image}) + "\n")
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_no_engine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "instance_id": "a__b-1", "image": "a/b:1"}) + "\n")
    assert main(["pull", "--tasks", str(tmp_path / "rows.jsonl")]) == 2
    assert f"no Docker engine answers at unix://{tmp_path}/none.sock" in capsys.readouterr().err


# -- with one


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    with open_engine(60.0) as client:
        before = present(client)
        yield client
        for name in present(client) - before:
            client.api.remove_image(name, force=True)


@pytest.fixture
def names() -> list[str]:
    """Names that no other test has."""
    mark = secrets.token_hex(4)
    return [f"owner/image-{mark}-{number}" for number in range(4)]


@pytest.fixture
def rows(tmp_path: Path, names: list[str]) -> str:
    lines = ({**ROW, "instance_id": f"a__b-{n}", "image": f"{name}:latest"} for n, name in enumerate(names))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / "rows.jsonl")


@pytest.fixture
def fetch(registry: Registry, rows: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["pull", "--tasks", rows, "--registry", registry.address, "--keep-free-gib", "0.1", *words])
        return code, *capsys.readouterr()

    return run


@pytest.mark.docker
def test_an_image_comes_under_its_own_name(engine: Any, registry: Registry, names: list[str]) -> None:
    registry.add(names[0], secrets.token_bytes(200_000))
    seen: list[int] = []
    came = pull(
        engine, f"{names[0]}:latest", registry=registry.address, on_progress=lambda one: seen.append(one.bytes_done)
    )
    there = present(engine)
    assert f"{names[0]}:latest" in there
    assert not [name for name in there if name.startswith(registry.address)]
    assert came >= 200_000
    assert seen == sorted(seen)
    assert [size for size in own_bytes(engine, frozenset([f"{names[0]}:latest"])) if size >= 200_000]


@pytest.mark.docker
def test_why_an_image_does_not_come(engine: Any, registry: Registry, names: list[str]) -> None:
    registry.add(names[0], b"x")
    registry.most = 0
    for name, address, problem in (
        (names[1], registry.address, PullProblem.ABSENT),
        (names[0], registry.address, PullProblem.LIMITED),
        (names[0], "127.0.0.1:1", PullProblem.FAILED),
    ):
        with pytest.raises(PullError) as caught:
            pull(engine, f"{name}:latest", registry=address)
        assert caught.value.problem is problem


@pytest.mark.docker
def test_all_images_come_and_once_only(
    engine: Any, registry: Registry, names: list[str], rows: str, fetch: Callable[..., tuple[int, str, str]]
) -> None:
    own = [registry.add(name, secrets.token_bytes(100_000)) for name in names]
    registry.cut = {own[1]}
    tasks = swe_tasks(rows)
    checks = {one.name: one for one in preflight(tasks, {"backend": "docker", "tasks": rows})}
    assert checks[IMAGES].is_missing
    assert checks[IMAGES].remedy == f"sao-gym swe pull --tasks {rows}"
    code, out, _ = fetch("--dry-run")
    assert (code, registry.pulls) == (0, 0)
    assert "rows: 4 images, 0 there, 4 to fetch" in out
    code, out, err = fetch()
    assert code == 0, err
    assert "[4/4]" in out
    assert "all 4 came" in out
    assert registry.asked[own[0]] == 1
    assert registry.asked[own[1]] >= 2, "the one that was cut off was asked for again"
    pulls = registry.pulls
    code, out, _ = fetch()
    assert (code, registry.pulls) == (0, pulls)
    assert "4 there, 0 to fetch" in out
    checks = {one.name: one for one in preflight(tasks, {"backend": "docker", "tasks": rows})}
    assert (checks[IMAGES].state, checks[IMAGES].found) == (CheckState.OK, "4 of 4")


@pytest.mark.docker
def test_budgets_and_limits_stop_it_and_it_goes_on(
    engine: Any, registry: Registry, names: list[str], fetch: Callable[..., tuple[int, str, str]]
) -> None:
    for name in names[:3]:
        registry.add(name, secrets.token_bytes(3_000_000))
    code, out, _ = fetch("--budget-images", "1")
    assert code == 0
    assert "the budget of 1 image is used up: 1 image came, 3 to go; the same command goes on" in out
    code, out, _ = fetch("--budget-gib", "0.001")
    assert code == 0
    assert "is used up: 1 image came, 2 to go" in out, "an image is fetched whole"
    registry.most = registry.pulls
    code, _, err = fetch()
    assert code == 2
    assert "the registry lets no more pass for now" in err
    assert "0 images came, 2 to go; the same command goes on with them" in err
    registry.tells = True
    code, _, err = fetch()
    assert (code, "lets no more images pass for now" in err) == (2, True)
    registry.most = None
    code, out, err = fetch()
    assert code == 2, "one is nowhere"
    assert f"1 image did not come ({names[3]}:latest: the registry has no such image" in err
    assert "1 image came, 1 to go" in err


@pytest.mark.docker
def test_a_disk_that_would_be_full_stops_it_first(
    engine: Any, registry: Registry, names: list[str], fetch: Callable[..., tuple[int, str, str]]
) -> None:
    registry.add(names[0], b"x")
    code, _, err = fetch("--keep-free-gib", "1e9")
    assert (code, registry.pulls) == (2, 0)
    assert "are to stay free (--keep-free-gib); 0 images came, 4 to go" in err
