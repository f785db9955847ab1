"""How many images a registry will still hand out, where it says so: asked without fetching anything.

Docker Hub counts images by address or account and tells what is left with each answer about a manifest; a question that
wants only the answer's head is not counted. Asked from this machine: an engine elsewhere may have another limit.
"""

import re
from typing import Any

import httpx

HUB = "registry-1.docker.io"
ASK_S = 5.0
ACCEPT = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.v2+json"


def remaining_pulls(name: str, registry: str = "") -> int | None:
    """Images that may still be fetched from where `name` comes from; None where that is not limited, or not told."""
    host, path, tag = _place(name, registry)
    scheme = "http" if re.match(r"(localhost|127\.)", host) else "https"
    url = f"{scheme}://{host}/v2/{path}/manifests/{tag}"
    try:
        with httpx.Client(timeout=ASK_S, follow_redirects=True) as client:
            answer = client.head(url, headers={"Accept": ACCEPT})
            if answer.status_code == 401 and (token := _token(client, answer)):
                answer = client.head(url, headers={"Accept": ACCEPT, "Authorization": f"Bearer {token}"})
        if answer.status_code == 429:
            return 0
        left = re.match(r"\d+", answer.headers.get("ratelimit-remaining", ""))
        return int(left[0]) if left else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return None


def _place(name: str, registry: str) -> tuple[str, str, str]:
    """Host, path and tag of an image."""
    first, _, rest = name.partition("/")
    has_host = bool(rest) and (any(mark in first for mark in ".:") or first == "localhost")
    host, path = (first, rest) if has_host else (HUB, name)
    host = HUB if host in ("docker.io", "index.docker.io") else host
    path, _, digest = path.partition("@")
    head, colon, tag = path.rpartition(":")
    path = head if colon else path
    if host == HUB and "/" not in path:
        path = f"library/{path}"
    return registry.rstrip("/") or host, path, digest or (tag if colon else "latest")


def _token(client: httpx.Client, refused: httpx.Response) -> str:
    """A token for whoever asks, as the refusal says where to get one."""
    said = dict(re.findall(r'(\w+)="([^"]*)"', refused.headers.get("www-authenticate", "")))
    realm = said.pop("realm")
    found: dict[str, Any] = client.get(realm, params=said).json()
    return str(found.get("token") or found.get("access_token") or "")
