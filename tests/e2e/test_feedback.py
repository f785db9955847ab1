"""`python -m sao_gym.feedback` as people run it: a real server process, a tiny policy, and an ordinary HTTP client."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sao_gym.commands.feedback import main
from sao_gym.commands.train import main as train
from sao_gym.feedback import FeedbackBook, ServedState
from sao_gym.feedback.reconcile import episode_of
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.runfolder import METRICS
from sao_gym.stream import Trajectory
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.checkpoint import find_checkpoints
from sao_gym.trainer.files import trajectory_files

ROOT = Path(__file__).resolve().parents[2]
STEPS, ROWS = 30, 16
SETTINGS = (
    *("--batch-size", str(ROWS), "--max-tokens", "2", "--feedback.port", "0", "--engine.context-length", "256"),
    *("--rollout.max-tokens-per-episode", "256", "--actor.lr", "1e-2", "--critic.lr", "1e-2"),
    *("--critic.only-steps", "1"),
    *("--staleness.max-staleness", "2", "--trackers", "none"),
)
COMMENT = "what-a-user-said"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_tokenizer(["hello world 0123456789"] * 4, vocab_size=270)
    tiny = tiny_qwen3(vocab_size=len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=256)
    tiny.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@dataclass
class Application:
    """Asks, and posts what its users say, `side` at a time, until it is told to stop or nobody answers any more."""

    address: str
    key: str
    score: Callable[[str], float]
    side: int = 8
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    is_stopping: bool = False

    async def run(self) -> None:
        headers = {"authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.address, headers=headers, timeout=60, trust_env=False) as client:
            await asyncio.gather(*(self._user(client, number) for number in range(self.side)))

    async def _user(self, client: httpx.AsyncClient, number: int) -> None:
        while not self.is_stopping:
            try:
                await self._ask(client, number)
            except httpx.HTTPError:
                return

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": f"hello {number}"}]}
        answer = await client.post("/chat/completions", json=body)
        if answer.status_code != 200:
            self.refused[answer.status_code] += 1
            await asyncio.sleep(0.05)
            return
        episode = answer.headers["x-sao-episode"]
        score = self.score(answer.json()["choices"][0]["message"]["content"] or "")
        said = await client.post("/feedback", json={"episode": episode, "score": score, "comment": COMMENT})
        if said.status_code == 200:
            self.receipts[episode] = said.json()
            self.scores.append(score)


def plain(text: str) -> float:
    """Share of ASCII: these users dislike the signs of which a random policy writes many."""
    return sum(letter.isascii() for letter in text) / len(text) if text else 0.0


@contextmanager
def served(run: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that has begun to listen; killed at the end if it still runs."""
    (run / "feedback.address").unlink(missing_ok=True)  # what a killed process left
    command = [sys.executable, "-m", "sao_gym.feedback", "serve", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        limit = time.monotonic() + 120
        while not (run / "feedback.address").exists():
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


def application(run: Path, **more: Any) -> Application:
    address, key = ((run / name).read_text().strip() for name in ("feedback.address", "feedback.key"))
    return Application(address, key, plain, **more)


@asynccontextmanager
async def asking(application: Application) -> AsyncIterator[None]:
    task = asyncio.ensure_future(application.run())
    try:
        yield
    finally:
        application.is_stopping = True
        await task


async def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit, what
        await asyncio.sleep(0.02)


def steps(run: Path) -> int:
    path = run / METRICS
    return len(path.read_text().splitlines()) if path.exists() else 0


def trained(run: Path) -> list[Trajectory]:
    return [t for path in trajectory_files(run) if "rolled_back" not in str(path) for t in read_trajectories(path)]


def audit(run: Path, receipts: dict[str, dict[str, Any]]) -> Counter[str]:
    """Where every episode is whose feedback was accepted; nowhere is an error, and so is twice."""
    taught = [name for t in trained(run) if (name := episode_of(t))]
    assert len(taught) == len(set(taught))
    scores = {episode_of(t): t.score.value for t in trained(run) if t.score is not None}
    with closing(Ledger(run / "ledger.sqlite")) as ledger, closing(FeedbackBook(run / "feedback.sqlite")) as book:
        ready = {episode_of(t) for row in ledger.rows(RowStatus.READY) for t in [ledger.trajectory(row.number)]}
        assert not ready & set(taught)
        found: Counter[str] = Counter()
        for name, receipt in receipts.items():
            line = book.find(name)
            assert line is not None
            is_late = line.state is ServedState.LOST  # given in the moment between the run's end and its server's
            assert is_late or line.state is ServedState.SCORED
            assert line.score == receipt["score"]
            where = "trained" if name in scores else "ready" if name in ready else "recorded"
            found[where] += 1
            assert (where != "recorded") == line.is_for_training, (where, line)
            if where == "trained":
                assert scores[name] == receipt["score"]
            if where == "recorded":
                kept = book.trajectory(name)
                assert kept is not None
                assert is_late or (kept.score is not None and kept.score.value == receipt["score"])
                assert line.why
        return found


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 30 batches that an application has taught; `receipts.json` beside it is what the application knows."""
    path = tmp_path_factory.mktemp("runs") / "app"

    async def scene() -> Application:
        with served(path, "--model", str(model), "--out", str(path), *SETTINGS, "--steps", str(STEPS)) as server:
            asked = application(path)
            async with asking(asked):
                await until(lambda: server.poll() is not None, "the run did not end")
            assert server.returncode == 0, server.stderr and server.stderr.read()
            return asked

    asked = asyncio.run(scene())
    facts = {"receipts": asked.receipts, "scores": asked.scores, "refused": dict(asked.refused)}
    path.with_name("facts.json").write_text(json.dumps(facts))
    return path


@pytest.fixture
def facts(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run.with_name("facts.json").read_text())
    return loaded


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_an_application_s_users_teach_the_policy(run: Path, facts: dict[str, Any]) -> None:
    assert steps(run) == STEPS
    scores, quarter = facts["scores"], len(facts["scores"]) // 4
    first, last = sum(scores[:quarter]) / quarter, sum(scores[-quarter:]) / quarter
    assert last > first + 0.2, (first, last)
    found = audit(run, facts["receipts"])
    assert found["trained"] >= (STEPS - 1) * ROWS  # an application killed the instant before an answer knows one less
    assert set(facts["refused"]) <= {"429"}  # come again: the run has ended
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    assert lines[-1]["feedback_scored"] >= STEPS * ROWS
    assert lines[-1]["staleness_max"] <= 2
    assert not (run / "feedback.address").exists()
    assert (run / "feedback.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_what_was_accepted_survives_kill_9(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "app"
    receipts: dict[str, dict[str, Any]] = {}

    async def scene(words: tuple[str, ...], enough: int) -> None:
        with served(path, *words) as server:
            asked = application(path)
            async with asking(asked):
                await until(lambda: len(asked.receipts) >= enough or server.poll() is not None, "no feedback was taken")
                assert server.poll() is None
                server.send_signal(signal.SIGKILL)
                server.wait()
            receipts.update(asked.receipts)

    begin = ("--model", str(model), "--out", str(path), *SETTINGS, "--steps", "1000", "--checkpoint.every", "2")
    asyncio.run(scene(begin, 5 * ROWS + 5))
    asyncio.run(scene(("--resume", str(path)), 3 * ROWS))
    with closing(FeedbackBook(path / "feedback.sqlite")) as book:
        was_open = [line.id for line in book.episodes(ServedState.OPEN)]
    with served(path, "--resume", str(path)) as server:  # puts the ledger right, and is ended in good order
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    found = audit(path, receipts)
    assert found["trained"] >= 4 * ROWS
    with closing(FeedbackBook(path / "feedback.sqlite")) as book:
        assert ServedState.OPEN not in book.counts()
        states = {line.state for name in was_open if (line := book.find(name)) is not None}
    assert states <= {ServedState.LOST, ServedState.SCORED}


def holds(run: Path, text: bytes) -> list[str]:
    return [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_an_episode_is_deleted_from_ledger_book_and_files(copy: Path, facts: dict[str, Any]) -> None:
    taught = [name for t in trained(copy) if (name := episode_of(t))]
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book, closing(Ledger(copy / "ledger.sqlite")) as ledger:
        recorded = [line.id for line in book.episodes(ServedState.SCORED) if not line.is_for_training]
        ready = [name for row in ledger.rows(RowStatus.READY) if (name := episode_of(ledger.trajectory(row.number)))]
    gone = [taught[0], taught[-1], *recorded[:1], *ready[:1]]
    kept = len(trained(copy))
    assert main(["delete", str(copy), *gone]) == 0
    assert len(trained(copy)) == kept - 2
    assert not {episode_of(t) for t in trained(copy)} & set(gone)
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book, closing(Ledger(copy / "ledger.sqlite")) as ledger:
        for name in gone:
            line = book.find(name)
            assert line is not None
            assert (line.state, line.score, line.comment) == (ServedState.DELETED, None, None)
            assert book.trajectory(name) is None
        assert not {episode_of(ledger.trajectory(row.number)) for row in ledger.rows(RowStatus.READY)} & set(gone)
    assert main(["delete", str(copy), *gone]) == 0  # again, as after a crash in the middle
    for name in gone:
        assert holds(copy, name.encode()) == ["feedback.sqlite"]  # that there was one


def test_the_canary_goes_also_where_the_book_alone_has_its_episode(copy: Path) -> None:
    """After a crash: the step's file is gone, and the episode recorded."""
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book:
        kept = next(t for line in book.episodes() if (t := book.trajectory(line.id)) is not None and t.n_action)
    np.save(copy / "canary.npy", kept.streams[0].token_ids)
    assert main(["delete", str(copy), episode_of(kept) or ""]) == 0
    assert not (copy / "canary.npy").exists()


def test_old_bytes_leave_the_databases(copy: Path) -> None:
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book:
        names = [line.id for line in book.episodes()]
    assert holds(copy, COMMENT.encode()) != []
    assert main(["delete", str(copy), *names]) == 0
    assert holds(copy, COMMENT.encode()) == []
    assert trained(copy) == []
    assert not (copy / "canary.npy").exists()
    assert train(["--resume", str(copy)]) == 0  # a run without its trajectories stands


def test_a_rollback_goes_back_to_a_version_and_on_from_there(
    copy: Path, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    states = [state for state, _ in find_checkpoints(copy / "checkpoints")[0]]
    assert len(states) >= 3
    target = states[-3]
    assert main(["rollback", str(copy), "1"]) == 2
    known = ", ".join(str(state.version) for state in states)
    assert f"no checkpoint of version 1: it has {known}" in capsys.readouterr().err
    later = {episode_of(t) for t in trained(copy)[target.step * ROWS :]}
    assert main(["rollback", str(copy), str(target.version)]) == 0
    said = capsys.readouterr().out
    assert f"version {target.version}, step {target.step}, is the newest" in said
    assert "2 later checkpoints set aside, 32 rows trained since dropped" in said
    assert [state for state, _ in find_checkpoints(copy / "checkpoints")[0]][-1] == target
    (aside,) = copy.glob("rolled_back-*")
    assert len(list((aside / "checkpoints").iterdir())) == len(list((aside / "trajectories").iterdir())) == 2
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book:
        for name in later:
            line = book.find(name or "")
            assert line is not None
            assert line.why == f"rolled back to version {target.version}"
            assert book.trajectory(line.id) is not None

    async def scene() -> None:
        with served(copy, "--resume", str(copy), "--steps", str(STEPS)) as server:
            async with asking(application(copy)):
                await until(lambda: server.poll() is not None, "the run did not end")
            assert server.returncode == 0

    asyncio.run(scene())
    assert steps(copy) == STEPS
    now = {episode_of(t) for t in trained(copy)}
    assert len(now) == STEPS * ROWS
    assert not now & later
    lines = [json.loads(line) for line in (copy / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    audit(copy, facts["receipts"])


def test_the_run_is_one_of_training(copy: Path, tmp_path: Path, model: Path) -> None:
    assert train(["--replay", str(copy)]) == 0
    words = ["--learn-only", str(copy), "--env", "feedback", "--model", str(model), "--out", str(tmp_path / "learnt")]
    assert train([*words, "--steps", "2", "--batch-size", str(ROWS), "--critic.only-steps", "0"]) == 0
    assert not (tmp_path / "learnt" / "feedback.sqlite").exists()


def test_a_rollback_may_train_on_the_same_again(copy: Path) -> None:
    target = find_checkpoints(copy / "checkpoints")[0][-2][0]
    last = {episode_of(t) for t in trained(copy)[-ROWS:]}
    assert main(["rollback", str(copy), str(target.version), "--again"]) == 0
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book:
        assert all((line := book.find(name or "")) is not None and line.is_for_training for name in last)


def test_nothing_is_touched_while_the_run_goes_on(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = find_checkpoints(copy / "checkpoints")[0][-2][0].version
    with closing(FeedbackBook(copy / "feedback.sqlite")) as book:
        name = book.episodes()[0].id
    with served(copy, "--resume", str(copy), "--steps", "1000", "--allow-change"):
        for words in (["delete", str(copy), name], ["rollback", str(copy), str(version)]):
            assert main(words) == 2
            assert "is in use by process" in capsys.readouterr().err
        assert main(["status", str(copy)]) == 0
        assert "episodes served" in capsys.readouterr().out


@pytest.mark.slow
def test_until_trained_keeps_no_text(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "app"
    words = ("--model", str(model), "--out", str(path), *SETTINGS, "--steps", "8", "--checkpoint.keep", "2")

    async def scene() -> None:
        with served(path, *words, "--feedback.keep", "until_trained") as server:
            async with asking(application(path, side=5 * ROWS)):  # more than there are places
                await until(lambda: server.poll() is not None, "the run did not end")
            assert server.returncode == 0

    asyncio.run(scene())
    assert sorted(file.name for file in (path / "trajectories").iterdir()) == ["step_000008.parquet"]
    assert not (path / "canary.npy").exists()
    assert holds(path, COMMENT.encode()) == []
    with closing(FeedbackBook(path / "feedback.sqlite")) as book:
        lines = book.episodes()
        assert any(line.why for line in lines)
        assert not any(book.trajectory(line.id) for line in lines)
    version = find_checkpoints(path / "checkpoints")[0][0][0].version
    assert main(["rollback", str(path), str(version)]) == 0
    assert list(trajectory_files(path)) == []
    with closing(FeedbackBook(path / "feedback.sqlite")) as book:
        assert any("rolled back" in (line.why or "") for line in book.episodes())
        assert not any(book.trajectory(line.id) for line in lines)
