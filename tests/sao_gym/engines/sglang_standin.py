"""A server that speaks SGLang's protocol around a small transformers model, with faults to be asked for.

What it answers has the form of what the real server answered to the same session: test_sglang_session.py compares both
with one recording. It samples by computing each sequence anew, so that every token is exactly of its version.
"""

import asyncio
import base64
import hashlib
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file
from torch import Tensor

from sao_gym.engines.sampling import Draws

Handler = Callable[[dict[str, Any]], Any]


class StandIn:
    """Serves on a free port. `form` is how its streams are cut; the other attributes are faults."""

    def __init__(self, model: Any, *, form: str = "new", context_length: int = 256, eos: tuple[int, ...] = ()) -> None:
        self.model = model
        self.form = form
        self.context_length = context_length
        self.eos = set(eos)
        self.version = "default"
        self.answers: dict[str, list[tuple[int, dict[str, Any]]]] = {}
        """Answers to be given to the next calls of a path, in place of its own."""
        self.drop_after: list[int] = []
        """The next streams lose their connection after so many chunks."""
        self.corrupts: str | None = None
        """A parameter that goes wrong at the next update."""
        self.hold = asyncio.Event()
        self.hold.set()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.peak = 0
        self.url = ""
        self._running = asyncio.Event()
        self._running.set()
        self._aborted: set[str] = set()
        self._active: dict[str, list[tuple[str, int]]] = {}
        self._retracted = False
        self._session = False
        self._runner: web.AppRunner | None = None

    # -- life

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("GET", "/server_info", self._server_info)
        app.router.add_route("GET", "/ready", self._ready)
        app.router.add_route("POST", "/generate", self._generate)
        for path in [
            "pause_generation",
            "continue_generation",
            "abort_request",
            "flush_cache",
            "weights_checker",
            "begin_weight_update",
            "end_weight_update",
            "update_weights_from_disk",
            "update_weights_from_tensor",
        ]:
            app.router.add_route("POST", f"/{path}", self._control(path))
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """As kill -9 looks from outside: every connection breaks, and no new one is taken."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for connection in list(runner.server.connections if runner.server else ()):
                if connection.transport is not None:
                    connection.transport.abort()
            self._running.set()
            await runner.cleanup()

    # -- what it says of itself

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "max_req_input_len": self.context_length + 1,
                "incremental_streaming_output": self.form == "new",
                "tp_size": 1,
                "dp_size": 1,
                "pp_size": 1,
                "device": "cpu",
                "dtype": "float32",
                "quantization": None,
                "preferred_sampling_params": None,
                "enable_return_routed_experts": False,
                "max_total_num_tokens": 20000,
            }
        )

    async def _ready(self, request: web.Request) -> web.Response:
        self.calls.append(("ready", {}))
        return web.Response(status=200)

    # -- control

    def _control(self, path: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.json()
            self.calls.append((path, body))
            if self.answers.get(path):
                status, answer = self.answers[path].pop(0)
                return web.json_response(answer, status=status)
            status, answer = getattr(self, f"_{path}")(body)
            return web.json_response(answer, status=status) if answer is not None else web.Response(status=status)

        return handle

    def _pause_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._running.clear()
        self._retracted = body["mode"] != "in_place"
        if body["mode"] == "abort":
            self._aborted |= self._active.keys()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def _continue_generation(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._running.set()
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def _abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        self._aborted |= {rid for rid in self._active if rid.startswith(body["rid"])}
        return 200, None

    def _flush_cache(self, body: dict[str, Any]) -> tuple[int, Any]:
        is_idle = not self._active or self._retracted
        return (200, None) if is_idle else (400, None)

    def _weights_checker(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"success": True, "message": "Success.", "ranks": [{"checksums": fused_checksums(self.model)}]}

    def _begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self._session:
            return 400, {"success": False, "message": "a weight-update session is already open; call end_weight_update"}
        self._session = True
        return 200, {"success": True, "message": "Success"}

    def _end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self._session:
            return 400, {"success": False, "message": "no weight-update session is open"}
        self._session = False
        return 200, {"success": True, "message": "Success"}

    def _update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return 400, {"success": False, "message": f"Cannot find any model weights with `{body['model_path']}`"}
        for file in files:
            self._load(load_file(file))
        return self._updated(body)

    def _update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, Any]:
        if not self._session:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        named = pickle.load(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0])))
        self._load(dict(named))
        return self._updated(body)

    @torch.no_grad()
    def _load(self, tensors: dict[str, Tensor]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        if self.corrupts in tensors:
            own[self.corrupts].add_(1e-3)
            self.corrupts = None

    def _updated(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("weight_version") is not None and body["weight_version"] != self.version:
            for events in self._active.values():
                events.append((self.version, -1))
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    # -- sampling

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(("generate", body))
        self.peak = max(self.peak, len(self._active) + 1)
        sampling = body["sampling_params"]
        if len(body["input_ids"]) + sampling["max_new_tokens"] > self.context_length + 7:
            return web.json_response({"error": {"message": "exceeds the model's maximum context length"}}, status=400)
        if body.get("logprob_start_len") == 0:
            await self._running.wait()
            return web.json_response(self._scored(body))
        if not body["stream"]:
            whole = [chunk async for chunk in self._sampled(body, every=1 << 30)]
            return web.json_response(whole[-1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        drop = self.drop_after.pop(0) if self.drop_after else None
        sent = 0
        async for chunk in self._sampled(body, every=sampling.get("stream_interval") or 1):
            if sent == drop:
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            sent += 1
        await response.write(b"data: [DONE]\n\n")
        return response

    def _scored(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"]
        with torch.no_grad():
            rows = torch.log_softmax(self.model(torch.tensor([ids])).logits[0].float(), -1)
        scored = [[None, ids[0], None], *([rows[i, t].item(), t, None] for i, t in enumerate(ids[1:]))]
        meta = self._meta(body["rid"], [], [], {"type": "length", "length": 0}, [])
        return {"output_ids": [], "meta_info": {**meta, "input_token_logprobs": scored}}

    async def _sampled(self, body: dict[str, Any], *, every: int) -> Any:
        """Chunks, the last one with its reason."""
        rid, sampling = body["rid"], body["sampling_params"]
        stops = set() if sampling["ignore_eos"] else set(sampling["stop_token_ids"]) | self.eos
        draws = Draws(sampling["sampling_seed"])
        ids: list[int] = []
        scored: list[Any] = []
        labels: list[str] = []
        self._active[rid] = []
        sent = 0
        try:
            while True:
                await asyncio.sleep(0)
                if rid in self._aborted:
                    self._aborted.discard(rid)
                    yield self._chunk(rid, ids, scored, labels, {"type": "abort", "message": "Aborted"}, sent)
                    return
                if not self.hold.is_set():
                    await self.hold.wait()
                    continue
                if not self._running.is_set():
                    await asyncio.sleep(0.002)
                    continue
                token, logprob = self._next(body["input_ids"] + ids, sampling, draws[len(ids)])
                ids.append(token)
                scored.append([logprob, token, None])
                labels.append(self.version)
                reason = None
                if token in stops:
                    reason = {"type": "stop", "matched": token}
                elif len(ids) >= sampling["max_new_tokens"]:
                    reason = {"type": "length", "length": len(ids)}
                if reason or len(ids) % every == 0:
                    yield self._chunk(rid, ids, scored, labels, reason, sent)
                    sent = len(ids)
                if reason:
                    return
        finally:
            self._active.pop(rid, None)

    @torch.no_grad()
    def _next(self, ids: list[int], sampling: dict[str, Any], draw: float) -> tuple[int, float]:
        logits = self.model(torch.tensor([ids])).logits[0, -1].float() / (sampling["temperature"] or 1.0)
        logprobs = torch.log_softmax(logits, -1)
        if sampling["top_k"] == 1:
            token = int(logprobs.argmax())
        else:
            token = int(torch.searchsorted(logprobs.double().exp().cumsum(-1), draw).clamp(max=len(logits) - 1))
        return token, logprobs[token].item()

    def _chunk(
        self, rid: str, ids: list[int], scored: list[Any], labels: list[str], reason: Any, sent: int
    ) -> dict[str, Any]:
        first_id = 0 if self.form in ("all", "ids all") else sent
        first_logprob = 0 if self.form in ("all", "log-probs all") else sent
        if self.form == "all":
            first_id = first_logprob = 0
        meta = self._meta(rid, ids, scored[first_logprob:], reason, labels)
        return {"output_ids": ids[first_id:], "meta_info": meta}

    def _meta(self, rid: str, ids: list[int], scored: list[Any], reason: Any, labels: list[str]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": reason,
            "weight_version": self.version,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "output_token_logprobs": scored,
        }
        if reason is not None:
            meta["weight_versions"] = spans(labels)
        return meta


def spans(labels: list[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for index, label in enumerate(labels):
        if made and made[-1]["version"] == label:
            made[-1]["end"] = index + 1
        else:
            made.append({"version": label, "start": index, "end": index + 1})
    return made


def fused_checksums(model: Any) -> dict[str, str]:
    """Checksums of a Qwen3's parameters as a server fuses them, written out apart from the engine's own rules."""
    own = {name: tensor.detach() for name, tensor in model.named_parameters()}
    made: dict[str, str] = {}
    for name in own:
        parts = [name]
        if ".q_proj." in name:
            parts = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
        elif ".gate_proj." in name:
            parts = [name, name.replace("gate_proj", "up_proj")]
        elif any(word in name for word in (".k_proj.", ".v_proj.", ".up_proj.")):
            continue
        whole = torch.cat([own[part] for part in parts])
        if "embed_tokens" in name or "lm_head" in name:
            whole = torch.cat([whole, torch.zeros(-len(whole) % 64, whole.shape[1])])
        fused = name.replace(".q_proj.", ".qkv_proj.").replace(".gate_proj.", ".gate_up_proj.")
        made[fused] = hashlib.sha256(whole.contiguous().numpy().tobytes()).hexdigest()[:16]
    return made
