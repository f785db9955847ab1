"""A registry of images that speaks as much of the registry's interface (version 2) as an engine needs to pull from it.

Its images are made of nothing: a layer that all share and one of each image's own. It counts manifests, as registries count
pulls, refuses after `most` of them, cuts the first answer for each blob in `cut` short, and says what is left where `tells`.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def packed(name: str, data: bytes) -> bytes:
    """An archive of one file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


@dataclass
class Registry:
    """What it holds, and what was asked of it."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    most: int | None = None
    tells: bool = False
    cut: set[str] = field(default_factory=set)
    asked: Counter[str] = field(default_factory=Counter)
    pulls: int = 0
    address: str = ""

    def add(self, name: str, own: bytes, shared: bytes = b"what all images share") -> str:
        """An image `name` (without a tag, which is latest); returns the digest of its own layer."""
        archives = [packed("shared", shared), packed("own", own)]
        layers = [gzip.compress(archive, mtime=0) for archive in archives]
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [digest(archive) for archive in archives]},
            }
        ).encode()
        for blob in (config, *layers):
            self.blobs[digest(blob)] = blob
        described = [{"mediaType": LAYER, "size": len(layer), "digest": digest(layer)} for layer in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "size": len(config), "digest": digest(config)},
            "layers": described,
        }
        self.manifests[name] = json.dumps(manifest).encode()
        return digest(layers[-1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: Registry

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, sends: bool) -> None:
        path = self.path.removeprefix("/v2/")
        name, _, rest = path.partition("/manifests/")
        if rest:
            return self._manifest(name, rest, sends)
        name, _, blob = path.partition("/blobs/")
        if blob in self.registry.blobs:
            return self._blob(blob, sends)
        return self._send(200 if not path else 404, b"{}", "application/json", sends)

    def _manifest(self, name: str, reference: str, sends: bool) -> None:
        known = next(
            (m for n, m in self.registry.manifests.items() if n == name and reference in ("latest", digest(m))), None
        )
        if known is None:
            return self._error(404, "MANIFEST_UNKNOWN", "manifest unknown", sends)
        is_pull = sends and not reference.startswith("sha256:")
        limit = self.registry.most
        if limit is not None and sends and self.registry.pulls >= limit:
            return self._error(429, "TOOMANYREQUESTS", "You have reached your pull rate limit.", sends)
        self.registry.pulls += is_pull
        headers = {"Docker-Content-Digest": digest(known)}
        if limit is not None and self.registry.tells:
            headers["ratelimit-remaining"] = f"{limit - self.registry.pulls};w=21600"
        return self._send(200, known, MANIFEST, sends, headers)

    def _blob(self, blob: str, sends: bool) -> None:
        data = self.registry.blobs[blob]
        if sends:
            self.registry.asked[blob] += 1
        if sends and blob in self.registry.cut:
            self.registry.cut.discard(blob)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        return self._send(200, data, "application/octet-stream", sends)

    def _error(self, code: int, name: str, text: str, sends: bool) -> None:
        self._send(code, json.dumps({"errors": [{"code": name, "message": text}]}).encode(), "application/json", sends)

    def _send(self, code: int, data: bytes, kind: str, sends: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if sends:
            self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Registry]:
    """A registry at an address of this machine's own, which an engine takes without encryption."""
    registry = Registry()
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    registry.address = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
