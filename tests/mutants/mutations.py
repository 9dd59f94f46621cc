"""The mutations of a module: each changes one token, or leaves one statement or argument out.

A mutation is applied to functions that are already imported, by exchanging their code, and to
constants of a module in every module that has imported them. So a process that has collected all
tests can be forked for each mutation. Annotations, texts, default values and bodies of classes are
not mutated.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_LEFT_OUT = ("logger", "log", "_log", "warnings", "assert_never")
"""Calls that only write to a log, or are never reached."""
LONGEST = 90


@dataclass(frozen=True)
class Mutation:
    """One change of *module*, in the function *function*, or in the module itself if that is empty.

    *number* counts the mutations of the module. *old* and *new* are what is changed, as source.
    """

    module: str
    function: str
    number: int
    first_line: int
    last_line: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """What identifies it as long as the changed text stays the same."""
        return f"{self.module} {self.function or '(module)'}: {self.old}  ->  {self.new}"


def path_of(module: str) -> Path:
    """The file of a module of this package."""
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


def mutations(module: str, source: str | None = None) -> list[Mutation]:
    """All mutations of a module, in the order of its text; *source*: instead of its file."""
    places = _places_of(module) if source is None else _Places(ast.parse(source))
    return [
        Mutation(module, each.function, number, *each.lines, each.old, each.new)
        for number, each in enumerate(places.found)
    ]


def mutated(mutation: Mutation, source: str | None = None) -> ast.Module:
    """The tree of the module with the mutation in it."""
    text = path_of(mutation.module).read_text() if source is None else source
    return _changed(_Places(ast.parse(text)), mutation)


@cache
def _places_of(module: str) -> _Places:
    return _Places(ast.parse(path_of(module).read_text()))


def _changed(places: _Places, mutation: Mutation) -> ast.Module:
    places.found[mutation.number].change()
    return ast.fix_missing_locations(places.tree)


Functions = dict[tuple[str, str, int], list[FunctionType]]
"""The imported functions by module, qualified name and first line."""


def imported_functions() -> Functions:
    """All functions that are imported. To look for them takes a second."""
    found: Functions = {}
    gc.unfreeze()
    for each in gc.get_objects():
        if type(each) is FunctionType:
            code = each.__code__
            place = (each.__module__, code.co_qualname, code.co_firstlineno)
            found.setdefault(place, []).append(each)
    gc.freeze()
    return found


def apply(mutation: Mutation, functions: Functions) -> None:
    """Put the mutation into the imported module; there is no way back in this process.

    Raises ``LookupError`` if nothing was changed, as in a function that nobody has imported.
    """
    tree = _changed(_places_of(mutation.module), mutation)
    if not mutation.function:
        _apply_to_constant(mutation, tree)
        return
    outer = mutation.function.partition(".<locals>")[0]
    code = compile(tree, str(path_of(mutation.module)), "exec", dont_inherit=True)
    changed = 0
    for other in _codes(code):
        if other.co_qualname.partition(".<locals>")[0] == outer:
            place = (mutation.module, other.co_qualname, other.co_firstlineno)
            for each in functions.get(place, []):  # or those that it has returned before
                each.__code__ = other
                changed += 1
    if not changed:
        raise LookupError(f"no function {outer} of {mutation.module} is imported")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _apply_to_constant(mutation: Mutation, tree: ast.Module) -> None:
    module = sys.modules[mutation.module]
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if statement.lineno != mutation.first_line or not isinstance(targets[0], ast.Name):
                continue
            expression = ast.Expression(statement.value)
            value = eval(compile(expression, "", "eval"), vars(module))  # noqa: S307 - our source
            name, old = targets[0].id, getattr(module, targets[0].id)
            for other in list(sys.modules.values()):
                if getattr(other, "__dict__", {}).get(name, _MISSING) is old:
                    setattr(other, name, value)
            return
    raise LookupError(f"no constant in line {mutation.first_line} of {mutation.module}")


_MISSING = object()


@dataclass
class _Place:
    function: str
    lines: tuple[int, int]
    old: str
    new: str
    change: Callable[[], Any]


class _Places:
    """Finds all places of a tree, always in the same order."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.found: list[_Place] = []
        self._function = ""
        self._lines = (0, 0)
        self._block(tree.body, "")

    # -- statements ----------------------------------------------------------------------------

    def _block(self, body: list[ast.stmt], function: str) -> None:
        for index, statement in enumerate(body):
            self._statement(body, index, statement, function)

    def _statement(
        self, body: list[ast.stmt], index: int, statement: ast.stmt, function: str
    ) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._block(statement.body, _inside(function, statement))
            return
        in_class = function.endswith("(class)")
        if in_class or (not function and not isinstance(statement, ast.Assign | ast.AnnAssign)):
            return
        self._function = function
        self._lines = (statement.lineno, _last_line_of_head(statement))
        if function and _may_be_left_out(statement):
            old = ast.unparse(statement)
            self._add(old, "pass", lambda: body.__setitem__(index, _pass(statement)))
        for field, value in ast.iter_fields(statement):
            if field == "annotation" or (field == "targets" and not function):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.expr):
                    self._expression(each, statement, field)
                elif isinstance(each, ast.withitem):
                    self._expression(each.context_expr, each, "context_expr")
                elif isinstance(each, ast.match_case) and each.guard is not None:
                    self._lines = (each.pattern.lineno, each.guard.end_lineno or 0)
                    self._expression(each.guard, each, "guard")
        for inner in _blocks(statement):
            self._block(inner, function)

    # -- expressions ---------------------------------------------------------------------------

    def _expression(self, node: ast.expr, parent: ast.AST, field: str) -> None:
        self._changes(node, parent, field)
        for name, value in ast.iter_fields(node):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.expr):
                    self._expression(each, node, name)
                elif isinstance(each, ast.keyword):
                    self._expression(each.value, each, "value")
                elif isinstance(each, ast.comprehension):
                    self._expression(each.iter, each, "iter")
                    for condition in each.ifs:
                        self._expression(condition, each, "ifs")

    def _changes(self, node: ast.expr, parent: ast.AST, field: str) -> None:
        match node:
            case ast.Compare():
                for index, operator in enumerate(node.ops):
                    other = COMPARISONS[type(operator)]()
                    self._change(node, partial(node.ops.__setitem__, index, other))
            case ast.BoolOp():
                word = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                self._change(node, partial(setattr, node, "op", word))
            case ast.BinOp(left=left, right=right) if type(node.op) in OPERATORS:
                if not _is_text(left) and not _is_text(right):
                    operation = OPERATORS[type(node.op)]()
                    self._change(node, partial(setattr, node, "op", operation))
            case ast.Constant(value=int() | float() as value):
                changed = not value if isinstance(value, bool) else value + 1
                self._change(node, partial(setattr, node, "value", changed))
            case ast.Call():
                self._call(node)
            case ast.Dict():
                self._items(node)
            case ast.UnaryOp(op=ast.Not()):
                self._replace(node, node.operand, parent, field)
        decides = field in ("test", "ifs", "guard") or isinstance(parent, ast.BoolOp)
        if decides and isinstance(node, ast.Name | ast.Attribute | ast.Call):
            self._replace(node, ast.UnaryOp(ast.Not(), node), parent, field)

    def _call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
            self._change(node, partial(setattr, node.func, "id", FUNCTIONS[node.func.id]))
        called = ast.unparse(node.func)
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                given = f"{called}({keyword.arg}={ast.unparse(keyword.value)})"
                self._add(given, f"{called}()", partial(node.keywords.pop, index))

    def _items(self, node: ast.Dict) -> None:
        for index, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
            if isinstance(key, ast.Constant):
                item = f"{{{ast.unparse(key)}: {ast.unparse(value)}}}"
                self._add(item, "{}", partial(_pop_item, node, index))

    # -- how a change is noted -----------------------------------------------------------------

    def _replace(self, node: ast.expr, other: ast.expr, parent: ast.AST, field: str) -> None:
        def change() -> None:
            value = getattr(parent, field)
            if isinstance(value, list):
                value[value.index(node)] = other
            else:
                setattr(parent, field, other)

        self._add(ast.unparse(node), ast.unparse(other), change)

    def _change(self, node: ast.expr, change: Callable[[], Any]) -> None:
        """Note a change within *node*, and what it looks like then."""
        old = ast.unparse(node)
        copy = _Undo(node)
        change()
        new = ast.unparse(node)
        copy.restore()
        self._add(old, new, change)

    def _add(self, old: str, new: str, change: Callable[[], Any]) -> None:
        function = self._function
        old, new = _shortened(" ".join(old.split()), " ".join(new.split()))
        self.found.append(_Place(function, self._lines, old, new, change))


class _Undo:
    """The fields of a node and of the nodes directly below it, to be put back."""

    def __init__(self, node: ast.AST) -> None:
        nodes = [node, *ast.iter_child_nodes(node)]
        self._fields = [
            (each, name, list(value) if isinstance(value, list) else value)
            for each in nodes
            for name, value in ast.iter_fields(each)
        ]

    def restore(self) -> None:
        for node, name, value in self._fields:
            now = getattr(node, name)
            if isinstance(now, list):
                now[:] = value
            else:
                setattr(node, name, value)


def _inside(function: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The qualified name of what is defined in *function*; that of a class ends with a mark."""
    if function.endswith("(class)"):
        name = f"{function.removesuffix('(class)')}.{node.name}"
    else:
        name = f"{function}.<locals>.{node.name}" if function else node.name
    return f"{name}(class)" if isinstance(node, ast.ClassDef) else name


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for field in ("body", "orelse", "finalbody"):
        value = getattr(statement, field, None)
        if isinstance(value, list):
            yield value
    for handler in getattr(statement, "handlers", []):
        yield handler.body
    for case in getattr(statement, "cases", []):
        yield case.body


def _last_line_of_head(statement: ast.stmt) -> int:
    """The last line of a statement without the statements in it."""
    inner = [block[0].lineno for block in _blocks(statement) if block]
    last = statement.end_lineno or statement.lineno
    return max(statement.lineno, min([last, *(line - 1 for line in inner)]))


def _may_be_left_out(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call(func=called)):
            return not ast.unparse(called).startswith(NOT_LEFT_OUT)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
            return True
        case ast.AnnAssign(target=ast.Attribute(), value=ast.expr()):
            return True
        case ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            return True
    return False


def _pass(statement: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.Pass(), statement)


def _pop_item(node: ast.Dict, index: int) -> None:
    del node.keys[index], node.values[index]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _shortened(*texts: str) -> list[str]:
    """The texts from a little before where they begin to differ, if they are long."""
    same = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*texts, strict=False)))
    cut = same - LONGEST // 2 if max(map(len, texts)) > LONGEST and same > LONGEST // 2 else 0
    found = []
    for text in texts:
        shown = f"…{text[cut:]}" if cut else text
        found.append(shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…")
    return found
