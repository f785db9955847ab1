"""A policy from disk, ready to speak: engine, chat and tokenizer opened together, and what names them in a manifest.

Nothing heavy is imported before something is opened: torch and transformers load inside the functions.

Example:
    policy = open_policy("runs/quickstart/policy", slots=16)
    generation = await policy.engine.generate(policy.chat.prompt([Message.user("2+2?")]), Sampling(max_tokens=32))
    await policy.engine.close()
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sao_gym.errors import ModelError
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Chat, Engine

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPolicy:
    """An engine that serves a policy, and the chat that writes its prompts. Close the engine when done."""

    engine: Engine
    chat: Chat
    tokenizer: Any
    path: Path | None = None


def open_policy(
    path: str | Path,
    *,
    chat_kind: str = "auto",
    describe_tools: bool | None = None,
    dtype: Dtype = "float32",
    device: str | None = None,
    slots: int = 16,
    context_length: int | None = None,
    deterministic: bool = False,
    threads: int | None = None,
) -> OpenPolicy:
    """Load a checkpoint folder and serve it by the embedded engine; `device` None is a GPU where there is one.

    Raises ModelError for what cannot be loaded or served, ConfigError for settings out of range.
    """
    from sao_gym.models import load_policy  # torch comes with these

    if not Path(path).exists():
        raise ModelError(f"there is no model folder at {path}; give a local folder that holds a checkpoint")
    import torch

    from sao_gym.chat import make_chat
    from sao_gym.engines.local import LocalEngine

    loaded = load_policy(path, dtype=getattr(torch, dtype))
    chat = make_chat(loaded.tokenizer, chat_kind, describe_tools=describe_tools)  # type: ignore[arg-type]
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    engine = LocalEngine(
        loaded.model.eval(),
        context_length=context_length,
        max_slots=slots,
        deterministic=deterministic,
        device=place,
        threads=threads,
    )
    return OpenPolicy(engine=engine, chat=chat, tokenizer=loaded.tokenizer, path=loaded.path)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a checkpoint folder alone. Raises ModelError."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"there is no model folder at {folder}; give a local folder that holds a tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever the readers of many formats raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the tokenizer in {folder} cannot be read ({reason}); copy the checkpoint again") from error


def byte_tokenizer() -> Any:
    """A tokenizer of bytes and our control tokens: reads and writes every text, and needs no file."""
    from sao_gym.tokenizer import SPECIALS, train_tokenizer

    return train_tokenizer([], vocab_size=256 + len(SPECIALS))


def chat_fingerprint(chat: Chat) -> str:
    """Hash of the ids of fixed conversations: policies that are written to in different ways differ in it."""
    call = ToolCall(id="call_0", name="f", arguments={"x": "1"})
    said = [Message.user("one"), Message.assistant("two", tool_calls=(call,)), Message.tool("three", call=call)]
    digest = hashlib.sha256(type(chat).__name__.encode())
    for messages in (said[:1], said):
        try:
            digest.update(b"\x00" + chat.prompt(messages).tobytes())
        except ModelError:  # a template that knows no tools refuses the second one
            digest.update(b"\x00refused")
    return digest.hexdigest()[:32]
