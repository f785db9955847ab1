"""Verdicts on disk, so that no text is paid for twice: one JSON line each, by a hash of judge, prompt and all that it was asked.

Invariant: a line is written whole or not at all, and a line that a crash tore is passed over, so the file may be
shared by runs one after the other.

Example:
    cache = VerdictCache(Path("verdicts.jsonl"))
    cache.put(key := cache_key("openai:glm-4.7:style-1", "Write a poem.", "Rain.", ("cute",)), verdict)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sao_gym.errors import TaskFileError
from sao_gym.jsonl import append_jsonl
from sao_gym.protocols import Verdict


def cache_key(version: str, request: str, text: str, labels: Sequence[str]) -> str:
    """Hash of a judge's version and of all that it is asked, hexadecimal."""
    said = json.dumps([version, request, text, list(labels)])
    return hashlib.sha256(said.encode()).hexdigest()


class VerdictCache:
    """Verdicts by key; without a path they are kept in memory alone. `skipped` counts lines that could not be read."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Verdict] = {}
        self.skipped = 0
        if path is not None:
            self._load(path)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Verdict | None:
        """The verdict, None where there is none."""
        return self._known.get(key)

    def put(self, key: str, verdict: Verdict) -> None:
        """Keep a verdict."""
        self._known[key] = verdict
        if self._path is not None:
            append_jsonl(self._path, {"key": key, **asdict(verdict)})

    def _load(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise TaskFileError(
                f"the judge's cache {path} cannot be read: {error.strerror}; name another file"
            ) from error
        for line in data.split(b"\n"):
            if line.strip():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record: dict[str, Any] = json.loads(line)
            key, problems = record.pop("key"), tuple(record.pop("problems"))
            verdict = Verdict(problems=problems, **record)
        except (ValueError, TypeError, KeyError, AttributeError):
            self.skipped += 1
            return
        if isinstance(key, str) and isinstance(verdict.quality, bool) and isinstance(verdict.label, str):
            self._known[key] = verdict
        else:
            self.skipped += 1
