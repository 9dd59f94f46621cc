"""Results as records keep them: what plain values become without kombu's registry is what it would
make of them.
"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from celery_leases.results import (
    CONTENT_TYPE,
    NOT_JSON,
    TOO_LARGE,
    as_decoded,
    decode,
    encode,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
NO_LIMIT = 2**62


def by_kombu(text: str) -> Any:
    return loads(text, CONTENT_TYPE, "utf-8", accept={CONTENT_TYPE})


@given(VALUES)
@example("\ud83d\ude00")
@example('"__type__"')
@example(-0.0)
def test_a_value_is_written_and_read_as_kombu_does(value: Any) -> None:
    text, missing = encode(value, NO_LIMIT)
    assert missing is None
    assert text is not None
    assert text == dumps(value, serializer="json")[2]
    assert repr(decode(text)) == repr(by_kombu(text)) == repr(as_decoded(value, text))


@pytest.mark.parametrize(
    "text", ["1", " 1", "-1.5e3", '"a"', "null", "[1]", "{}", '{"__type__": "nonsense"}', "NaN"]
)
def test_a_stored_text_is_read_as_kombu_reads_it(text: str) -> None:
    assert repr(decode(text)) == repr(by_kombu(text))


@pytest.mark.parametrize("text", ["x", '"', "1 2", "{", "[1"])
def test_a_text_that_is_no_json_raises(text: str) -> None:
    with pytest.raises(Exception, match=r"\w"):
        decode(text)


@pytest.mark.parametrize(("value", "size"), [("ä", 8), ("a", 3), (12345, 5), ([1], 3), (None, 4)])
def test_a_result_is_stored_up_to_its_limit_in_bytes(value: Any, size: int) -> None:
    assert encode(value, size)[1] is None
    assert value is None or encode(value, size - 1) == (None, TOO_LARGE)


def test_a_value_without_json_is_reported() -> None:
    for value in (object(), 10**5000, {1, object()}):
        assert encode(value, NO_LIMIT) == (None, NOT_JSON)
