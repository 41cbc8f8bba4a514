"""The trusted tests of one task, as the judge reads them: once, however many programs it serves."""

import ast
import builtins
import math
import re

from compare import parse_input

# Modules that tests use without importing them: many data sets leave that to the solution.
STANDARD = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools math "
    "operator random re statistics string sys"
).split()
# Of those, and of all others, the ones that hold no state a test could change by using them.
STATELESS = frozenset(
    "bisect cmath collections copy datetime fractions functools heapq itertools math re statistics "
    "string typing".split()
)
REACHING = frozenset(
    "__import__ breakpoint compile delattr eval exec getattr globals input locals open setattr "
    "vars".split()
)


class Tests:
    """``plan`` as it came; ``shareable`` tells whether one judge may serve several programs."""

    def __init__(self, plan):
        self.plan = plan
        self._codes, self._pairs = {}, None
        self.expect_stop = any("StopIteration" in chunk for chunk in plan.get("chunks", ()))
        self.modules, self.loose = [], []
        self._given = ast.Module([], [])
        trees = []
        if plan["mode"] == "asserts":
            self.modules = standard_modules(plan["chunks"])
            trees = parsed(plan["chunks"]) or []
            self.loose = sorted(loose_names(trees) - set(plan["entry_points"]) - set(self.modules))
        if self.loose:
            self._given = definitions(plan.get("given", ()), self.loose)
        self.shareable = shareable(plan, self.modules, [*trees, self._given])

    def add_given(self, names):
        """Add to ``names`` what the tests use and the task's own text defines."""
        exec(compile(self._given, "given", "exec", dont_inherit=True), names)

    def code(self, number):
        """Compiled chunk ``number``; raises what compiling raises."""
        if number not in self._codes:
            chunk = self.plan["chunks"][number]
            self._codes[number] = compile(chunk, f"tests-{number}", "exec", dont_inherit=True)
        return self._codes[number]

    def pairs(self):
        """Arguments, as (positional, keywords), and expected values of an io plan."""
        if self._pairs is None:
            wanted = [_literal(text) for text in self.plan["expected"]]
            form = self.plan.get("args_form", "sequence")
            self._pairs = [_arguments(text, form) for text in self.plan["args"]], wanted
        return self._pairs


def standard_modules(chunks):
    text = "\n".join(chunks)
    return [m for m in STANDARD if re.search(rf"(?<![\w.]){m}\.[a-z]", text)]


def parsed(chunks):
    """Syntax trees, None if a chunk has no syntax."""
    try:
        return [ast.parse(chunk) for chunk in chunks]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def loose_names(trees):
    """Names that tests use and neither they nor the language define: helpers beside the entry
    point. Functions have to come from a text of the task, classes may come from the solution.
    """
    used, bound = set(), set(dir(builtins))
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            bound.add(node.name)
    return {name for name in used - bound if not name.startswith("__")}


def definitions(texts, names):
    """The functions called ``names`` and the imports of the first text that is a program with
    such functions.
    """
    for text in texts:
        trees = parsed([text])
        body = trees[0].body if trees else []
        wanted = [n for n in body if isinstance(n, ast.FunctionDef) and n.name in names]
        if wanted:
            imports = [n for n in body if isinstance(n, ast.Import | ast.ImportFrom)]
            return ast.Module([*imports, *wanted], [])
    return ast.Module([], [])


def shareable(plan, modules, trees):
    """Whether running the tests cannot leave anything behind in the process.

    Pairs of values, expected output and inputs of a reference cannot. Asserts run with new globals
    each time; they are taken when they use only stateless modules, set no attributes, and reach for
    no inner names. Anything doubtful gets a judge of its own for every program.
    """
    if plan["mode"] in ("io", "stdout", "reference"):
        return True
    if plan["mode"] != "asserts" or not STATELESS.issuperset(modules):
        return False
    if len(trees) <= len(plan["chunks"]):
        return False  # one of them has no syntax
    return all(_harmless(node) for tree in trees for node in ast.walk(tree))


def _harmless(node):
    if isinstance(node, ast.Name):
        return node.id not in REACHING and (not node.id.startswith("__"))
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in STATELESS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        inner = any(alias.name.startswith("_") for alias in node.names)
        return not node.level and (node.module or "").split(".")[0] in STATELESS and not inner
    return True


def _literal(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):  # data sets also write inf, nan and 'a' * 3
        return eval(text, {"inf": math.inf, "nan": math.nan})


def _arguments(text, form):
    if form == "input":
        return parse_input(text), {}
    if form == "call":
        scope = {"inf": math.inf, "nan": math.nan, "_call": lambda *a, **k: (a, k)}
        return eval(f"_call({text})", scope)
    return tuple(_literal(text)), {}
