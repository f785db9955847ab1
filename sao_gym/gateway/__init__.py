"""A token-exact gateway: an agent that only knows an OpenAI-style URL becomes token streams that can be trained on.

Example:
    from sao_gym.gateway import Gateway, GatewaySettings

    gateway = Gateway(engine, chat)
    async with gateway.serving():
        episode = gateway.open(episode, sampling=Sampling(max_tokens=1024))
        ...  # run the agent against episode.base_url
        record = await episode.close()
"""

from sao_gym.gateway.counts import Counts
from sao_gym.gateway.gateway import Gateway, GatewayEpisode
from sao_gym.gateway.reasons import Reason
from sao_gym.gateway.record import EpisodeRecord
from sao_gym.gateway.server import Address
from sao_gym.gateway.settings import GatewaySettings

__all__ = [
    "Address",
    "Counts",
    "EpisodeRecord",
    "Gateway",
    "GatewayEpisode",
    "GatewaySettings",
    "Reason",
]
