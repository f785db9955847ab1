"""One family of errors. A message says what was given, what was expected and what to do.

`UserError` and its children end a command with one sentence and exit code 2. `EpisodeError` and its children
end one episode with outcome `error`: it is counted by kind, never trained on, and its prompt goes back.
"""


class SaoGymError(Exception):
    """Root of every error that sao-gym raises on purpose."""


class UserError(SaoGymError):
    """Input that cannot be used. Commands print the message and exit with code 2."""


class ConfigError(UserError, ValueError):
    """A configuration key or value that is unknown, of the wrong type, out of range or without effect."""


class RegistryError(UserError, LookupError):
    """An environment name that resolves to nothing."""


class TaskFileError(UserError, ValueError):
    """A task, trajectory or sample file that cannot be read; names file, line and column."""


class ModelError(UserError):
    """A model folder that is missing, corrupt or of a kind that cannot be used."""


class ApiError(UserError):
    """An API that cannot be reached, or that refuses the key, the model or every request."""


class CheckpointError(UserError):
    """A checkpoint that is incomplete, of another shape, or cannot be resumed."""


class RunFolderError(UserError):
    """A run folder that is in use, not empty, or not a run."""


class SandboxUnavailableError(UserError):
    """This machine cannot give the isolation that was asked for."""


class EpisodeError(SaoGymError):
    """Infrastructure failed during one episode. `kind` is the reason that is counted."""

    kind = "episode"

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.kind)


class SandboxError(EpisodeError):
    """The sandbox died, could not start or broke its protocol."""

    kind = "sandbox"


class SandboxLeaseError(SandboxError):
    """A call on a sandbox that was given back, or taken back from a holder that overstayed."""

    kind = "sandbox_lease"


class SandboxDiskError(SandboxError):
    """No sandbox is started: the disk is too full."""

    kind = "sandbox_disk"


class EngineError(EpisodeError):
    """The engine could not serve a request, or answered with arrays that do not fit together."""

    kind = "engine"


class GradingError(EpisodeError):
    """The grader itself failed; the answer is neither right nor wrong."""

    kind = "grading"


class NoFeedbackError(EpisodeError):
    """Nobody judged the episode in time. It is dropped and never trained; nothing has failed, and nothing is run again."""

    kind = "no_feedback"


class DeadlineError(SaoGymError, TimeoutError):
    """A wait outlasted its deadline. The message names what was waited for."""


class InvariantError(SaoGymError):
    """A promise that the code makes about itself did not hold: a bug, never the user's input."""
