"""Each kind of mutation changes what it says, in every module that has imported it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from textwrap import dedent

import pytest

from celery_leases import deadlines
from celery_leases.attempt import process
from tests.mutants.mutations import Mutation, apply, imported_functions, mutated, mutations, path_of

MODULE = "celery_leases.deadlines"


def changes(source: str) -> list[str]:
    """What each mutation of *source* makes of it, without what is the same in all of them."""
    text = dedent(source).strip()
    return [ast.unparse(mutated(each, text)) for each in mutations("any", text)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a is b", ["return a is not b"]),
        ("return a in b", ["return a not in b"]),
        ("return a < b > c", ["return a <= b > c", "return a < b >= c"]),
        ("return a or b", ["return a and b", "return not a or b", "return a or not b"]),
        ("return not a", ["return a"]),
        ("return a + b", ["return a - b"]),
        ("return a + 'text'", []),
        ("return 2", ["return 3"]),
        ("return True", ["return False"]),
        ("return min(a)", ["return max(a)"]),
        ("return g(x=a)", ["return g()"]),
        ("return {'x': a}", ["return {}"]),
        ("g(a)", ["pass"]),
        ("log.info(a)", []),
        ("a.b = c", ["pass"]),
        ("raise a", ["pass"]),
        ("a = b", []),
        ("a: int = b", []),
    ],
)
def test_a_mutation_changes_one_token_or_leaves_one_part_out(
    line: str, expected: list[str]
) -> None:
    found = [each.partition("\n    ")[2] for each in changes(f"def f():\n    {line}")]
    assert found == expected


def test_a_condition_is_negated_and_a_constant_of_a_module_changes() -> None:
    source = """
    A: Final = 5.0
    class C:
        b: int = 3
        def f(self, c=4):
            if self.a:
                return
            give(c)
    """
    names = [each.name for each in mutations("any", dedent(source).strip())]
    assert names == [
        "any (module): 5.0  ->  6.0",
        "any C.f: self.a  ->  not self.a",
        "any C.f: give(c)  ->  pass",
    ]


def test_a_mutation_of_the_library_compiles_and_is_one() -> None:
    before = ast.dump(ast.parse(path_of(MODULE).read_text()))
    for each in mutations(MODULE):
        assert ast.dump(mutated(each)) != before, each.name
        compile(mutated(each), MODULE, "exec")


def in_a_fork(work: Callable[[], bool]) -> bool:
    """Whether *work* is true in a process that ends afterwards."""
    pid = os.fork()
    if not pid:
        code = 2
        try:
            code = not work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def one(function: str, old: str, module: str = MODULE) -> Mutation:
    (found,) = [each for each in mutations(module) if (each.function, each.old) == (function, old)]
    return found


def test_a_mutation_of_a_function_is_seen_by_who_has_imported_it() -> None:
    mutation = one("renewal_due", "sent + ttl / RENEWALS_PER_TTL")
    imported = deadlines.renewal_due
    before = imported(100.0, 9.0)

    def changed() -> bool:
        apply(mutation, imported_functions())
        return imported(100.0, 9.0) == 200.0 - before

    assert in_a_fork(changed)
    assert imported(100.0, 9.0) == before


def test_a_mutation_of_a_constant_is_seen_by_who_has_imported_it() -> None:
    mutation = one("", "10.0")

    def changed() -> bool:
        apply(mutation, imported_functions())
        return bool(vars(process)["LONGEST_CONNECTION_TIMEOUT"] == 11.0)

    assert in_a_fork(changed)


def test_what_nobody_has_imported_is_an_error() -> None:
    mutation = one("renewal_due", "sent + ttl / RENEWALS_PER_TTL")
    with pytest.raises(LookupError, match="is imported"):
        apply(replace(mutation, function="nobody"), imported_functions())


@pytest.mark.timeout(600)
def test_the_command_tells_what_survives() -> None:
    """One mutation is noticed by a test, the other is reached by none."""
    argv = [sys.executable, "-m", "tests.mutants", "--seeds", "0"]
    argv += ["--tests", "tests/unit/test_claim_rules.py"]
    argv += ["--only", "claim refusal: row.state is State.DONE  ->"]
    argv += ["--only", "deadlines renewal_due: sent + ttl"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 by a test" in done.stdout
    assert "survives (0 tests): celery_leases.deadlines renewal_due" in done.stdout
