"""What the source tree must look like: who imports whom, and how large things may grow.

Every rule is a function from sources to complaints, and each is shown a planted fault as well, so
that none of them can pass by looking at nothing.
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sage_jax"
SOURCES = {str(p.relative_to(PACKAGE)): p.read_text() for p in sorted(PACKAGE.rglob("*.py"))}

# A unit is a module of sage_jax or a package in it. It imports itself and units of rows above its
# own, never one beside it.
LAYERS = (
    ("spelling",),
    ("config", "core", "verify"),
    ("tasks", "models", "recipes", "overrides"),
    ("roles",),
    ("report", "rollout", "learn"),
    ("methods",),
    ("evaluate", "runtime"),
    ("resume",),
    ("run", "offline", "sft"),
    ("startup", "train", "dryrun"),
    ("modes",),
    ("main",),
)
# Host code that must start in milliseconds and can never hold a device array.
JAX_FREE = ("spelling", "config", "overrides", "verify", "tasks", "roles", "report", "main")
JAX_FREE_MODULES = ("learn/advantages.py", "learn/pack.py", "core/rng.py")
JAX_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}

# What runs here was written elsewhere, and whatever it raises is a result.
FOREIGN_CODE = ("verify/box/", "verify/math.py")
# The named files of /tmp are canaries of the sandbox tests.
USER_FOLDER = re.compile(
    r"(?<![\w.~/])/(?:home|root|Users|work|scratch)/\w|/tmp/(?!sagecanary|sbx-)\w"
)


@cache
def parsed(source):
    return ast.parse(source)


def unit(path):
    return path.removesuffix(".py").split("/")[0]


def imported(source):
    """Dotted names of everything a file imports, inside functions too; '.' for a relative one."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield "."
            elif node.module == "sage_jax":
                yield from (f"sage_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def layering(sources):
    rank = {name: row for row, names in enumerate(LAYERS) for name in names}
    for path, source in sources.items():
        me = unit(path)
        if me == "__init__":
            continue
        if me not in rank:
            yield f"{path}: give {me} a row in LAYERS"
            continue
        for name in imported(source):
            if name == ".":
                yield f"{path}: a relative import hides which unit it reaches"
            elif name.startswith("sage_jax."):
                other = name.split(".")[1]
                if other != me and rank.get(other, len(LAYERS)) >= rank[me]:
                    yield f"{path}: {me} may not import {other}"


def host_code_imports_no_jax(sources):
    for path, source in sources.items():
        if unit(path) in JAX_FREE or path in JAX_FREE_MODULES:
            for name in imported(source):
                if name.split(".")[0] in JAX_LIBRARIES:
                    yield f"{path}: imports {name}"


def file_sizes(sources):
    limits = {"train.py": 200}
    for path, source in sources.items():
        lines, limit = source.count("\n"), limits.get(path, 420)
        if lines > limit:
            yield f"{path}: {lines} lines, at most {limit}"


def file_names(sources):
    for path in sources:
        if re.search(r"(^|/)(utils?|helpers?|common|misc)(\.py|/)", path):
            yield f"{path}: name it for what it does"


def function_sizes(sources):
    """Jitted functions at most 50 lines, main() at most 30, decorators left out."""
    for path, source in sources.items():
        tree = parsed(source)
        jitted = jitted_names(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if node.name in jitted and lines > 50:
                    yield f"{path}: jitted {node.name} has {lines} lines, at most 50"
                if (path, node.name) == ("main.py", "main") and lines > 30:
                    yield f"{path}: main() has {lines} lines, at most 30"


def jitted_names(tree):
    """Functions under a jit decorator or handed to jax.jit by name, as in jax.jit(self._step)."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if any("jax.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                names.add(node.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.jit" and node.args:
            names.add(ast.unparse(node.args[0]).split(".")[-1])
    return names


def broad_handlers(sources):
    """No handler for everything, but one that passes it on."""
    for path, source in sources.items():
        if path.startswith(FOREIGN_CODE):
            continue
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.unparse(node.type) if node.type else "BaseException"
                if re.search(r"\b(Base)?Exception\b", kinds):
                    if not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None):
                        yield f"{path}:{node.lineno}: name the exceptions that are expected here"


def machine_paths(sources):
    for path, source in sources.items():
        for match in USER_FOLDER.finditer(source):
            yield f"{path}: {match[0]}... is a folder of one machine"


RULES = {
    layering: {"learn/extra.py": "def f():\n    from sage_jax.methods import sage"},
    host_code_imports_no_jax: {"report/extra.py": "def f():\n    import jax.numpy as jnp"},
    file_sizes: {"train.py": "x = 1\n" * 201},
    file_names: {"core/utils.py": ""},
    function_sizes: {"learn/extra.py": "@jax.jit\ndef step():\n" + "    x = 1\n" * 50},
    broad_handlers: {"core/extra.py": "try:\n    f()\nexcept (OSError, Exception):\n    pass"},
    machine_paths: {"core/extra.py": f"DATA = '/{'home'}/someone/data'"},
}
MORE_FAULTS = [
    (layering, {"rollout/extra.py": "import sage_jax.learn.score"}),
    (layering, {"core/extra.py": "from . import mesh"}),
    (layering, {"unknown.py": ""}),
    (file_sizes, {"core/extra.py": "x = 1\n" * 421}),
    (function_sizes, {"main.py": "def main(argv):\n" + "    x = 1\n" * 30}),
    (
        function_sizes,
        {"core/extra.py": "run = jax.jit(self._step)\ndef _step():\n" + "    x = 1\n" * 50},
    ),
    (broad_handlers, {"core/extra.py": "try:\n    f()\nexcept:\n    g()"}),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_tree_obeys(rule):
    assert list(rule(SOURCES)) == []


@pytest.mark.parametrize(
    ("rule", "fault"), [*RULES.items(), *MORE_FAULTS], ids=lambda x: getattr(x, "__name__", "")
)
def test_a_planted_fault_is_seen(rule, fault):
    assert len(list(rule(fault))) == 1


def test_the_rules_look_at_every_unit_and_at_the_jitted_functions():
    rows = [name for names in LAYERS for name in names]
    assert sorted(rows) == sorted({unit(path) for path in SOURCES} - {"__init__"})
    jitted = {name for source in SOURCES.values() for name in jitted_names(parsed(source))}
    assert jitted >= {"prefill", "insert", "decode", "_accumulate", "_finish", "_score_micro"}


def test_texts_name_no_folder_of_one_machine():
    kinds = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ""}
    folders = [ROOT / name for name in ("configs", "docs", "tests", ".ci")]
    files = [p for f in folders for p in f.rglob("*") if p.suffix in kinds and p.is_file()]
    files += [p for p in ROOT.iterdir() if p.suffix in kinds and p.is_file() and p.name != ".git"]
    texts = {str(p.relative_to(ROOT)): p.read_text() for p in files if "__pycache__" not in p.parts}
    assert {"Makefile", "setup.py", "configs/tiny.py"} <= texts.keys()
    assert list(machine_paths(texts)) == []


def test_host_code_and_every_config_load_without_jax():
    # The box holds scripts of another process, which import each other as siblings.
    modules = [
        "sage_jax." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in SOURCES
        if (unit(path) in JAX_FREE or path in JAX_FREE_MODULES)
        and not path.startswith("verify/box/")
        and not path.endswith("__main__.py")
    ]
    assert {"sage_jax.roles", "sage_jax.tasks.pool", "sage_jax.verify.pool"} <= set(modules)
    configs = [str(path) for path in sorted((ROOT / "configs").glob("*.py"))]
    assert configs
    program = f"""
import importlib, runpy, sys
for name in {modules}:
    importlib.import_module(name)
for path in {configs}:
    runpy.run_path(path)["get_config"]().to_dict()
print(sorted({JAX_LIBRARIES} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
