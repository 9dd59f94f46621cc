"""Plain HTTP: requests, httpx and httpx2, aiohttp, urllib3 and urllib."""

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from tests.clients.expectations import (
    CONFLICT,
    DECLINED,
    ERROR,
    OUTCOME_UNKNOWN,
    RATE_LIMITED,
    REFUSED,
    UNAUTHORIZED,
    UNREACHABLE,
    Expected,
    Places,
    cases,
    raising,
)
from tests.clients.servers import (
    Server,
    accepts_no_connection,
    answers,
    answers_slowly,
    breaks_off,
    epoch,
    hangs_up,
    http_date,
    is_not_trusted,
    name_servers_away,
    name_unknown,
    never_answers,
    patience,
    refuses,
    resets,
    speaks_nonsense,
)

EVERYWHERE: dict[str, tuple[Server, Expected]] = {
    "429": (answers(429), RATE_LIMITED),
    "429, Retry-After": (answers(429, retry_after="20"), RATE_LIMITED.after(20)),
    "503, Retry-After is a date": (answers(503, retry_after=http_date(90)), RATE_LIMITED.about(90)),
    "403, GitHub": (
        answers(403, x_ratelimit_remaining="0", x_ratelimit_reset=epoch(90)),
        RATE_LIMITED.about(90),
    ),
    "401": (answers(401), UNAUTHORIZED),
    "403": (answers(403), REFUSED),
    "404": (answers(404), REFUSED),
    "409": (answers(409), CONFLICT),
    "500": (answers(500), OUTCOME_UNKNOWN),
    "does not answer": (never_answers, OUTCOME_UNKNOWN),
    "hangs up": (hangs_up, OUTCOME_UNKNOWN),
    "resets": (resets, OUTCOME_UNKNOWN),
    "breaks off": (breaks_off, OUTCOME_UNKNOWN),
    "speaks nonsense": (speaks_nonsense, OUTCOME_UNKNOWN),
    "refuses the connection": (refuses, UNREACHABLE),
    "accepts nobody": (accepts_no_connection, UNREACHABLE),
    "name servers away": (name_servers_away, UNREACHABLE),
    "name unknown": (name_unknown, UNREACHABLE),
    "is not trusted": (is_not_trusted, REFUSED),
}
"""What every HTTP client meets."""

RARE: dict[str, tuple[Server, Expected]] = {
    "429, RateLimit": (answers(429, ratelimit='"default";r=0;t=40'), RATE_LIMITED.after(40)),
    "429, x-ratelimit-reset in seconds": (
        answers(429, x_ratelimit_remaining="0", x_ratelimit_reset="40"),
        RATE_LIMITED.after(40),
    ),
    "429, a day": (answers(429, retry_after="86400"), RATE_LIMITED.after(21600)),
    "429, nonsense": (answers(429, retry_after="soon"), RATE_LIMITED),
    "403, Retry-After": (answers(403, retry_after="60"), RATE_LIMITED.after(60)),
    "402": (answers(402), DECLINED),
    "408": (answers(408), OUTCOME_UNKNOWN),
    "410": (answers(410), REFUSED),
    "413": (answers(413), REFUSED),
    "421": (answers(421), CONFLICT),
    "422": (answers(422), REFUSED),
    "423": (answers(423), CONFLICT),
    "425": (answers(425), CONFLICT),
    "501": (answers(501), REFUSED),
    "502": (answers(502), OUTCOME_UNKNOWN),
    "503": (answers(503), OUTCOME_UNKNOWN),
    "504": (answers(504), OUTCOME_UNKNOWN),
    "505": (answers(505), REFUSED),
    "509": (answers(509), RATE_LIMITED),
    "524": (answers(524), OUTCOME_UNKNOWN),
    "529": (answers(529), RATE_LIMITED),
}
"""What depends on the answer alone, once."""


def requests(url: str) -> Any:
    import requests as library

    with library.post(url, json={}, timeout=patience()) as response:
        response.raise_for_status()
        return response.json()


def requests_json(url: str) -> Any:
    """One POST whose answer is not looked at before it is read."""
    import requests as library

    with library.post(url, json={}, timeout=patience()) as response:
        return response.json()


def requests_unread(url: str) -> Any:
    """One POST whose answer is not read before its status is looked at."""
    import requests as library

    with library.post(url, json={}, timeout=patience(), stream=True) as response:
        response.raise_for_status()


def requests_by_proxy(url: str) -> Any:
    """One GET through a proxy."""
    import requests as library

    with library.get("http://127.0.0.1:9/", proxies={"http": url}, timeout=patience()) as response:
        response.raise_for_status()


def _to(url: str) -> Callable[[Places], Any]:
    return lambda _: requests(url)


def httpx_of(name: str) -> Callable[[str], Any]:
    def post(url: str) -> Any:
        library = importlib.import_module(name)
        with library.Client(timeout=patience()) as client:
            return client.post(url, json={}).raise_for_status().json()

    return post


def unread_of(name: str) -> Callable[[str], Any]:
    """One POST whose answer is not read before its status is looked at."""

    def post(url: str) -> Any:
        library = importlib.import_module(name)
        with library.Client(timeout=patience()) as client, client.stream("POST", url) as response:
            response.raise_for_status()

    return post


def async_of(name: str) -> Callable[[str], Any]:
    """One POST in an event loop of its own."""

    def post(url: str) -> Any:
        library = importlib.import_module(name)

        async def ask() -> Any:
            async with library.AsyncClient(timeout=patience()) as client:
                return (await client.post(url, json={})).raise_for_status()

        return asyncio.run(ask())

    return post


def cut_off_of(name: str) -> Callable[[str], Any]:
    """One POST that the caller ends: ``asyncio.timeout``."""

    def post(url: str) -> Any:
        library = importlib.import_module(name)

        async def ask() -> Any:
            async with asyncio.timeout(patience()), library.AsyncClient(timeout=60) as client:
                return await client.post(url, json={})

        return asyncio.run(ask())

    return post


def by_proxy_of(name: str) -> Callable[[str], Any]:
    """One GET through a proxy."""

    def get(url: str) -> Any:
        library = importlib.import_module(name)
        with library.Client(proxy=url, timeout=patience()) as client:
            return client.get("https://127.0.0.1:9/")

    return get


def full_pool_of(name: str) -> Callable[[str], Any]:
    """Two requests where there is one connection."""

    def stream(url: str) -> Any:
        library = importlib.import_module(name)
        timeout = library.Timeout(patience(), read=10 * patience())
        with (
            library.Client(timeout=timeout, limits=library.Limits(max_connections=1)) as client,
            client.stream("GET", url),
        ):
            return client.get(url)

    return stream


def nowhere_of(name: str, url: str) -> Callable[[Places], Any]:
    """One GET of something that is not a URL."""
    return lambda _: importlib.import_module(name).get(url)


def in_group_of(name: str) -> Callable[[str], Any]:
    """One POST among the tasks of an ``asyncio.TaskGroup``."""

    def post(url: str) -> Any:
        library = importlib.import_module(name)

        async def ask() -> None:
            async with (
                library.AsyncClient(timeout=patience()) as client,
                asyncio.TaskGroup() as group,
            ):

                async def one() -> None:
                    (await client.post(url, json={})).raise_for_status()

                group.create_task(one())
                group.create_task(asyncio.sleep(60))

        return asyncio.run(ask())

    return post


def aiohttp(url: str, **timeout: float) -> Any:
    import aiohttp as library

    limits: Any = library.ClientTimeout(
        **(timeout or {"sock_read": patience(), "sock_connect": patience()})
    )

    async def ask() -> Any:
        async with (
            library.ClientSession(timeout=limits) as session,
            session.post(url, json={}) as response,
        ):
            response.raise_for_status()
            return await response.json()

    return asyncio.run(ask())


def aiohttp_in_total(url: str) -> Any:
    """One POST that may take so long altogether."""
    return aiohttp(url, total=patience())


def urllib3(url: str) -> Any:
    import urllib3 as library

    with library.PoolManager(timeout=patience(), retries=False) as pool:
        return pool.request("POST", url, json={})


def urllib3_retrying(url: str) -> Any:
    """One POST, repeated by the library without a pause."""
    import urllib3 as library

    retries = library.Retry(1, status_forcelist=[500, 503], allowed_methods=None, backoff_factor=0)
    with library.PoolManager(timeout=patience(), retries=retries) as pool:
        return pool.request("POST", url, json={})


def urllib(url: str) -> Any:
    from urllib.request import ProxyHandler, build_opener

    with build_opener(ProxyHandler({})).open(url, data=b"{}", timeout=patience()) as response:
        return response.read()


_ASYNC = {
    name: EVERYWHERE[name]
    for name in ("does not answer", "resets", "refuses the connection", "is not trusted")
}
_UNREAD = answers_slowly(429, retry_after="20")
_CONNECTIONS = {name: EVERYWHERE[name] for name in EVERYWHERE if not name[0].isdigit()}

REQUESTS = [
    *cases("requests", requests, EVERYWHERE | RARE),
    *cases(
        "requests",
        requests_json,
        {"200, not JSON": (answers(200, "<html>Hello</html>"), ERROR.of("JSONDecodeError"))},
    ),
    *cases("requests", requests_unread, {"429, unread": (_UNREAD, RATE_LIMITED.after(20))}),
    *cases(
        "requests, proxy", requests_by_proxy, {"refuses the connection": (refuses, UNREACHABLE)}
    ),
    *raising(
        "requests",
        {
            "MissingSchema": (_to("127.0.0.1/charge"), REFUSED),
            "InvalidSchema": (_to("gopher://127.0.0.1/charge"), REFUSED),
            "InvalidURL": (_to("http://"), REFUSED),
            "InvalidURL, of idna": (_to("http://.example/charge"), REFUSED),
        },
    ),
]

HTTPX = [
    *cases("httpx", httpx_of("httpx"), EVERYWHERE),
    *cases("httpx2", httpx_of("httpx2"), EVERYWHERE),
    *cases("httpx", full_pool_of("httpx"), {"pool is full": (answers_slowly(), UNREACHABLE)}),
    *cases("httpx2", full_pool_of("httpx2"), {"pool is full": (answers_slowly(), UNREACHABLE)}),
    *cases("httpx", unread_of("httpx"), {"429, unread": (_UNREAD, RATE_LIMITED.after(20))}),
    *cases("httpx, async:", async_of("httpx"), _ASYNC),
    *cases(
        "httpx, asyncio.timeout:",
        cut_off_of("httpx"),
        {"does not answer": (never_answers, OUTCOME_UNKNOWN)},
    ),
    *cases(
        "httpx, proxy", by_proxy_of("httpx"), {"refuses the connection": (refuses, UNREACHABLE)}
    ),
    *cases("httpx, TaskGroup:", in_group_of("httpx"), {"429": EVERYWHERE["429, Retry-After"]}),
    *raising(
        "httpx",
        {
            "UnsupportedProtocol": (nowhere_of("httpx", "127.0.0.1/charge"), REFUSED),
            "InvalidURL": (nowhere_of("httpx", "http://127.0.0.1:port/"), REFUSED),
        },
    ),
    *raising(
        "httpx2", {"UnsupportedProtocol": (nowhere_of("httpx2", "127.0.0.1/charge"), REFUSED)}
    ),
]

AIOHTTP = [
    *cases("aiohttp", aiohttp, EVERYWHERE),
    *cases(
        "aiohttp, in total:",
        aiohttp_in_total,
        {
            "does not answer": (never_answers, OUTCOME_UNKNOWN),
            "accepts nobody": (accepts_no_connection, OUTCOME_UNKNOWN),
        },
    ),
]

URLLIB = [
    *cases("urllib3", urllib3, _CONNECTIONS),
    *cases(
        "urllib3, retrying:",
        urllib3_retrying,
        {"500": (answers(500), OUTCOME_UNKNOWN), "refuses the connection": (refuses, UNREACHABLE)},
    ),
    *cases("urllib", urllib, EVERYWHERE),
    *cases("urllib", urllib, {"429, unread": (_UNREAD, RATE_LIMITED.after(20))}),
]
