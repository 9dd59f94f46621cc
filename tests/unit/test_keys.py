"""From the arguments of a call to its key and fingerprint: the published form, and the traps beside
it.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
import re
from contextlib import suppress
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils import json as wire

from celery_leases.errors import KeyUnusable
from celery_leases.groups.group import stored_group
from celery_leases.keys import (
    STORED_KEY_MAX,
    CallKey,
    Parameters,
    _given,
    call_group,
    call_key,
    canonical,
    key_reused,
    same_arguments,
    stored_key,
)
from celery_leases.options import Group, LeaseOptions

#: What an argument may be, text that no store holds included.
ARGUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.just("\ud83d\ude00"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
#: Characters that a key may hold.
STORABLE = st.characters(exclude_categories=["Cs"], exclude_characters="\x00")
PAGE = Path(__file__).parents[2] / "docs/reference/keys.md"
VECTORS = PAGE.with_name("key-vectors.json")


def _published() -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads(VECTORS.read_text(encoding="utf-8"))
    return vectors


def signature(parameters: str) -> Parameters:
    made: dict[str, Any] = {}
    exec(f"def body({parameters}): ...", made)  # noqa: S102 - a signature from its text, as the docs write it
    return Parameters(list(inspect.signature(made["body"]).parameters.values()))


def key_of(parameters: str, *args: Any, _options: dict[str, Any], **kwargs: Any) -> CallKey:
    return call_key(
        "shop.work", LeaseOptions(**_options), signature(parameters), "call-1", args, kwargs
    )


def templated(parameters: str, template: str, *args: Any, **kwargs: Any) -> str:
    return key_of(parameters, *args, _options={"key": template}, **kwargs).key


def _base64_of(data: bytes, length: int) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()[:length]).decode()


class TestPublishedForm:
    """docs/reference/keys.md is a promise: these may never change under ``v1``."""

    @pytest.mark.parametrize(
        "vector", _published(), ids=lambda vector: f"{vector['lease_key']}({vector['parameters']})"
    )
    def test_a_vector_gives_its_key_stored_key_and_fingerprint(self, vector) -> None:
        args, kwargs = (
            wire.loads(json.dumps(vector["args"])),
            wire.loads(json.dumps(vector["kwargs"])),
        )
        options = LeaseOptions(key=vector["lease_key"])
        made = call_key(
            "shop.work", options, signature(vector["parameters"]), "call-1", args, kwargs
        )
        assert (made.key, made.stored, made.digests, made.fingerprint) == (
            vector["key"], vector["stored_key"], vector["digests"], vector["fingerprint"],
        )  # fmt: skip

    @pytest.mark.parametrize("vector", _published(), ids=lambda vector: vector["lease_key"])
    def test_the_stored_key_is_name_and_key_or_its_hashed_tail(self, vector) -> None:
        whole = vector["key"] if vector["key"].startswith("/") else f"/shop.work/{vector['key']}"
        scoped = "t:{}|{}".format(*whole[1:].split("/", 1))
        if len(scoped) > STORED_KEY_MAX:
            scoped = f"{scoped[:190]}#{hashlib.sha256(scoped.encode()).hexdigest()}"
        assert vector["stored_key"] == scoped

    def test_the_table_of_canonical_values_is_true(self) -> None:
        rows = re.findall(
            r"^\| (`.+`) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
        )
        known = {"datetime": datetime, "date": date, "Decimal": Decimal, "UUID": UUID, "UTC": UTC}
        seen = 0
        for sources, text in rows:
            for source in re.findall(r"`([^`]+)`", sources):
                assert canonical(eval(source, known)) == text, source  # noqa: S307 - our own docs
                seen += 1
        assert seen == 8


ALIKE: list[Any] = [
    1, 1.0, "1", True, [1], {"1": 1}, Decimal("1.1"), Decimal("1.10"),
    datetime(2026, 4, 1, tzinfo=UTC), date(2026, 4, 1),
]  # fmt: skip


class Hostile:
    """Raises what no serializer expects."""

    def __json__(self) -> None:
        raise LookupError("hostile")


class TestCanonical:
    def test_a_tuple_reads_as_a_list_however_deep(self) -> None:
        assert (
            canonical((1, [(2, {"a": (3,)})]))
            == canonical([1, [[2, {"a": [3]}]]])
            == '[1,[[2,{"a":[3]}]]]'
        )

    def test_the_order_of_a_mapping_does_not_matter(self) -> None:
        assert canonical({"b": 1, "a": {"d": 2, "c": 3}}) == canonical(
            {"a": {"c": 3, "d": 2}, "b": 1}
        )

    def test_values_that_only_look_alike_stay_apart(self) -> None:
        assert len({canonical(value) for value in ALIKE}) == len(ALIKE)

    @pytest.mark.parametrize(
        "value",
        [
            datetime(2026, 4, 1, tzinfo=UTC), date(2026, 4, 1), time(8, 30), Decimal("1.10"),
            UUID(int=1842), b"\xff",
        ],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    def test_a_type_of_kombu_reads_the_same_before_and_after_the_wire(self, value: Any) -> None:
        assert canonical(value) == canonical(wire.loads(wire.dumps(value)))

    @pytest.mark.parametrize(
        "value",
        [
            object(),
            {1, 2},
            1j,
            {(1, 2): 3},
            10**5000,
            Hostile(),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_what_is_no_json_is_refused_with_its_type_and_a_way_out(self, value: Any) -> None:
        with pytest.raises(
            KeyUnusable, match=rf"{type(value).__name__} has no JSON form.*lease_key.*callable"
        ):
            canonical(value)
        with pytest.raises(KeyUnusable):
            key_of("x=1", value, _options={"key": "k"})

    @pytest.mark.parametrize("kind", ["decimal", "uuid", "date", "ours"])
    def test_an_envelope_that_kombu_cannot_read_is_a_mapping_like_others(self, kind: str) -> None:
        made = key_of("x", {"__type__": kind, "__value__": [1]}, _options={"key": "k:{x}"})
        assert made.key == f'k:{{"__type__":"{kind}","__value__":[1]}}'

    def test_a_value_that_holds_itself_is_refused(self) -> None:
        ring: list[Any] = []
        ring.append(ring)
        with pytest.raises(KeyUnusable):
            canonical(ring)

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
    def test_the_canonical_text_is_json_of_the_same_value(self, value: Any) -> None:
        assert json.loads(canonical(value)) == value


class TestStoredKey:
    def test_two_tasks_share_only_a_key_that_begins_with_a_name(self) -> None:
        """The name may be that of a task, which was renamed."""
        for template, same in (("{x}", False), ("/ours/{x}", True)):
            options, made = LeaseOptions(key=template), signature("x")
            keys = [call_key(task, options, made, "c", ("k",), {}) for task in ("a", "b")]
            assert (keys[0].stored == keys[1].stored) is same
        assert keys[0].key == "/ours/k"
        assert keys[0].stored == "t:ours|k" == stored_key("ours", "k")

    @pytest.mark.parametrize("value", ["/ours/k", "/data/2026/x.csv"])
    def test_an_argument_cannot_make_a_key_of_another_task(self, value: str) -> None:
        made = signature("x")
        with pytest.raises(KeyUnusable, match=r"write .file:"):
            call_key("t", LeaseOptions(key="{x}"), made, "c", (value,), {})
        assert call_key("t", LeaseOptions(key="f:{x}"), made, "c", (value,), {}).key == f"f:{value}"
        assert call_key("t", LeaseOptions(), made, value, (1,), {}).stored == f"t:t|{value}"

    def test_a_shared_key_is_not_empty_behind_its_name(self) -> None:
        with pytest.raises(KeyUnusable, match="gave '/ours/'"):
            call_key("t", LeaseOptions(key="/ours/{x}"), signature("x"), "c", ("",), {})

    def test_a_callable_may_make_a_shared_key(self) -> None:
        options = LeaseOptions(key=lambda x: f"/ours/{x}")
        assert call_key("t", options, signature("x"), "c", ("k",), {}).stored == "t:ours|k"

    def test_255_characters_are_stored_and_256_get_a_hashed_tail(self) -> None:
        whole = stored_key("work", "x" * (STORED_KEY_MAX - len("t:work|")))
        assert whole == "t:work|" + "x" * 248
        cut = stored_key("work", "x" * 249)
        assert len(cut) == STORED_KEY_MAX
        assert cut[190] == "#"

    @given(st.text(min_size=240, max_size=400), st.text(min_size=240, max_size=400))
    def test_long_keys_fit_and_stay_apart(self, one: str, other: str) -> None:
        keys = [stored_key("work", key) for key in (one, other)]
        assert all(len(key) <= STORED_KEY_MAX for key in keys)
        assert (keys[0] == keys[1]) == (one == other)

    def test_the_short_form_of_a_key_is_the_stored_key_of_no_other(self) -> None:
        short = stored_key("work", "x" * 400)
        chosen = stored_key("work", short.removeprefix("t:work|"))
        assert chosen != short
        assert len(chosen) == STORED_KEY_MAX
        assert stored_key("work", chosen.removeprefix("t:work|")) not in (short, chosen)
        harmless = "x" * 183 + "#" + "g" * 64
        assert stored_key("work", harmless) == f"t:work|{harmless}"

    @given(st.text("a|%7C", max_size=4), st.text("a|%7C", max_size=4), st.text("a|%7C", max_size=4))
    def test_where_the_name_of_the_task_ends_is_never_in_doubt(self, task, other, key) -> None:
        assert stored_key("a|b", "c") != stored_key("a", "b|c")
        if task != other and stored_key(task, key).startswith(stored_key(other, "")):
            raise AssertionError("the key of one task begins as those of another")

    @given(st.text("a#0", min_size=250, max_size=258), st.text("a#0", min_size=250, max_size=258))
    def test_groups_have_one_name_each(self, one: str, other: str) -> None:
        groups = {one, other, f"{one}\0", f"\0{one}", one[:200], f"{one[:200]}\0"}
        names = {stored_group(group) for group in groups}
        assert len(names) == len(groups)
        assert all(len(name) <= STORED_KEY_MAX and stored_group(name) == name for name in names)

    def test_a_group_that_is_the_short_form_of_another_is_refused(self) -> None:
        def ask(model: str) -> None: ...

        options, signature = LeaseOptions(group=Group("{model}")), inspect.signature(ask)
        assert call_group("ask", options, signature, ("m" * 300,), {}) == "m" * 300
        with pytest.raises(KeyUnusable, match="the short form of another group"):
            call_group("ask", options, signature, (stored_group("m" * 300),), {})


class TestBinding:
    def test_position_name_and_default_are_one_call(self) -> None:
        made = [
            key_of("a, b=2", *args, _options={"key": "{a}:{b}"}, **kwargs)
            for args, kwargs in [((1,), {}), ((1, 2), {}), ((1,), {"b": 2}), ((), {"b": 2, "a": 1})]
        ]
        assert made == [made[0]] * 4
        assert made[0].key == "1:2"

    def test_keywords_count_under_their_own_names_and_positions_as_one_list(self) -> None:
        assert _given("t", signature("a, *rest, b=0, **more"), (1, 2, (3,)), {"c": 4}).by_name == {
            "a": 1, "rest": [2, [3]], "b": 0, "c": 4,
        }  # fmt: skip

    def test_a_keyword_may_bear_the_name_of_a_positional_parameter_without_hiding_it(self) -> None:
        keys = {
            key_of("a, /, **more", first, _options={"key": "constant"}, a=second).fingerprint
            for first, second in [(1, 2), (3, 2), (1, 4)]
        }
        assert len(keys) == 3

    def test_a_keyword_with_stars_cannot_pass_for_one_that_was_given_stars(self) -> None:
        named = key_of("a, /, **more", 1, _options={"key": "constant"}, a=2)
        starred = key_of("a, /, **more", 1, _options={"key": "constant"}, **{"**a": 2})
        assert named.fingerprint != starred.fingerprint
        assert named.digests != starred.digests

    @pytest.mark.parametrize(
        "wrap", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["list", "dict"]
    )
    @pytest.mark.parametrize("depth", [900, 990, 5_000, 100_000])
    def test_arguments_nested_too_deep_are_refused(self, wrap: Any, depth: int) -> None:
        value: Any = 1
        for _ in range(depth):
            value = wrap(value)
        options: dict[str, Any] = {"key": "{x}", "group": Group("{x}")}
        for make in (
            lambda: key_of("x", value, _options={"key": "{x}"}),
            lambda: key_of("x", value, _options={"key": "constant"}),
            lambda: call_group("shop.work", LeaseOptions(**options), signature("x"), (value,), {}),
        ):
            with suppress(KeyUnusable):  # how deep is too deep depends on where the call stands
                make()
        if depth == 100_000:  # too deep for every release of Python
            with pytest.raises(
                KeyUnusable, match=r"task shop\.work: its arguments are nested too deep"
            ):
                key_of("x", value, _options=options)

    def test_arguments_that_do_not_fit_are_refused_with_the_task_named(self) -> None:
        with pytest.raises(KeyUnusable, match=r"task shop\.work: the arguments do not fit"):
            templated("a", "{a}", 1, 2)

    def test_client_and_worker_agree_on_a_value_that_the_wire_turns_into_text(self) -> None:
        class Colour(str, Enum):  # noqa: UP042 - this is the kind that prints its name
            RED = "red"

        assert (
            templated("colour", "{colour}", Colour.RED)
            == templated("colour", "{colour}", "red")
            == "red"
        )

    def test_client_and_worker_agree_on_the_keys_of_a_mapping(self) -> None:
        assert templated("by_id", "{by_id}", {1: "a"}) == templated("by_id", "{by_id}", {"1": "a"})

    @given(
        st.lists(
            st.integers() | st.text(STORABLE, max_size=5) | st.booleans() | st.none(),
            min_size=4,
            max_size=4,
        ),
        st.integers(0, 4),
    )
    def test_binding_style_never_changes_key_or_fingerprint(self, values, positional) -> None:
        names = ["a", "b", "c", "d"]
        parameters = "a, b, c=3, d='x'"
        mixed = key_of(
            parameters,
            *values[:positional],
            _options={"key": "{a}|{b}|{c}|{d}"},
            **dict(list(zip(names, values, strict=True))[positional:]),
        )
        assert mixed == key_of(parameters, *values, _options={"key": "{a}|{b}|{c}|{d}"})
        given_to = key_of(
            parameters,
            *values[:positional],
            _options={
                "key": lambda a, b, c, d: f"{a}|{b}|{c}|{d}",
                "fingerprint": lambda *args: args,
            },
            **dict(list(zip(names, values, strict=True))[positional:]),
        )
        assert given_to == key_of(
            parameters,
            *values,
            _options={
                "key": lambda a, b, c, d: f"{a}|{b}|{c}|{d}",
                "fingerprint": lambda *args: args,
            },
        )

    @given(
        st.sampled_from(
            [
                "", "a", "a, b", "a, b=1", "a=None, b=(2,)", "a, /, b", "a, *, b=1", "a, *rest",
                "a, **more",
            ]
        ),
        st.lists(ARGUMENTS, max_size=3),
        st.dictionaries(st.sampled_from("abc"), ARGUMENTS, max_size=2),
        st.sampled_from(
            [
                "k", "{a}", "{a}-{b}", "{b[0]}{{}}", "{a!r:>3}", "{a.b}",
                lambda *args, **more: f"{args}{more}",
            ]
        ),
        st.sampled_from([None, False, ("a", "b"), lambda *args, **more: {"args": args, **more}]),
    )  # fmt: skip
    def test_plain_parameters_make_the_keys_that_pythons_own_binding_makes(
        self, parameters: str, args: list[Any], kwargs: dict[str, Any], template: Any, chosen: Any
    ) -> None:
        ours = signature(parameters)
        pythons = inspect.Signature(list(ours.parameters.values()))
        options = LeaseOptions(key=template, fingerprint=chosen)
        made: list[Any] = []
        for each in (ours, pythons):
            try:
                made.append(
                    (
                        call_key("t", options, each, "c", args, kwargs),
                        _given("t", each, args, kwargs).by_name,
                    )
                )
            except KeyUnusable as error:
                made.append(str(error))
        assert repr(made[0]) == repr(made[1])


class TestTemplates:
    @pytest.mark.parametrize(
        ("template", "value", "key"),
        [
            ("{x}", "text", "text"),
            ("{x}", 7, "7"),
            ("{x}", 1.5, "1.5"),
            ("{x}", True, "true"),
            ("{x}", None, "null"),
            ("{x}", ("a", 1), '["a",1]'),
            ("{x}", ["a", 1], '["a",1]'),
            ("{x}", {"b": 1, "a": True}, '{"a":true,"b":1}'),
            ("{x}", Decimal("1.10"), "1.10"),
            ("{x}", UUID(int=1842), "00000000-0000-0000-0000-000000000732"),
            ("{x}", date(2026, 4, 1), "2026-04-01"),
            ("{x:%Y-%m}", date(2026, 4, 1), "2026-04"),
            ("{x:>5}", "ab", "   ab"),
            ("{x:05d}", 42, "00042"),
            ("{x.year}", date(2026, 4, 1), "2026"),
            ("{x[1]}", (7, 8), "8"),
            ("{x[name]}", {"name": "Zoë"}, "Zoë"),
            ("{x!r}", "a", "'a'"),
            ("{x}", b"a", '{"__type__":"bytes","__value__":"a"}'),
            ("{{{x}}}", 1, "{1}"),
        ],
    )
    def test_a_value_is_written_as_the_docs_say(self, template: str, value: Any, key: str) -> None:
        assert templated("x", template, value) == key

    def test_a_template_without_fields_is_one_key_for_all_calls(self) -> None:
        assert templated("x", "nightly", 1) == templated("x", "nightly", 2) == "nightly"

    @pytest.mark.parametrize(
        ("template", "value"),
        [("{x[5]}", [1]), ("{x.nothing}", 1), ("{x:%}", "a"), ("{x:d}", None)],
    )
    def test_a_template_that_cannot_be_filled_is_refused_with_the_template_named(
        self, template: str, value: Any
    ) -> None:
        with pytest.raises(
            KeyUnusable, match=re.escape(f"lease_key={template!r} cannot be filled")
        ):
            templated("x", template, value)

    @pytest.mark.parametrize("template", ["{x}", "{x!s}", "{x!r:>9}", "{x:}", "{x[0]}"])
    @pytest.mark.parametrize(
        "value",
        [{"a", "b"}, frozenset("ab"), object(), 1j, len, [{"a"}]],
        ids=lambda v: str(type(v)),
    )
    def test_a_value_without_a_stable_text_is_refused(self, template: str, value: Any) -> None:
        with pytest.raises(KeyUnusable, match=re.escape(f"lease_key={template!r}")):
            templated("x", template, value)

    @pytest.mark.parametrize("value", ["", " ", "\t\n"])
    def test_an_empty_key_is_refused(self, value: str) -> None:
        with pytest.raises(KeyUnusable, match="an empty key; every call would share it"):
            templated("x", "{x}", value)

    def test_a_nul_is_refused(self) -> None:
        with pytest.raises(KeyUnusable, match="NUL"):
            templated("x", "{x}", "a\x00b")

    def test_an_absurdly_long_key_is_refused_with_what_to_write(self) -> None:
        for length in (300, 140_000, 1_000_000):
            made = key_of("a", "x" * length, _options={"key": "{a}"})
            assert (len(made.key), len(made.stored), len(made.shown)) == (length, 255, 255)
        with pytest.raises(
            KeyUnusable, match="gave 1000001 characters; a key has at most 1000000: let a"
        ):
            key_of("a", "x" * 1_000_001, _options={"key": "{a}"})

    def test_half_a_surrogate_pair_is_refused_as_a_key_and_hashed_in_a_fingerprint(self) -> None:
        with pytest.raises(KeyUnusable, match="surrogate"):
            templated("x", "{x}", "a\ud800")
        assert key_of("x", "\ud800", _options={"key": "constant"}).fingerprint is not None

    def test_an_argument_outside_json_is_refused_unless_nothing_is_made_of_it(self) -> None:
        with pytest.raises(KeyUnusable, match="no JSON form"):
            key_of("x, y", 1, object(), _options={"key": "{x}"})
        assert key_of("x, y", 1, object(), _options={"key": "{x}", "fingerprint": False}).key == "1"


def same_call(one: CallKey, other: CallKey) -> bool:
    return one.stored == other.stored and same_arguments(one.fingerprint, other.fingerprint)


#: Values that a caller may send as they are or as text.
WITH_A_TEXT = (
    st.integers() | st.booleans() | st.none() | st.uuids() | st.dates() | st.datetimes()
    | st.decimals(allow_nan=False) | st.text(st.sampled_from("x:|1"), min_size=1, max_size=3)
)  # fmt: skip


class TestWhatTheKeyContains:
    """An argument that the template writes as a whole is compared by its text in the key."""

    @pytest.mark.parametrize(
        ("template", "value", "text"),
        [
            ("{x}", UUID(int=1842), "00000000-0000-0000-0000-000000000732"),
            ("{x}", Decimal("1.10"), "1.10"),
            ("{x}", date(2026, 4, 1), "2026-04-01"),
            ("{x}", datetime(2026, 4, 1, 8, tzinfo=UTC), "2026-04-01T08:00:00+00:00"),
            ("{x}", 7, "7"),
            ("{x}", [1, {"a": None}], '[1,{"a":null}]'),
            ("{x!s:>9}", 7, "7"),
            ("{x:%Y-%m}", date(2026, 4, 1), date(2026, 4, 30)),
            ("{x:.2f}", 12.5, Decimal("12.50")),
            ("{x:%m} of {x:%Y}", datetime(2026, 4, 1, 8, tzinfo=UTC), date(2026, 4, 30)),
        ],
    )
    @pytest.mark.parametrize("chosen", [None, ["x"]], ids=["all", "named"])
    def test_values_with_one_text_are_one_call(self, template, value, text, chosen) -> None:
        options = {"key": template, "fingerprint": tuple(chosen) if chosen else None}
        assert same_call(
            key_of("x, y=1", value, _options=options), key_of("x, y=1", text, _options=options)
        )

    def test_a_default_is_its_text_too(self) -> None:
        made = [key_of("x=1", *args, _options={"key": "k:{x}"}) for args in [(), (1,), ("1",)]]
        assert made == [made[0]] * 3

    @pytest.mark.parametrize(
        ("options", "one", "other"),
        [
            ({"key": "{x[id]}"}, {"id": 1}, {"id": 1, "more": 2}),
            ({"key": "{x}:{x[0]}"}, [1, 2], "[1,2]"),
            ({"key": "{y:{x}}"}, 1, "1"),
            ({"key": "k"}, 1, "1"),
            ({"key": lambda x, _: f"{x}"}, 1, "1"),
            ({"key": "{x}", "fingerprint": lambda x, _: {"x": x}}, 1, "1"),
        ],
        ids=["item", "item-too", "in-a-format", "constant", "callable", "callable-fingerprint"],
    )
    def test_anything_else_is_compared_by_content(self, options, one, other) -> None:
        first, second = (key_of("x, y", value, "y", _options=options) for value in (one, other))
        assert not same_call(first, second)

    @given(
        st.lists(WITH_A_TEXT, min_size=3, max_size=3),
        st.lists(WITH_A_TEXT, min_size=3, max_size=3),
        st.lists(st.booleans(), min_size=3, max_size=3),
        st.sampled_from(["{a}:{b}", "{b}|{a}:{a}", "{a}{b}", "{a!s:>3}{b}"]),
        st.sampled_from([None, ("a", "b", "c")]),
    )
    def test_calls_are_the_same_exactly_if_texts_in_the_key_and_other_contents_are(
        self, one, other, copied, template, chosen
    ) -> None:
        """A copied argument is that of the other call, or its text where the key has its text."""

        def written(value: Any) -> str:
            return templated("x", "k{x!s}" if "!s" in template else "k{x}", value)

        for place in range(3):
            if copied[place]:
                one[place] = written(other[place])[1:] if place < 2 else other[place]
        options = {"key": f"k{template}", "fingerprint": chosen}
        first, second = (key_of("a, b, c", *values, _options=options) for values in (one, other))
        equal = [templated("x", "k{x}", one[place]) == templated("x", "k{x}", other[place])
                 for place in range(2)]  # fmt: skip
        if "!s" in template:
            equal[0] = f"{one[0]!s:>3}" == f"{other[0]!s:>3}"
        assert same_call(first, second) == (all(equal) and canonical(one[2]) == canonical(other[2]))

    def test_texts_that_a_separator_joins_are_told_apart(self) -> None:
        first, second = (
            key_of("a, b", *values, _options={"key": "{a}:{b}"})
            for values in [("x:y", "z"), ("x", "y:z")]
        )
        assert first.key == second.key
        assert not same_call(first, second)
        error = key_reused(first.key, second.digests, first.digests)
        assert str(error).endswith("in a (another text in the key), b (another text in the key)")


class TestKeyReused:
    @pytest.mark.parametrize(
        ("ours", "theirs", "words"),
        [
            ((1,), ("1",), "x (an integer; in the earlier call a text)"),
            ((1.0,), (1,), "x (a float; in the earlier call an integer)"),
            ((-2,), (1,), "x (another integer)"),
            ((True,), (False,), "x (another boolean)"),
            (([1],), ({"1": 1},), "x (a list; in the earlier call a mapping)"),
            (
                (UUID(int=1),), (date(2026, 4, 1),),
                "x (a UUID; in the earlier call a date)",
            ),
            (
                (Decimal("1.1"),), (time(8, 30),),
                "x (a decimal; in the earlier call a time)",
            ),
            (
                (datetime(2026, 4, 1, tzinfo=UTC),), (b"1",),
                "x (a datetime; in the earlier call a bytes value)",
            ),
            (({"__type__": "ours", "__value__": 1},), (None,),
             "x (a value; in the earlier call not given, or its default)"),
            ((), (7,), "x (not given, or its default; in the earlier call an integer)"),
        ],
    )  # fmt: skip
    def test_its_message_names_kinds_and_no_values(self, ours, theirs, words) -> None:
        mine, other = (
            key_of("x=None", *args, _options={"key": "k"}).digests for args in (ours, theirs)
        )
        error = key_reused("k", mine, other)
        assert (
            str(error)
            == f"k stands for an earlier call with other arguments; they differ in {words}"
        )
        assert (error.key, error.differing) == ("k", ["x"])

    def test_it_names_each_argument_that_differs_and_no_other(self) -> None:
        ours = key_of("a, b, c=0", 1, 2, _options={"key": "k"}).digests
        theirs = key_of("a, b, c=0", 1, 3, 4, _options={"key": "k"}).digests
        assert key_reused("k", ours, theirs).differing == ["b", "c"]
        assert str(key_reused("k\n", ours, ours)).endswith("differ in their fingerprint")
        assert "\n" not in str(key_reused("k\n", None, {"\n": "a digest of a later release"}))


class TestCallables:
    def test_a_callable_is_called_like_the_body_with_defaults_filled_in(self) -> None:
        made = key_of(
            "a, *rest, b=2, **more", 1, (5,), _options={"key": lambda *a, **k: f"{a}{k}"}, c=3
        )
        assert made.key == "(1, [5]){'b': 2, 'c': 3}"

    def test_its_parameters_may_have_names_of_their_own(self) -> None:
        options = {"key": lambda c, m: f"{c}-{m}"}
        by_name = key_of("customer, month", _options=options, month=4, customer=1)
        assert by_name.key == key_of("customer, month", 1, 4, _options=options).key == "1-4"

    @pytest.mark.parametrize("value", [None, 7, b"key"])
    def test_anything_but_text_is_refused(self, value: Any) -> None:
        with pytest.raises(
            KeyUnusable, match=f"lease_key returned {type(value).__name__}; return a str"
        ):
            key_of("x", 1, _options={"key": lambda _: value})

    def test_empty_text_is_refused(self) -> None:
        with pytest.raises(KeyUnusable, match="empty"):
            key_of("x", 1, _options={"key": lambda _: ""})


class TestWithoutKey:
    def test_the_call_itself_is_the_key_and_nothing_is_compared(self) -> None:
        assert key_of("x", object(), _options={}) == CallKey("call-1", "t:shop.work|call-1")


class TestFingerprint:
    def fingerprint(
        self, parameters: str, *args: Any, chosen: Any = None, **kwargs: Any
    ) -> str | None:
        return key_of(
            parameters, *args, _options={"key": "constant", "fingerprint": chosen}, **kwargs
        ).fingerprint

    def test_any_argument_that_is_not_its_default_counts(self) -> None:
        prints = {self.fingerprint("a, b=0", *args) for args in [(1,), (2,), (1, 1), (2, 1)]}
        assert len(prints) == 4

    def test_a_new_parameter_with_a_default_changes_nothing(self) -> None:
        assert (
            self.fingerprint("a", 1)
            == self.fingerprint("a, b=None", 1)
            == self.fingerprint("a, b=None", 1, b=None)
            == self.fingerprint("a, *rest, b=(), **more", 1, b=[])
        )

    def test_a_default_outside_json_does_no_harm(self) -> None:
        nothing = object()
        body = inspect.Signature(
            [
                inspect.Parameter("a", inspect.Parameter.POSITIONAL_OR_KEYWORD),
                inspect.Parameter("b", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=nothing),
            ]
        )
        options = LeaseOptions(key="constant")
        left_out = call_key("t", options, body, "c", (1,), {})
        assert left_out.fingerprint == self.fingerprint("a", 1)
        assert call_key("t", options, body, "c", (1, 2), {}).fingerprint != left_out.fingerprint

    @given(st.dictionaries(st.sampled_from(["a", "b", "ü", "_"]), ARGUMENTS, min_size=1))
    def test_it_is_the_digest_of_the_arguments_in_canonical_form(self, arguments) -> None:
        compared = {
            name: canonical(value)
            for name, value in _given("t", signature("**more"), (), arguments).by_name.items()
        }
        made = key_of("**more", _options={"key": "k"}, **arguments)
        assert {name: digest[1:] for name, digest in (made.digests or {}).items()} == {
            name: _base64_of(text.encode("utf-8", "surrogatepass"), 12)
            for name, text in compared.items()
        }
        whole = canonical(made.digests).encode("utf-8", "surrogatepass")
        assert made.fingerprint == f"v1:{_base64_of(whole, 16).rstrip('=')}"

    def test_chosen_names_count_with_their_defaults_and_others_do_not(self) -> None:
        chosen = ("a", "b")
        assert self.fingerprint("a, b=0, c=0", 1, chosen=chosen) == self.fingerprint(
            "a, b=0, c=0", 1, 0, 9, chosen=chosen
        )
        assert self.fingerprint("a, b=0, c=0", 1, chosen=chosen) != self.fingerprint(
            "a, b=0, c=0", 1, 1, chosen=chosen
        )

    def test_a_callable_gives_a_value_or_a_mapping_of_names(self) -> None:
        value = key_of("a, b", 1, 2, _options={"key": "k", "fingerprint": lambda a, _: a})
        mapping = key_of("a, b", 1, 2, _options={"key": "k", "fingerprint": lambda _, b: {"b": b}})
        assert set(value.digests or ()) == {"fingerprint"}
        assert set(mapping.digests or ()) == {"b"}

    @pytest.mark.parametrize("option", [{"fingerprint": False}, {"runs": "each"}])
    def test_false_and_rerun_compare_nothing(self, option) -> None:
        made = key_of("a", object(), _options={"key": "k"} | option)
        assert (made.fingerprint, made.digests) == (None, None)

    def test_one_keyword_cannot_pass_for_two(self) -> None:
        one = self.fingerprint("**more", **{"a=1\nb": 2})
        assert one != self.fingerprint("**more", a=1, b=2)

    def test_digests_hold_no_argument(self) -> None:
        made = key_of("secret", "hunter2", _options={"key": "k"})
        assert "hunter2" not in repr(made)
