"""What a Python training script says of its settings, read from its syntax tree: nothing of it is ever run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


class Unknown(ValueError):
    """A value that only running the script would give."""


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class the script names. Example: Name(name="correct", module=None) is defined in the script
    itself."""

    name: str
    module: str | None


@dataclass(slots=True)
class Call:
    """A call by its name. Example: Call(name="GRPOConfig", line=12, arguments=[], keywords={"beta": <ast>})"""

    name: str
    line: int
    arguments: list[ast.expr]
    keywords: dict[str, ast.expr] = field(default_factory=dict)


class Script:
    """The calls, names and attribute assignments of a script."""

    def __init__(self, text: str, label: str) -> None:
        """ValueError when the text is not Python."""
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ValueError(f"{label} is not Python: {error.msg} (line {error.lineno})") from None
        self.modules: dict[str, str] = {}  # imported name -> its module
        self.functions: set[str] = set()
        self.values: dict[str, ast.expr] = {}  # the last value a name is given
        # training_args.beta = 0.1 -> (training_args, beta, value, line)
        self.attributes: list[tuple[str, str, ast.expr, int]] = []
        self.calls: list[Call] = []
        for node in ast.walk(self.tree):
            self._enter(node)

    def _enter(self, node: ast.AST) -> None:
        if isinstance(node, ast.ImportFrom) and node.module:
            self.modules |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.add(node.name)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self.values[target.id] = node.value
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                self.attributes.append((target.value.id, target.attr, node.value, node.lineno))
        elif isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else node.func.id
                if isinstance(node.func, ast.Name)
                else ""
            )
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            self.calls.append(Call(name, node.lineno, list(node.args), keywords))

    @property
    def runs_when_imported(self) -> bool:
        """Whether a call of the trainer's train() stands outside every function and every `if`: importing the script
        would train."""
        calls = [
            node.value for node in self.tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ]
        return any(ast.unparse(call.func).endswith(".train") for call in calls)

    def calls_of(self, *names: str) -> list[Call]:
        """Calls by these names, in the order of their lines."""
        return sorted((call for call in self.calls if call.name in names), key=lambda call: call.line)

    def value(self, node: ast.expr) -> Any:
        """The value of literals, of names given one, of arithmetic and of torch dtypes; Unknown for anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                self.value(key): self.value(item)
                for key, item in zip(node.keys, node.values, strict=True)
                if key is not None
            }
        if isinstance(node, ast.Name):
            return self._of_name(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return node.attr
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):  # script_args.dataset_name or "openai/gsm8k"
            return self._first_known(node.values)
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(self.value(part.value if isinstance(part, ast.FormattedValue) else part)) for part in node.values
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            return {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg}
        raise Unknown(ast.unparse(node))

    def known(self, node: ast.expr) -> Any:
        """As value(), but what a dict holds beside is left out where it is unknown."""
        pairs: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.known(self.values[node.id])
        if isinstance(node, ast.Dict):
            pairs = [
                (self.value(key), item) for key, item in zip(node.keys, node.values, strict=True) if key is not None
            ]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
        else:
            return self.value(node)
        found = {}
        for key, item in pairs:
            try:
                found[key] = self.value(item)
            except Unknown:
                continue
        return found

    def names(self, node: ast.expr) -> list[Name]:
        """The functions a name or a list of names stands for; Unknown for what is no plain name."""
        if isinstance(node, (ast.List, ast.Tuple)):
            return [name for item in node.elts for name in self.names(item)]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [Name(node.value, "")]  # a reward model's path
        if isinstance(node, ast.Name):
            if node.id in self.values and node.id not in self.functions and node.id not in self.modules:
                return self.names(self.values[node.id])
            return [Name(node.id, self.modules.get(node.id))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return [Name(ast.unparse(node), self.modules.get(node.func.id))]
        raise Unknown(ast.unparse(node))

    def system_prompt_and_question(self) -> tuple[str | None, str | None]:
        """What [{"role": "system", "content": TEXT}, {"role": "user", "content": row["question"]}] says; None where
        there is no such thing."""
        system = question = None
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Dict):
                continue
            entries = {
                key.value: value
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            }
            role, content = entries.get("role"), entries.get("content")
            if not isinstance(role, ast.Constant) or content is None:
                continue
            if role.value == "system":
                try:
                    system = str(self.value(content))
                except Unknown:
                    continue
            elif (
                role.value == "user" and isinstance(content, ast.Subscript) and isinstance(content.slice, ast.Constant)
            ):
                question = str(content.slice.value)
        return system, question

    def _of_name(self, name: str) -> Any:
        if name not in self.values:
            raise Unknown(name)
        node = self.values.pop(name)  # a name that is given itself ends here
        try:
            return self.value(node)
        finally:
            self.values[name] = node

    def _first_known(self, nodes: list[ast.expr]) -> Any:
        for node in nodes:
            try:
                value = self.value(node)
            except Unknown:
                continue
            if value:
                return value
        raise Unknown(ast.unparse(nodes[0]))
