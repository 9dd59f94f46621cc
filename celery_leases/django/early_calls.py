"""Calls of leased tasks that a module of the project publishes inside a transaction, found in its
source. A worker may run such a call before the transaction is committed.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import resolve_name
from types import ModuleType
from typing import Any, Final

from celery_leases.task import LeasedMixin

_PUBLISHING: Final = ("delay", "apply_async")
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def early_calls(module: ModuleType, source: bytes, *, in_requests: bool) -> Iterator[str]:
    """The calls, such as ``charge.delay() in line 7``.

    A call is early inside ``atomic()``, and with *in_requests* (``ATOMIC_REQUESTS``) in every
    function that is not marked ``non_atomic_requests``. What is given to ``on_commit()`` is not.
    """
    tree = ast.parse(source)
    deferred = {
        ast.unparse(given)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _name(call.func) == "on_commit"
        for given in call.args
        if isinstance(given, ast.Name)
    }
    names = vars(module) | dict(_imported_in_functions(tree, module))
    yield from _within(tree, names, deferred, in_requests=in_requests, early=False)


def _imported_in_functions(tree: ast.AST, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            found = None
            with suppress(ImportError):  # the function has not run, and would fail
                found = sys.modules.get(resolve_name(origin, module.__package__))
            for each in node.names:
                yield each.asname or each.name, getattr(found, each.name, None)


def _within(
    node: ast.AST, names: Mapping[str, Any], deferred: set[str], *, in_requests: bool, early: bool
) -> Iterator[str]:
    if isinstance(node, ast.Call) and _name(node.func) == "on_commit":
        return
    if isinstance(node, _Function):
        marks = {_name(mark) for mark in getattr(node, "decorator_list", ())}
        if "non_atomic_requests" in marks or getattr(node, "name", None) in deferred:
            return
        early = early or in_requests or "atomic" in marks
    if isinstance(node, ast.With) and any(
        _name(item.context_expr) == "atomic" for item in node.items
    ):
        early = True
    if early and (called := _leased_call(node, names)) is not None:
        yield called
    for child in ast.iter_child_nodes(node):
        yield from _within(child, names, deferred, in_requests=in_requests, early=early)


def _leased_call(node: ast.AST, names: Mapping[str, Any]) -> str | None:
    if not (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _PUBLISHING
    ):
        return None
    found = _value(node.func.value, names)
    if not isinstance(found, LeasedMixin):
        return None
    return f"{ast.unparse(node.func)}() in line {node.lineno}"


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """The object that a name or an attribute means."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        with suppress(Exception):  # a property may raise anything
            return getattr(_value(node.value, names), node.attr, None)
    return None


def _name(node: ast.AST) -> str | None:
    """The last part of the name of what is called, or used as a decorator."""
    if isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
