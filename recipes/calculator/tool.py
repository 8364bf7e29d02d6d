"""Calculate for the model of the calculator recipe."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

LONGEST = 50
"""Characters in an expression: no product of so few digits is large."""

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """Work out a sum, a difference or a product of whole numbers.

    Args:
        expression: such as 12*34+5.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> int:
    """Walks over what Python has parsed, and runs nothing: a model may write any expression."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only whole numbers with + - *")
