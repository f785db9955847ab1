"""An application at the desk: places, episodes without one, feedback in time, late, twice and never; failures and the end."""

import asyncio
from typing import Any

import pytest
from desk_world import DEADLINE_S, KEY, World

from sao_gym.budgets import Budgets
from sao_gym.feedback import ServedState
from sao_gym.feedback.desk import DRAIN_S, NO_PLACE, TAKEN_BACK
from sao_gym.feedback.reconcile import STOPPED


async def test_feedback_becomes_the_score_of_the_row_that_waited_longest() -> None:
    world = World()
    first, second = world.place(1), world.place(2)
    await asyncio.sleep(0)
    name = await world.begin()
    assert world.heard == ["r1 version 0", "r1 version 0", "r1 answered"]
    said = await world.say(name, 0.75, comment="rather good")
    assert said.json() == {"episode": name, "score": 0.75, "for_training": True, "why": None}
    made = await first
    assert made.uid == "r1"
    assert made.score is not None
    assert (made.score.value, made.score.passed) == (0.75, True)
    assert made.info["feedback"] == {"episode": name}
    assert made.n_action > 0
    line = world.book.find(name)
    assert line is not None
    assert (line.row, line.state, line.score, line.comment) == (1, ServedState.SCORED, 0.75, "rather good")
    assert line.is_for_training
    assert world.book.trajectory(name) is None  # the ledger has it
    assert not second.done()
    second.cancel()


async def test_a_conversation_goes_on_under_its_name_and_is_one_stream() -> None:
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    first = await world.ask()
    name = first.headers["x-sao-episode"]
    spoken = [first.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = await world.ask(name, messages=[{"role": "user", "content": "hello?"}, *spoken])
    assert second.headers["x-sao-episode"] == name
    await world.say(name)
    made = await row
    assert (len(made.streams), made.n_turns) == (1, 2)
    assert len(world.book.episodes()) == 1


async def test_an_application_is_answered_where_no_place_is_free() -> None:
    world = World()
    name = await world.begin()
    said = (await world.say(name, 1.0, comment="x")).json()
    assert (said["for_training"], said["why"]) == (False, NO_PLACE)
    kept = world.book.trajectory(name)
    assert kept is not None
    assert kept.score is not None
    assert kept.score.value == 1.0
    assert world.desk.counters()["not_admitted"] == 1
    assert world.desk.counters()["scored"] == 1


@pytest.mark.parametrize("keep", ["all", "trained", "until_trained"])
async def test_what_is_kept_is_a_setting(keep: Any) -> None:
    world = World(keep=keep)
    name = await world.begin()
    await world.say(name, 1.0, comment="x")
    line = world.book.find(name)
    assert line is not None
    assert line.score == 1.0
    assert (line.comment, world.book.trajectory(name) is not None) == (("x", True) if keep == "all" else (None, False))


async def test_no_feedback_by_the_deadline() -> None:
    world = World()
    row, guest_asks = world.place(1), world.begin
    await asyncio.sleep(0)
    name, guest = await world.begin(), await guest_asks()
    await world.clock.run(lambda: row.done() and not world.desk.counters()["open"])
    assert world.clock.now() == pytest.approx(DEADLINE_S)
    assert row.result().outcome.reason == "no_feedback"
    for each in (name, guest):
        line = world.book.find(each)
        assert line is not None
        assert (line.state, line.score) == (ServedState.EXPIRED, None)
        late = (await world.say(each, 0.5)).json()
        assert not late["for_training"]
        assert "no feedback came within 600 s" in late["why"]
        assert world.book.find(each).score == 0.5  # type: ignore[union-attr]
        assert (await world.say(each, 0.5)).status_code == 200
        assert (await world.say(each, 0.6)).status_code == 409
    assert world.desk.counters()["late"] == 2


async def test_the_deadline_runs_from_the_last_answer_and_not_while_one_is_made() -> None:
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    name = await world.begin()
    later = asyncio.ensure_future(world.clock.sleep(DEADLINE_S - 1))
    await world.clock.run(later.done)
    world.hold = asyncio.Event()
    again = asyncio.ensure_future(world.ask(name))
    later = asyncio.ensure_future(world.clock.sleep(DEADLINE_S))
    await world.clock.run(later.done)
    assert not row.done()
    world.hold.set()
    assert (await again).status_code == 200
    later = asyncio.ensure_future(world.clock.sleep(DEADLINE_S - 1))
    await world.clock.run(later.done)
    assert (await world.say(name)).json()["for_training"]


@pytest.mark.parametrize("has_place", [True, False])
async def test_feedback_that_comes_while_its_episode_is_closed_counts(has_place: bool) -> None:
    world = World()
    row = world.place(1) if has_place else None
    await asyncio.sleep(0)
    name = await world.begin()
    posts: list[asyncio.Task[Any]] = []
    end_session = world.engine.end_session

    async def end(session: str) -> None:
        posts.append(asyncio.ensure_future(world.say(name, 0.25)))
        for _ in range(50):
            await asyncio.sleep(0)
        await end_session(session)

    world.engine.end_session = end  # type: ignore[method-assign]
    await world.clock.run(lambda: bool(posts))
    assert world.clock.now() == pytest.approx(DEADLINE_S)
    assert (await posts[0]).json()["for_training"] == has_place
    made = await row if row else world.book.trajectory(name)
    assert made is not None
    assert made.score is not None
    assert made.score.value == 0.25
    line = world.book.find(name)
    assert line is not None
    assert (line.state, line.score) == (ServedState.SCORED, 0.25)


async def test_a_place_waits_for_ever_without_a_request() -> None:
    world = World()
    row = world.place(1)
    long = asyncio.ensure_future(world.clock.sleep(1e6))
    await world.clock.run(long.done)
    assert not row.done()
    assert world.heard == []
    assert (await world.say(await world.begin())).json()["for_training"]


@pytest.mark.parametrize("body", [{"messages": "no"}, {"messages": []}, {"temperature": "hot"}, {"max_tokens": 0}])
async def test_a_request_that_is_refused_takes_no_place(body: dict[str, Any]) -> None:
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    for _ in range(3):
        refused = await world.ask(**body)
        assert refused.status_code == 400
        assert "x-sao-episode" not in refused.headers
        await world.soon(lambda: world.desk.counters()["places_free"] == 1)
    assert world.book.episodes() == []
    await world.say(await world.begin())
    assert (await row).n_turns == 1
    assert world.desk.counters()["open"] == 0


async def test_a_refused_request_without_a_place_leaves_nothing() -> None:
    world = World()
    assert (await world.ask(messages="no")).status_code == 400
    await world.soon(lambda: world.book.episodes() == [] and not world.desk.counters()["open"])


async def test_an_engine_that_fails_is_a_failure_of_the_row_and_no_score() -> None:
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    world.fails = True
    assert (await world.ask()).status_code == 401  # what clients do not send again for minutes
    made = await row
    assert made.outcome.is_error
    assert made.score is None
    (line,) = world.book.episodes()
    assert (line.state, line.is_for_training) == (ServedState.FAILED, False)


async def test_a_budget_ends_the_conversation_and_feedback_counts() -> None:
    world = World(budgets=Budgets(max_turns=1))
    row = world.place(1)
    await asyncio.sleep(0)
    name = await world.begin()
    assert (await world.ask(name)).status_code == 401
    assert (await world.say(name, 0.0)).json()["for_training"]
    made = await row
    assert made.outcome.is_truncated
    assert made.score is not None
    assert made.score.value == 0.0


async def test_feedback_is_answered_once_the_ledger_has_it_and_not_before() -> None:
    world = World(settles=False)
    row = world.place(7)
    await asyncio.sleep(0)
    name = await world.begin()
    posts = [asyncio.ensure_future(world.say(name, 1.0)) for _ in range(2)]  # the second is a client's own retry
    await row
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(post.done() for post in posts)
    assert (await world.say(name, 0.0)).status_code == 409
    assert (await world.ask(name)).status_code == 401
    world.desk.settle("r7", is_for_training=True, why=None)
    assert [post.json()["for_training"] for post in await asyncio.gather(*posts)] == [True, True]
    assert (await world.say(name, 1.0)).json()["for_training"]
    assert (await world.say(name, 0.0)).status_code == 409


async def test_a_row_that_was_not_trained_after_all_says_why() -> None:
    world = World(settles=False)
    row = world.place(7)
    await asyncio.sleep(0)
    name = await world.begin()
    post = asyncio.ensure_future(world.say(name, 1.0))
    await row
    world.desk.settle("r7", is_for_training=False, why="truncated_turns")
    assert (await post).json() == {"episode": name, "score": 1.0, "for_training": False, "why": "truncated_turns"}
    assert world.book.trajectory(name) is not None


async def test_a_row_that_is_taken_back_goes_on_without_its_place() -> None:
    world = World()
    row, free = world.place(1), world.place(2)
    await asyncio.sleep(0)
    name = await world.begin()
    row.cancel()
    free.cancel()
    await asyncio.gather(row, free, return_exceptions=True)
    assert world.desk.counters()["places_free"] == 0
    world.desk.settle("r1", is_for_training=False, why="stale")  # as the runtime says of every row
    said = (await world.say(name, 1.0)).json()
    assert (said["for_training"], said["why"]) == (False, TAKEN_BACK)
    assert world.book.trajectory(name) is not None


async def test_a_row_that_is_taken_back_hears_no_more() -> None:
    """It may be running again by then, for somebody else."""
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    world.hold = asyncio.Event()
    asked = asyncio.ensure_future(world.ask())
    await world.soon(lambda: bool(world.heard))
    heard = list(world.heard)
    row.cancel()
    await asyncio.gather(row, return_exceptions=True)
    world.hold.set()
    assert (await asked).status_code == 200
    assert world.heard == heard == ["r1 version 0"]


async def test_no_feedback_while_an_answer_is_made() -> None:
    world = World()
    world.hold = asyncio.Event()
    asked = asyncio.ensure_future(world.ask())
    await world.soon(lambda: world.desk.counters()["open"] == 1)
    (line,) = world.book.episodes()
    refused = await world.say(line.id)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "feedback_conflict")
    world.hold.set()
    await asked
    assert (await world.say(line.id)).status_code == 200


async def test_a_request_that_is_sent_again_begins_no_second_episode() -> None:
    world = World()
    first, again = [await world.ask(headers={"idempotency-key": "k"}) for _ in range(2)]
    assert again.headers["x-sao-episode"] == first.headers["x-sao-episode"]
    assert again.json()["choices"] == first.json()["choices"]
    for headers in ({}, {"idempotency-key": "l"}, {"x-stainless-retry-count": "1"}):  # the same words: another user's
        assert (await world.ask(headers=headers)).headers["x-sao-episode"] != first.headers["x-sao-episode"]
    await world.say(first.headers["x-sao-episode"])
    assert (await world.ask(headers={"idempotency-key": "k"})).headers["x-sao-episode"] != first.headers[
        "x-sao-episode"
    ]


async def test_names_that_do_not_exist_or_are_over() -> None:
    world = World()
    assert (await world.ask("nobody")).status_code == 404
    assert (await world.say("nobody")).status_code == 404
    name = await world.begin()
    await world.say(name)
    over = await world.ask(name)
    assert (over.status_code, over.json()["error"]["code"]) == (401, "episode_over")
    world.book.delete(name)
    assert (await world.say(name)).status_code == 410


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"episode": "a"}, "score"),
        ({"episode": "a", "score": "1"}, "score"),
        ({"episode": "a", "score": True}, "score"),
        ({"episode": "a", "score": 1.01}, "score"),
        ({"episode": "a", "score": -0.1}, "score"),
        ({"score": 1}, "episode"),
        ({"episode": 7, "score": 1}, "episode"),
        ({"episode": "a", "score": 1, "comment": ["x"]}, "comment"),
        ({"episode": "a", "score": 1, "stars": 5}, "stars"),
        ([1], None),
    ],
)
async def test_feedback_that_is_none_is_refused(body: Any, param: str | None) -> None:
    refused = await World().post("/feedback", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_a_score_that_is_no_number_of_json_is_refused() -> None:
    world = World()
    for text in (b'{"episode": "a", "score": NaN}', b'{"episode": "a", "score": 1e999}', b"x", b"[" * 100_000):
        refused = await world.http.post("/feedback", content=text, headers={"authorization": f"Bearer {KEY}"})
        assert refused.status_code in (400, 413), text[:40]


@pytest.mark.parametrize("path", ["/chat/completions", "/feedback", "/messages"])
@pytest.mark.parametrize("key", ["", "Bearer other", f"Bearer {KEY}x", KEY])
async def test_another_key_gets_nothing(path: str, key: str) -> None:
    world = World()
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    refused = await world.http.post(path, json=body, headers={"authorization": key})
    assert refused.status_code == 401
    assert world.book.episodes() == []
    assert (await world.http.get("/models", headers={"authorization": key})).status_code == 401


@pytest.mark.parametrize("answers_come", [True, False])
async def test_the_end_finishes_answers_and_writes_what_is_lost(answers_come: bool) -> None:
    world = World()
    row = world.place(1)
    await asyncio.sleep(0)
    open_one = await world.begin()
    guest = await world.begin()
    row.cancel()  # as a runtime that stops does
    await asyncio.gather(row, return_exceptions=True)
    world.hold = asyncio.Event()
    asked, stuck = asyncio.ensure_future(world.ask(guest)), asyncio.ensure_future(world.ask())
    await world.soon(lambda: world.desk.counters()["open"] == 3)
    closing = asyncio.ensure_future(world.desk.close())
    if answers_come:
        await asyncio.sleep(0)
        world.hold.set()
    await world.clock.run(closing.done)
    assert {(await each).status_code for each in (asked, stuck)} == {200 if answers_come else 401}
    assert (world.clock.now() >= DRAIN_S) == (not answers_come)
    for name in (open_one, guest):
        line = world.book.find(name)
        assert line is not None
        assert (line.state, line.why) == (ServedState.LOST, STOPPED)
        assert world.book.trajectory(name) is not None
    assert (await world.ask()).status_code == 429  # a client comes again, and finds the next run
    await world.desk.close()


async def test_a_thousand_episodes_each_end_once() -> None:
    """Half of them find a place; a third each is scored, expires, is scored late. Nothing is left open."""
    world = World()
    rows = [world.place(number) for number in range(500)]
    await asyncio.sleep(0)
    names = [await world.begin() for _ in range(1000)]
    scored = names[::3]
    for name in scored:
        await world.say(name)
    await world.clock.run(lambda: not world.desk.counters()["open"])
    for name in names[1::3]:
        await world.say(name)
    await asyncio.gather(*rows)
    counts = world.book.counts()
    assert counts == {ServedState.SCORED: len(scored), ServedState.EXPIRED: 1000 - len(scored)}
    trained = [line for line in world.book.episodes() if line.is_for_training]
    assert {line.row for line in trained} == {n for n, made in world.ended.items() if made.score is not None}
    assert len(trained) == len([name for name in scored if names.index(name) < 500])
    assert world.desk.counters()["late"] == len(names[1::3])
