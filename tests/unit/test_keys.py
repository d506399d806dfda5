"""Keys that rest, that are shared out over sessions, and that change while the process runs."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from providers.errors import AuthRefused, ProviderError, QuotaExceeded, RateLimited
from providers.keys import ApiKey, FreshKey, file_key
from providers.retry import RetryPolicy
from providers.rotation import MAX_LIMITED_S, REFUSED_S, KeyRotation
from providers.types import Capabilities, Message, ProviderEvent, ProviderRequest, TextBlock, TextDelta

HELLO = (Message(role="user", blocks=(TextBlock(text="hi"),)),)


def least() -> float:
    return 0.0


class Named:
    """A provider that answers with its key, or refuses with `error`."""

    api = "named"

    def __init__(self, name: str, error: ProviderError | None = None) -> None:
        self.name = name
        self.error = error
        self.is_closed = False

    def capabilities(self, model: str) -> Capabilities:
        return Capabilities()

    async def stream(self, request: ProviderRequest) -> AsyncIterator[ProviderEvent]:
        assert not self.is_closed
        if self.error:
            raise self.error
        yield TextDelta(index=0, text=self.name)
        assert not self.is_closed

    async def aclose(self) -> None:
        self.is_closed = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def ask(provider: KeyRotation | FreshKey, session: str | None = None) -> str:
    request = ProviderRequest(model="m", messages=HELLO, cache_key=session)
    events = [event async for event in provider.stream(request)]
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def refusal(provider: KeyRotation | FreshKey) -> ProviderError:
    with pytest.raises(ProviderError) as caught:
        await ask(provider)
    return caught.value


async def test_sessions_are_shared_out_over_the_keys_and_each_keeps_its_own() -> None:
    rotation = KeyRotation([Named("a"), Named("b"), Named("c")])
    sessions = [f"sess_{number}" for number in range(60)]
    first = [await ask(rotation, session) for session in sessions]
    assert set(first) == {"a", "b", "c"}
    assert [await ask(rotation, session) for session in sessions] == first


@pytest.mark.parametrize(
    ("error", "rest_s"),
    [
        (RateLimited("slow", retry_after_s=7.0), 7.0),
        (RateLimited("slow", retry_after_s=1e9), MAX_LIMITED_S),
        (QuotaExceeded("no credit"), REFUSED_S),
        (AuthRefused("no"), REFUSED_S),
    ],
)
async def test_a_key_that_was_objected_to_rests_and_comes_back(error: ProviderError, rest_s: float) -> None:
    """P-15."""
    clock = Clock()
    first = Named("first", error)
    rotation = KeyRotation([first, Named("second")], clock=clock)
    raised = await refusal(rotation)
    assert RetryPolicy().delay_s(raised, 1, least) == 0.0, "the other key is ready"
    assert RetryPolicy().delay_s(raised, 4, least) is None, "attempts are bounded all the same"
    first.error = None
    clock.now_s += rest_s - 0.1
    assert await ask(rotation) == "second"
    clock.now_s += 0.2
    assert await ask(rotation) == "first"


async def test_while_all_keys_rest_the_errors_stand_as_they_are() -> None:
    clock = Clock()
    keys = [Named("a", AuthRefused("no")), Named("b", RateLimited("slow", retry_after_s=50.0))]
    rotation = KeyRotation(keys, clock=clock)
    assert (await refusal(rotation)).may_retry_at_once
    last = await refusal(rotation)
    assert isinstance(last, RateLimited)
    assert not last.may_retry_at_once
    assert isinstance(await refusal(rotation), RateLimited), "the one that is back first"


class Source:
    """Gives the next key each time that it is asked, the last one for ever."""

    def __init__(self, *keys: str, good_for_s: float = 0.0) -> None:
        self.keys = list(keys)
        self.good_for_s = good_for_s
        self.asked = 0

    async def __call__(self) -> ApiKey:
        self.asked += 1
        return ApiKey(
            value=self.keys.pop(0) if len(self.keys) > 1 else self.keys[0], good_for_s=self.good_for_s
        )


def fresh(source: Source, made: list[Named]) -> FreshKey:
    def make(key: str) -> Named:
        made.append(Named(key, AuthRefused("no") if key == "bad" else None))
        return made[-1]

    return FreshKey(api="named", source=source, make=make, capabilities=lambda _: Capabilities())


async def test_a_key_is_asked_for_once_while_it_is_good() -> None:
    source, made = Source("one", good_for_s=3600.0), list[Named]()
    provider = fresh(source, made)
    assert [await ask(provider), await ask(provider)] == ["one", "one"]
    assert source.asked == 1
    await provider.aclose()
    assert made[0].is_closed


async def test_an_answer_in_progress_keeps_its_key_when_another_comes() -> None:
    made: list[Named] = []
    provider = fresh(Source("one", "two"), made)
    request = ProviderRequest(model="m", messages=HELLO)
    stream = provider.stream(request)
    assert await anext(stream) == TextDelta(index=0, text="one")
    assert await ask(provider) == "two"
    states = [made[0].is_closed]
    assert await anext(stream, None) is None
    states.append(made[0].is_closed)
    assert states == [False, True]
    await provider.aclose()


async def test_a_key_that_is_refused_is_asked_for_anew() -> None:
    provider = fresh(Source("bad", "good", good_for_s=3600.0), [])
    raised = await refusal(provider)
    assert RetryPolicy().delay_s(raised, 1, least) == 0.0
    assert await ask(provider) == "good"
    await provider.aclose()


async def test_a_key_that_stays_refused_is_final() -> None:
    provider = fresh(Source("bad", good_for_s=3600.0), [])
    assert RetryPolicy().delay_s(await refusal(provider), 1, least) is None
    await provider.aclose()


async def test_a_file_is_read_again_and_a_missing_one_is_a_refused_key(tmp_path: Path) -> None:
    file = tmp_path / "token"
    source = file_key(str(file))
    provider = FreshKey(api="named", source=source, make=Named, capabilities=lambda _: Capabilities())
    raised = await refusal(provider)
    assert isinstance(raised, AuthRefused)
    assert str(file) not in raised.message
    file.write_text("tok-1\n")
    assert await ask(provider) == "tok-1"
    file.write_text("tok-2")
    assert (await source()).value == "tok-2"
    assert "tok-2" not in repr(await source())
    await provider.aclose()
