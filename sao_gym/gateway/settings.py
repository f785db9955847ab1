"""What a gateway is told once, for all of its episodes."""

from dataclasses import dataclass

from sao_gym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """`match_by_position` takes whatever stands in the place of an answer for its echo, when all else fails.

    A request is auxiliary (titles, condensers: kept, never trained) if it came under the auxiliary address, carries
    the header `auxiliary_header`, or one of `auxiliary_markers` stands in its first or last message. At most
    `max_auxiliary_calls` of them are answered in one episode: the budgets do not count them. Times are in seconds,
    `call_s` is the longest that one generation may take.
    """

    model: str = "policy"
    match_by_position: bool = False
    auxiliary_header: str = "x-sao-gym-auxiliary"
    auxiliary_markers: tuple[str, ...] = ()
    max_auxiliary_calls: int = 1000
    max_running: int | None = None
    max_waiting: int = 1024
    hold_s: float = 120.0
    retry_after_s: float = 5.0
    call_s: float = 3600.0
    max_body_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("max_auxiliary_calls", "max_running", "max_waiting", "hold_s", "call_s", "max_body_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        if not all(self.auxiliary_markers):
            raise ConfigError("an auxiliary marker must be some text, got an empty one")
