"""The judge's side of objects that live in the solution process.

One rule keeps a verdict from being forged: a value of the tests never decides anything inside
the solution. A stand-in is unequal to all plain data, its operators work only when its class is
one the tests asked for by name, and answers that decide must be of the exact builtin type.
"""

import builtins

# On an object whose class the tests do not know, these would let it answer for itself.
PREDICATES = ("startswith", "endswith", "isdisjoint", "issubset", "issuperset")


class Lost(BaseException):
    """The solution is gone or off the protocol: no test may catch this and go on."""


class Remote:
    """Stand-in for one object; ``known`` means its class is an entry point."""

    def __init__(self, judge, number, known):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_known", known)

    def _ask(self, name, *arguments, exact=None, swap=False):
        result = self._judge.ask(
            {"do": "op", "h": self._number, "n": name, "swap": swap}, arguments, {}
        )
        if exact is not None and type(result) is not exact:
            raise TypeError(f"{name} of a solution object gave no {exact.__name__}")
        return result

    def _need_known(self, what):
        if not self._known:
            raise TypeError(f"{what} on an object of a class that is no entry point")

    def __call__(self, *arguments, **keywords):
        return self._judge.ask({"do": "call", "h": self._number}, arguments, keywords)

    def __getattr__(self, name):
        if not self._known and (name in PREDICATES or name.startswith(("is", "__"))):
            raise AttributeError(name)
        return self._judge.ask({"do": "attr", "h": self._number, "n": name})

    def __setattr__(self, name, value):
        self._need_known("setting an attribute")
        self._judge.ask({"do": "setattr", "h": self._number, "n": name}, (value,), {})

    def __eq__(self, other):
        if self is other:
            return True
        return isinstance(other, Remote) and self._ask("eq", other, exact=bool)

    def __ne__(self, other):
        return not isinstance(other, Remote) or self._ask("ne", other, exact=bool)

    def __hash__(self):
        return self._ask("hash", exact=int)

    def __contains__(self, item):
        if self._known:
            return self._ask("contains", item, exact=bool)
        return any(item == own for own in self)

    def __iter__(self):
        return self._ask("iter")

    def __next__(self):
        return self._ask("next")

    def __getitem__(self, key):
        return self._ask("getitem", key)

    def __setitem__(self, key, value):
        self._need_known("item assignment")
        self._ask("setitem", key, value)

    def __delitem__(self, key):
        self._need_known("item deletion")
        self._ask("delitem", key)

    def __enter__(self):
        self._need_known("with")
        return self._judge.ask({"do": "method", "h": self._number, "n": "__enter__"}, (), {})

    def __exit__(self, *exception):
        nothing = (None, None, None)
        self._judge.ask({"do": "method", "h": self._number, "n": "__exit__"}, nothing, {})


class Inert(Remote):
    """An object of a class that the tests use but the task does not name: something to build and
    hand to an entry point. It has no say in any comparison.
    """

    def __getattr__(self, name):
        return self._judge.inert({"do": "attr", "h": self._number, "n": name})

    def __setattr__(self, name, value):
        self._judge.ask({"do": "setattr", "h": self._number, "n": name}, (value,), {})

    def _ask(self, name, *arguments, exact=None, swap=False):
        raise TypeError(f"{name} on an object of a class that is no entry point")

    def __eq__(self, other):
        return self is other

    def __ne__(self, other):
        return self is not other

    def __hash__(self):
        return id(self)

    def __call__(self, *arguments, **keywords):
        raise TypeError("calling an object of a class that is no entry point")


class HelperClass(Inert):
    """Such a class itself: it may be called, for an object of its own."""

    def __setattr__(self, name, value):
        raise TypeError("changing a class that is no entry point")

    def __call__(self, *arguments, **keywords):
        return self._judge.inert({"do": "call", "h": self._number}, arguments, keywords)


class RemoteClass(Remote):
    """A class of the solution; usable in isinstance."""

    def __instancecheck__(self, value):
        if not isinstance(value, Remote):
            return False
        message = {"do": "isinstance", "h": self._number}
        return self._judge.ask(message, (value,), {}) is True


def _claim(name, exact):
    return lambda self: self._ask(name, exact=exact)


def _binary(name, exact, swap=False):
    def operator(self, other):
        self._need_known(f"operator {name}")
        return self._ask(name, other, exact=exact, swap=swap)

    return operator


for _name, _exact in (
    ("len", int), ("str", str), ("repr", str), ("bool", bool), ("int", int), ("float", float),
    ("index", int), ("abs", None), ("neg", None), ("pos", None), ("invert", None),
    ("reversed", None),
):  # fmt: skip
    setattr(Remote, f"__{_name}__", _claim(_name, _exact))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _binary(_name, bool))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift",
              "rshift", "and_", "or_", "xor"):  # fmt: skip
    _dunder = _name.rstrip("_")
    setattr(Remote, f"__{_dunder}__", _binary(_name, None))
    setattr(Remote, f"__r{_dunder}__", _binary(_name, None, swap=True))


def local_exception(names, arguments, text, own_classes):
    """The judge's own exception for one raised over there, or Lost for an attempt to leave.

    ``names`` are builtin base names as claimed, ``own_classes`` the local classes made for the
    solution's exception classes among the entry points; ``arguments`` are used when they print
    as ``text``.
    """
    builtin = [getattr(builtins, name, None) for name in names if isinstance(name, str)]
    kinds = [k for k in builtin if isinstance(k, type) and issubclass(k, Exception)]
    for kind in own_classes + kinds:
        for given in (arguments, [text]):
            try:
                error = kind(*given)
            except TypeError:  # UnicodeDecodeError and its kin want five arguments
                continue
            if given is not arguments or str(error) == text:
                return error
    return Lost("early_exit")
