"""The servers behind a router: their addresses, from its list of workers.

A router (sglang-router, smg) is asked once, when the engine starts. Requests then go to the servers themselves: which of
them holds which policy version is known here and not there, and a row's next request must not go to one below its last.

Example:
    urls = await servers_behind("http://router:30000", http)
"""

import msgspec

from sao_gym.engines.sglang_http import Http, ServerRefusedError
from sao_gym.errors import ConfigError

ASK_S = 30.0


class _Worker(msgspec.Struct):
    url: str
    worker_type: str = "regular"
    is_healthy: bool = True


class _Workers(msgspec.Struct):
    workers: list[_Worker]


async def servers_behind(url: str, http: Http) -> list[str]:
    """The workers of the router at `url`, in the order of their addresses; `url` itself where a server answers.

    Raises ConfigError for a router whose workers cannot be used, EngineError for one that cannot be reached.
    """
    try:
        data = await http.call(f"{url.rstrip('/')}/workers", timeout_s=ASK_S)
        workers = msgspec.json.decode(data, type=_Workers).workers
    except ServerRefusedError as error:
        if error.status == 404:  # a server knows no such path
            return [url]
        raise ConfigError(f"{url} does not tell its workers ({error}): is it a router that wants a key?") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the router {url} lists its workers in a form that is not known here: {error}") from error
    if not workers:
        raise ConfigError(f"the router {url} has no workers: start servers and add them to it")
    for worker in workers:
        if worker.worker_type != "regular":
            raise ConfigError(
                f"the router {url} has {worker.url} as a {worker.worker_type} worker: weights can be given to regular "
                "workers alone, which do all of a request"
            )
        if not worker.is_healthy:
            raise ConfigError(f"the router {url} says that {worker.url} does not answer: start it again, or remove it")
    return sorted(worker.url for worker in workers)
