"""OpenAIJudge: any model behind an OpenAI-compatible API as a judge, with our own prompt.

Invariants: a text that could not be judged is a GradingError with a kind to count, and never a bad verdict; what a text
says cannot pass for the judge's words (see `fence`); a text is asked about once, whoever asks, and the verdict kept;
requests and money have limits that end the run with one sentence.

Example:
    judge = OpenAIJudge(JudgeOptions(model="glm-4.7", base="http://localhost:8000/v1", cache="verdicts.jsonl"))
    verdict = await judge.judge("Write a poem about rain.", "Lo, the rain doth fall.", ("cute", "classical"))
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sao_gym.clock import SystemClock
from sao_gym.envs.judges.cache import VerdictCache, cache_key
from sao_gym.envs.judges.fence import (
    Answered,
    Fence,
    MalformedAnswerError,
    ask,
    read_answer,
    read_prompt,
    shortened,
)
from sao_gym.envs.judges.make import JudgeOptions
from sao_gym.errors import ConfigError, EngineError, GradingError, UserError
from sao_gym.openai_format import message_to_openai
from sao_gym.protocols import Clock, Verdict
from sao_gym.remote_answer import Answer, Finish
from sao_gym.remote_client import OpenAIClient
from sao_gym.remote_policy import RemotePolicy
from sao_gym.retries import RetryRule
from sao_gym.usage import Meter
from sao_gym.writing_styles import PLAIN


class JudgeBudgetError(UserError):
    """The requests or the money that a judge may take are spent."""


class OpenAIJudge:
    """Implements `sao_gym.protocols.Judge`. Its coroutines run on one event loop."""

    def __init__(self, options: JudgeOptions, *, clock: Clock | None = None) -> None:
        if options.model is None or options.base is None:
            raise ConfigError("a judge behind an API needs a model and an address: --judge-model NAME --judge-base URL")
        self.options = options
        self._prompt = read_prompt(options.prompt)
        self._cache = VerdictCache(Path(options.cache) if options.cache else None)
        policy = RemotePolicy(
            api_base=options.base,
            model=options.model,
            key_env=options.key_env,
            timeout_s=options.timeout_s,
            retries=RetryRule(
                max_retries=options.retries,
                first_wait_s=options.first_wait_s,
                max_wait_s=max(60.0, options.first_wait_s),
                budget=1_000_000,
            ),
            extra_body=options.extra_body,
        )
        self._client = OpenAIClient(policy, clock=clock or SystemClock())
        self.meter = Meter(options.prices)
        self._places = asyncio.Semaphore(options.concurrency)
        self._asking: dict[str, asyncio.Future[Verdict]] = {}
        self.flips = self.cache_hits = self.failures = 0

    def counters(self) -> Mapping[str, float]:
        """What was asked and paid so far: requests, retries, tokens, cost; verdicts kept, turned by the order, and failed."""
        usage = self.meter.usage
        return {
            "requests": usage.requests,
            "retries": usage.retries,
            "tokens_in": usage.prompt_tokens,
            "tokens_out": usage.completion_tokens,
            "cost": usage.cost,
            "cache_hits": self.cache_hits,
            "flips": self.flips,
            "failures": self.failures,
        }

    @property
    def version(self) -> str:
        """Model, prompt file with its hash, and how it is asked."""
        digest = hashlib.sha256(self._prompt.encode()).hexdigest()[:8]
        options = self.options
        return f"openai:{options.model}:{options.prompt}-{digest}:T{options.temperature}:x{options.orders}"

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        """Raises GradingError (judge_malformed, judge_refused, judge_truncated, judge_...), ApiError, JudgeBudgetError."""
        key = cache_key(self.version, request, text, labels)
        known = self._cache.get(key)
        if known is not None:
            self.cache_hits += 1
            return known
        if (asking := self._asking.get(key)) is None:
            asking = self._asking[key] = asyncio.ensure_future(self._settle(key, request, text, labels))
            asking.add_done_callback(lambda done: self._settled(key, done))
        return await asyncio.shield(asking)  # one who asks may be cancelled, while another waits for the same

    async def close(self) -> None:
        """End what is being asked, and close all connections; idempotent."""
        for asking in list(self._asking.values()):
            asking.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self._client.close()

    def _settled(self, key: str, done: asyncio.Future[Verdict]) -> None:
        self._asking.pop(key, None)
        if not done.cancelled():
            self.failures += done.exception() is not None  # heard, also where all who asked are gone

    async def _settle(self, key: str, request: str, text: str, labels: Sequence[str]) -> Verdict:
        orders = [_turned(labels, turn) for turn in range(self.options.orders)]
        answers = await asyncio.gather(*(self._ask_in_turn(request, text, order) for order in orders))
        verdict = self._merged(answers)
        self._cache.put(key, verdict)
        return verdict

    def _merged(self, answers: Sequence[Answered]) -> Verdict:
        """The majority, of quality and of style each; without one the style is none."""
        style, votes = Counter(answer.style for answer in answers).most_common(1)[0]
        quality = 2 * sum(answer.quality for answer in answers) > len(answers)
        is_split = len({(answer.style, answer.quality) for answer in answers}) > 1
        self.flips += is_split
        problems = sorted({name for answer in answers for name in answer.problems}) if not quality else []
        return Verdict(
            quality=quality,
            label=style if 2 * votes > len(answers) else PLAIN,
            judge=self.version,
            problems=tuple(problems),
            detail="the orders disagree" if is_split else "",
        )

    async def _ask_in_turn(self, request: str, text: str, labels: Sequence[str]) -> Answered:
        async with self._places:
            return await self._asked(request, shortened(text, self.options.text_chars), labels)

    async def _asked(self, request: str, text: str, labels: Sequence[str]) -> Answered:
        """One verdict; an answer that says none is asked for again, under a new mark."""
        problem, kind = "", "judge_malformed"
        for turn in range(self.options.tries):
            fence = Fence()
            answer = await self._complete(ask(self._prompt, fence, request, text, labels), turn)
            if answer.finish is Finish.LENGTH:
                problem, kind = f"the answer was cut at {self.options.max_tokens} tokens", "judge_truncated"
                continue
            try:
                return read_answer(answer.message.content, fence, labels)
            except MalformedAnswerError as error:
                is_refusal = bool(answer.echo.get("refusal")) or "{" not in answer.message.content
                problem, kind = str(error), "judge_refused" if is_refusal else "judge_malformed"
        raise GradingError(f"the judge gave no verdict in {self.options.tries} tries: {problem}", kind)

    async def _complete(self, messages: Sequence[object], turn: int) -> Answer:
        self._require_budget()
        options = self.options
        body: dict[str, object] = {
            "model": options.model,
            "messages": [message_to_openai(message) for message in messages],  # type: ignore[arg-type]
            "max_tokens": options.max_tokens,
            **({} if options.temperature is None else {"temperature": options.temperature}),
            **options.extra_body,
        }
        try:
            return await self._client.complete(body, turn=turn, meter=self.meter)
        except EngineError as error:
            raise GradingError(f"the judge failed: {error}", f"judge_{error.kind}") from error

    def _require_budget(self) -> None:
        usage, options = self.meter.usage, self.options
        if options.max_requests is not None and usage.requests >= options.max_requests:
            raise JudgeBudgetError(
                f"the judge has had its {options.max_requests} requests; raise judge_options.max_requests and go on with --resume"
            )
        if options.max_cost is not None and usage.cost >= options.max_cost:
            raise JudgeBudgetError(
                f"the judge has cost {usage.cost:.2f} of {options.max_cost:.2f}; raise judge_options.max_cost and go on with --resume"
            )


def _turned(labels: Sequence[str], turn: int) -> tuple[str, ...]:
    """The labels from the turn-th on, every second time backwards: each turn begins with another one."""
    first = turn % max(len(labels), 1)
    if turn % 2 == 0:
        return (*labels[first:], *labels[:first])
    return (*labels[first::-1], *labels[:first:-1])
