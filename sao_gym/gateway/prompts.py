"""Where a call goes in the tree and which ids it continues: kept ones, with only what is new rendered after them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sao_gym.errors import ConfigError, ModelError
from sao_gym.gateway.asked import Asked
from sao_gym.gateway.diagnosis import reason_of
from sao_gym.gateway.echo import EchoKind, Heard, Hearing
from sao_gym.gateway.history import all_in_call_order, in_call_order, read_messages, with_one_system
from sao_gym.gateway.reasons import Reason
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.sampled import TextChat
from sao_gym.gateway.tree import Match, Node, Tree
from sao_gym.messages import ToolCall
from sao_gym.stream import Ids

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`new_ids` come after the ids of `parent`; `echo` says how its answer was recognised, `text` is that of a raw prompt."""

    parent: Node | None
    heard: tuple[Heard, ...] = ()
    tools: bytes = b""
    new_ids: Ids
    reason: Reason
    echo: EchoKind | None = None
    text: str | None = None

    @property
    def all_ids(self) -> Ids:
        """The whole prompt."""
        return self.new_ids if self.parent is None else np.concatenate([self.parent.token_ids(), self.new_ids])


class Prompts:
    """Makes the prompts of one session. `minted` holds its calls by the ids that the client knows."""

    def __init__(self, chat: TextChat, tree: Tree, minted: Mapping[str, ToolCall]) -> None:
        self._chat, self._tree, self._minted = chat, tree, minted
        self._hearing = Hearing()

    def of(self, asked: Asked, *, is_first: bool) -> Prompt:
        """The prompt of a call. Raises Refusal for messages that cannot be read or written."""
        try:
            if asked.prompt is not None:
                return self._of_text(asked.prompt, is_first)
            return self._of_messages(asked, is_first)
        except (ConfigError, ModelError) as error:
            raise Refusal.malformed(str(error), "messages") from error

    def _of_messages(self, asked: Asked, is_first: bool) -> Prompt:
        heard, tools = self._hearing.messages(asked.records), self._hearing.tools(asked.tools)
        match = self._tree.match(heard, tools)
        reason = reason_of(self._tree, heard, tools, match, is_first=is_first)
        if match.node is not None:
            ids, new = self._bridge(asked, match, match.node), heard[match.start :]
            if ids is not None:
                return Prompt(parent=match.node, heard=new, tools=tools, new_ids=ids, reason=reason, echo=match.echo)
            reason = Reason.UNBRIDGEABLE
        return Prompt(parent=None, heard=heard, tools=tools, new_ids=self._whole(asked), reason=reason)

    def _bridge(self, asked: Asked, match: Match, node: Node) -> Ids | None:
        """Ids of the new messages after the matched node, None where the chat family cannot write them there."""
        if not len(node.generation.token_ids):
            return None
        said = asked.records[match.start - 1].get("tool_calls") or ()
        records = in_call_order(asked.records[match.start :], [str(call.get("id")) for call in said])
        messages = read_messages(records, self._minted)
        for form in (messages, with_one_system(messages)):
            try:
                return self._chat.bridge(form, last_id=int(node.generation.token_ids[-1]))
            except ModelError as error:
                _log.debug("no bridge: %s", error)
        return None

    def _whole(self, asked: Asked) -> Ids:
        """Ids of a whole conversation. Raises ConfigError, ModelError."""
        messages = read_messages(all_in_call_order(asked.records), self._minted)
        try:
            return self._chat.prompt(messages, asked.offered)
        except ModelError:
            plain = with_one_system(messages)
            if plain == messages:
                raise
            return self._chat.prompt(plain, asked.offered)

    def _of_text(self, said: str | tuple[int, ...], is_first: bool) -> Prompt:
        """A raw prompt goes on from the longest text (or row of ids) that it begins with."""
        if isinstance(said, str):
            node = self._tree.longest_text(said)
            rest = said[len(node.text or "") :] if node is not None else said
            new = np.asarray(self._chat.codec.encode(rest), dtype=np.int32)
        else:
            ids = self._checked(said)
            node = self._tree.longest_ids(ids)
            new = ids[node.n_tokens if node is not None else 0 :]
        text = said if isinstance(said, str) else None
        if node is not None:
            reason = Reason.FORKED if node.is_followed else Reason.CONTINUED
            return Prompt(parent=node, new_ids=new, reason=reason, echo=EchoKind.EXACT, text=text)
        if not len(new):
            raise Refusal.malformed("the prompt is empty", "prompt")
        return Prompt(parent=None, new_ids=new, reason=Reason.START if is_first else Reason.NEW_CONVERSATION, text=text)

    def _checked(self, ids: tuple[int, ...]) -> Ids:
        known = len(self._chat.codec.tokenizer)
        wrong = next((index for index in ids if not 0 <= index < known), None)
        if wrong is not None:
            raise Refusal.malformed(f"token id {wrong} is not among the {known} of this model", "prompt")
        return np.asarray(ids, dtype=np.int32)
