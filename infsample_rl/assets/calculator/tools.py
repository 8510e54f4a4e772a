"""The tool of the experiment calculator_smollm2."""

from __future__ import annotations

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LARGEST = 10**15


def calculate(expression: str) -> str:
    """Works out an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses.
    """
    value = _value(ast.parse(str(expression).strip(), mode="eval").body)
    return str(int(value) if value == int(value) else value)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        found: float = OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_value(node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        found = node.value
    else:
        raise ValueError("an expression has numbers, + - * / and parentheses alone")
    if abs(found) > LARGEST:
        raise ValueError(f"numbers up to {LARGEST:.0e} alone")
    return found
