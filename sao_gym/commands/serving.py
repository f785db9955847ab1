"""The desk of a run that serves an application: its key, its address, its book.

Example:
    serving = Serving.opened(config, folder, engine, chat, budgets, clock, stack)
    print(serving.address.url)
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sao_gym.budgets import Budgets
from sao_gym.commands.policy import training_sampling
from sao_gym.errors import ConfigError
from sao_gym.feedback import Desk, FeedbackBook, Keep, serving
from sao_gym.feedback.book import BOOK
from sao_gym.feedback.reconcile import by_episode, ready_trajectories, reconcile
from sao_gym.gateway import Address, Gateway
from sao_gym.held_open import HeldOpen
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.loops import run_blocking
from sao_gym.parquet import read_trajectories
from sao_gym.protocols import Chat, Clock, Engine
from sao_gym.runfolder import RunFolder, write_whole
from sao_gym.trainer.checkpoint import RunState
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.files import TRAJECTORIES, later_files, row_uid

KEY, ADDRESS = "feedback.key", "feedback.address"
FILES = (BOOK, KEY, ADDRESS)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A desk that listens at `address`."""

    desk: Desk
    address: Address

    @classmethod
    def opened(
        cls,
        config: TrainConfig,
        folder: RunFolder,
        engine: Engine,
        chat: Chat,
        budgets: Budgets,
        clock: Clock,
        stack: ExitStack,
    ) -> "Serving":
        """Begin to listen; `stack` ends it. Raises ConfigError."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError("a run that serves an application learns in one process; start it without a launcher")
        key = _key(config, folder)
        book = FeedbackBook(folder.file(BOOK), config.feedback.keep)
        stack.callback(book.close)
        desk = Desk(
            Gateway(engine, chat, clock),  # type: ignore[arg-type] # each of ours has a codec
            book,
            clock=clock,
            sampling=training_sampling(config.rollout, engine),
            budgets=budgets,
            deadline_s=config.feedback.deadline_s,
            env_id=config.env.name,
            run_seed=config.seed,
        )
        place = config.feedback
        server = HeldOpen(lambda: serving(desk, key=key, host=place.host, port=place.port))
        address = run_blocking(server.opened())
        stack.callback(lambda: run_blocking(server.close()))
        stack.callback(lambda: run_blocking(desk.close()))
        write_whole(folder.file(ADDRESS), f"{address.url}/v1\n")
        stack.callback(lambda: folder.file(ADDRESS).unlink(missing_ok=True))
        return cls(desk=desk, address=address)

    def settle(self, ledger: Ledger, number: int) -> None:
        """The ledger says what became of a row."""
        row = ledger.row(number)
        self.desk.settle(row_uid(number), is_for_training=row.status is RowStatus.READY, why=row.reason)


def _key(config: TrainConfig, folder: RunFolder) -> str:
    """The application's key: from the environment variable that is named, else the run's own, made once."""
    if (name := config.feedback.key_env) is not None:
        if not (given := os.environ.get(name)):
            raise ConfigError(f"feedback.key_env names {name}, which is not set; set it to the application's key")
        return given
    path = folder.file(KEY)
    if not path.is_file():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return path.read_text(encoding="utf-8").strip()


def key_place(config: TrainConfig, folder: RunFolder) -> str:
    """Where the application's key is found, in words."""
    return f"the variable {name}" if (name := config.feedback.key_env) else str(folder.file(KEY))


@contextmanager
def kept_feedback(run: Path, ledger: Ledger, state: RunState, keep: Keep) -> Iterator[None]:
    """Around what puts a ledger back to `state`: what people said of episodes that leave it stays in the book."""
    if not (run / BOOK).is_file():
        yield
        return
    with closing(FeedbackBook(run / BOOK, keep)) as book:
        later = [t for path in later_files(run / TRAJECTORIES, state.step) for t in read_trajectories(path)]
        before = by_episode([*later, *ready_trajectories(ledger)])
        yield
        reconcile(book, ledger, before)
