"""Which settings a source tree reads, traced by the types of what they are read from, never by their names alone.

Known are a parameter with an annotation (`config: Config`, `rollout: RolloutConfig`), what a function annotated so
returns, an alias (`rollout = config.rollout`), an attribute that was given one of them (`self._config = config`), and
any chain of these. What the settings' own classes read counts where a property does it that is read itself; checks of
bounds and contradictions do not count.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

Read = tuple[str, str]  # class and field or property
Types = dict[str, set[str]]  # name -> classes of settings that it may be

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def unread_settings(own: Iterable[str], sources: Iterable[str]) -> list[str]:
    """Names `section.field` that no source reads. `own`: sources of the settings' classes, of which Config has the
    sections as fields."""
    tracer = _Tracer([ast.parse(text) for text in own], [ast.parse(text) for text in sources])
    read = tracer.reads()
    return [
        f"{section}.{field}"
        for section, kinds in tracer.schema["Config"].items()
        for field in tracer.schema[next(iter(kinds))]
        if (next(iter(kinds)), field) not in read
    ]


class _Tracer:
    def __init__(self, own: list[ast.Module], sources: list[ast.Module]) -> None:
        self._own = [node for tree in own for node in tree.body if isinstance(node, ast.ClassDef)]
        self._sources = sources
        self._names = {node.name for node in self._own}
        self.schema: dict[str, Types] = {
            node.name: {
                line.target.id: self._annotated(line.annotation)
                for line in node.body
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
            }
            for node in self._own
        }
        nodes = [node for tree in [*own, *sources] for node in ast.walk(tree)]
        self._returned: Types = defaultdict(set)  # function -> classes
        for node in nodes:
            if isinstance(node, FUNCTIONS):
                self._returned[node.name] |= self._annotated(node.returns)
        self._attributes: Types = defaultdict(set)  # of objects of other classes, by name
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name not in self._names:
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        self._attributes[line.target.id] |= self._annotated(line.annotation)

    def reads(self) -> set[Read]:
        """Fields and properties that are read, those too that a property reads which is read."""
        while True:  # an attribute that is found to be a setting's class may make others one
            before = sum(map(len, self._attributes.values()))
            found = {read for tree in self._sources for read in self._block(tree.body, {})}
            if sum(map(len, self._attributes.values())) == before:
                break
        properties = {
            (node.name, line.name): set(self._block(line.body, {"self": {node.name}}))
            for node in self._own
            for line in node.body
            if isinstance(line, ast.FunctionDef)
            and any(ast.unparse(mark) == "property" for mark in line.decorator_list)
        }
        while missing := {inner for read in found for inner in properties.get(read, ())} - found:
            found |= missing
        return found

    def _annotated(self, annotation: ast.expr | None) -> set[str]:
        return set() if annotation is None else self._names & set(re.findall(r"\w+", ast.unparse(annotation)))

    def _block(self, body: list[ast.stmt], types: Types) -> Iterator[Read]:
        """Reads of statements in order; an inner function knows what is known where it stands."""
        for statement in body:
            yield from self._statement(statement, types)

    def _statement(self, node: ast.AST, types: Types) -> Iterator[Read]:
        if isinstance(node, (*FUNCTIONS, ast.Lambda)):
            inner = dict(types)
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                if argument.arg not in ("self", "cls"):
                    inner[argument.arg] = self._annotated(argument.annotation)
            yield from (
                self._block(node.body, inner) if isinstance(node, FUNCTIONS) else self._statement(node.body, inner)
            )
            return
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            for kind in self._classes(node.value, types):
                yield kind, node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and len(node.args) > 1:
            pattern = _pattern(node.args[1])
            for kind in self._classes(node.args[0], types):
                yield from ((kind, field) for field in self.schema[kind] if re.fullmatch(pattern, field))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value, types)
        for child in ast.iter_child_nodes(node):
            yield from self._statement(child, types)

    def _assign(self, target: ast.expr, value: ast.expr, types: Types) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, types)
        elif isinstance(target, ast.Name):
            types[target.id] = self._classes(value, types)
        elif isinstance(target, ast.Attribute):
            self._attributes[target.attr] |= self._classes(value, types)

    def _classes(self, node: ast.expr, types: Types) -> set[str]:
        """The settings' classes that an expression may be."""
        if isinstance(node, ast.Name):
            return types.get(node.id, set())
        if isinstance(node, ast.IfExp):
            return self._classes(node.body, types) | self._classes(node.orelse, types)
        if isinstance(node, ast.BoolOp):
            return set().union(*(self._classes(value, types) for value in node.values))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in self._names:
                return {name}
            return self._classes(node.args[0], types) if name == "replace" and node.args else self._returned[name]
        if not isinstance(node, ast.Attribute):
            return set()
        kinds = self._classes(node.value, types)
        if kinds:
            return set().union(*(self.schema[kind].get(node.attr, set()) for kind in kinds))
        return self._attributes[node.attr]


def _pattern(name: ast.expr) -> str:
    """What the name that getattr() is given may be: f"{role}_gpus" -> ".*_gpus"; of one that is worked out: nothing."""
    if isinstance(name, ast.Constant):
        return re.escape(str(name.value))
    if isinstance(name, ast.JoinedStr) and any(isinstance(part, ast.Constant) for part in name.values):
        return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in name.values)
    return ""
