"""The sizes of a task's inputs, read from its file without running it."""

import ast


def sizes_of(code: str) -> str:
    """A text that is equal for two tasks of equal inputs: `get_inputs` with the file's constants put in their places.

    A file whose inputs can't be read so (no `get_inputs`, no Python) stands for itself: it equals no other.
    """
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return code
    made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "get_inputs"]
    if not made:
        return code
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = Constants(constants).visit(node.value)
    return "\n".join(ast.unparse(Constants(constants).visit(node)) for node in made[0].body)


class Constants(ast.NodeTransformer):
    """Puts values in the places of names."""

    def __init__(self, values: dict[str, ast.Constant]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)
