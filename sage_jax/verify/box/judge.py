"""The judge process: runs the trusted tests against stand-ins and owns the verdicts.

It starts with nothing of a solution in it, reads its tests after the fork, and answers on a socket
of its own. What it never sees from a solution is code. It may serve several solutions in turn, see
``checks.shareable``: all it keeps from one to the next are the tests as they were read, until it is
given others.
"""

import builtins
import importlib
import json
import os
import random
import resource
import signal
import struct
import time

from checks import Tests
from codec import CodecError, Connection, canonical, decode, encode
from compare import copy_back, literal, matches, parse_input
from remote import HelperClass, Inert, Lost, Remote, RemoteClass, local_exception
from wire import receive

BATCH = 32
REFUSALS = ("missing_entry_point", "result_too_large", "too_deep", "not_plain")
MAX_LITERAL = 4000
MAX_STDOUT = 8 << 20
MAX_GROWTH_KB = 64 << 10
PROGRESS_EVERY = 0.2


def main(link):
    """Serve one solution after another until the slot hangs up."""
    tests = None
    size = peak_kb()
    while True:
        request, descriptors = receive(link)
        if request is None:
            os._exit(0)
        # CPU seconds of this run alone; the default action of the signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, request["cpu"])
        if request["new_tests"]:
            with os.fdopen(descriptors.pop(), "rb") as handle:
                tests = Tests(json.load(handle))
            random.seed(0)
        assert tests is not None
        if tests.plan["mode"] == "stdout":
            result = check_stdout(tests.plan, request["case"], descriptors[1])
        else:
            result = Judge(Connection(descriptors[0]), tests, link).run()
        for number in descriptors:
            os.close(number)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reusable = tests.shareable and peak_kb() - size < MAX_GROWTH_KB
        text = (b"+" if reusable else b"-") + json.dumps(result).encode()
        link.sendall(struct.pack(">I", len(text)) + text)


def peak_kb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def verdict(name, reason=""):
    return {"verdict": name, "reason": reason}


def check_stdout(plan, case, fd):
    """Full equality of all lines; blanks at line ends and the end do not count."""
    parts, size = [], 0
    while part := os.read(fd, 1 << 16):
        size += len(part)
        if size > MAX_STDOUT:
            return verdict("error", "output_limit")
        parts.append(part)
    text = b"".join(parts).decode("utf-8", "replace")

    def lines(value):
        return [line.rstrip() for line in value.rstrip().splitlines()]

    got, want = lines(text), lines(plan["expected"][case])
    if got == want:
        return verdict("correct")
    atol = plan.get("atol") or 0
    if atol and len(got) == len(want):
        pairs = zip(" ".join(got).split(), " ".join(want).split(), strict=False)
        same_count = len(" ".join(got).split()) == len(" ".join(want).split())
        if same_count and all(a == b or _near_text(a, b, atol) for a, b in pairs):
            return verdict("correct")
    return verdict("wrong", "stdout_mismatch")


def _near_text(a, b, atol):
    try:
        return abs(float(a) - float(b)) <= atol
    except ValueError:
        return False


class Judge:
    def __init__(self, connection, tests, link):
        self._connection, self._tests, self._plan = connection, tests, tests.plan
        self._link, self._told = link, time.monotonic()
        self._remotes, self._exceptions, self._classes = {}, {}, set()
        self._helpers = set()
        self._callbacks = []
        self._lost = None  # sticky: a test that swallows it still cannot pass

    def run(self):
        action = {"asserts": self._asserts, "io": self._io, "probe": self._probe}.get(
            self._plan["mode"], self._reference
        )
        try:
            result = action()
        except Lost:
            result = None
        except CodecError as error:
            result = verdict("error", str(error))
        except EOFError:
            self._lost = verdict("error", "lost")
        return self._lost or result

    # --- modes ----------------------------------------------------------------------------

    def _asserts(self):
        names = {"__name__": "tests", "__builtins__": builtins}
        try:
            self._tests.add_given(names)
        except Exception:  # the task's own text is broken
            return verdict("error", "verifier_error")
        names.update(self._bind())
        if loose := [name for name in self._tests.loose if name not in names]:
            there = self.ask({"do": "classes", "of": loose})
            for name in there if type(there) is list else []:
                if name in loose:
                    names[name] = self._helper(name)
        for module in self._tests.modules:
            names.setdefault(module, importlib.import_module(module))
        for number in range(len(self._plan["chunks"])):
            try:
                exec(self._tests.code(number), names)
                if self._plan.get("check"):
                    names["check"](names[self._plan["check"]])
            except AssertionError:
                return verdict("wrong", "assertion_failed")
            except Exception as error:  # whatever a test can raise is a verdict
                return self._judge_exception(error)
            self._progress()
        return verdict("correct")

    def _progress(self):
        """Tell the slot, now and then, that another test has passed: its clock starts again."""
        now = time.monotonic()
        if now - self._told > PROGRESS_EVERY:
            self._told = now
            self._link.sendall(b".")

    def _judge_exception(self, error):
        name = type(error).__name__
        if getattr(error, "from_solution", False):
            known = isinstance(getattr(builtins, name, None), type)
            return verdict("wrong", f"raised_{name}" if known else "raised_exception")
        if isinstance(error, (NameError, SyntaxError, ImportError)):
            return verdict("error", "verifier_error")
        return verdict("wrong", f"test_raised_{name}")

    def _io(self):
        plan = self._plan
        function = self._function()
        try:
            arguments, wanted = self._tests.pairs()
        except Exception:  # the task's own data is broken
            return verdict("error", "verifier_error")
        for start in range(0, len(wanted), BATCH):
            group = arguments[start : start + BATCH]
            results = self._call_many(function, group)
            for want, reply in zip(wanted[start : start + BATCH], results, strict=False):
                try:
                    got = self._value(reply)
                except Exception as error:
                    return self._judge_exception(error)
                if not matches(got, want, plan["compare"], plan["atol"]):
                    return verdict("wrong", "result_mismatch")
                self._progress()
        return verdict("correct")

    def _call_many(self, function, group):
        if any(keywords for _, keywords in group):
            for positional, keywords in group:
                message = {"do": "call", "h": function._number}
                self._send(message, positional, keywords)
                yield self._next_reply()
            return
        batch: list = [self._encode(list(positional)) for positional, _ in group]
        self._connection.send({"do": "many", "h": function._number, "a": batch})
        for _ in group:
            yield self._next_reply()

    def _probe(self):
        names = {"__builtins__": builtins, **self._bind()}
        values = []
        for _ in range(2):
            try:
                values.append(canonical(eval(self._plan["expression"], names)))
            except (CodecError, Exception) as error:  # a refused value is a value too
                values.append("raised " + type(error).__name__)
                if isinstance(error, CodecError):
                    return {**verdict("correct"), "values": ["not plain", "at all"]}
        return {**verdict("correct"), "values": values}

    def _reference(self):
        """Values of the reference on its inputs, twice; refusals are named."""
        function = self._function()
        try:
            inputs = [parse_input(text) for text in self._plan["inputs"]]
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return verdict("error", "bad_input")
        runs = []
        for _ in range(2):
            values = []
            for reply in self._call_many(function, [(arguments, {}) for arguments in inputs]):
                try:
                    values.append(self._value(reply))
                except Exception as error:
                    name = type(error).__name__
                    return verdict("error", f"raised_{name}")
            runs.append(values)
        try:
            texts = [[canonical(value) for value in values] for values in runs]
            literals = [literal(value) for value in runs[0]]
        except CodecError as error:
            return verdict("error", str(error))
        if texts[0] != texts[1]:
            return verdict("wrong", "nondeterministic")
        if any(len(text) > MAX_LITERAL for text in literals):
            return verdict("error", "result_too_large")
        if all(value is None for value in runs[0]):
            return verdict("wrong", "trivial_empty")
        # Compared as the tests will compare them: to those, 0.0 and -0.0 or 1 and True are one.
        if all(matches(value, runs[0][0], "eq", 0) for value in runs[0]):
            return verdict("wrong", "trivial_constant")
        for same in zip(*inputs, strict=False):
            if all(matches(a, b, "eq", 0) for a, b in zip(same, runs[0], strict=True)):
                return verdict("wrong", "trivial_identity")
        return {**verdict("correct"), "values": texts[0], "literals": literals}

    # --- talking to the solution ----------------------------------------------------------

    def _bind(self):
        return {name: self.ask({"do": "get", "n": name}) for name in self._plan["entry_points"]}

    def _function(self):
        (function,) = self._bind().values()
        if not isinstance(function, Remote):
            self._fail("wrong", "not_callable")
        return function

    def ask(self, message, arguments=None, keywords=None):
        """Value of one request; raises the judge's version of whatever was raised there."""
        self._send(message, arguments, keywords)
        reply = self._next_reply()
        try:
            value = self._value(reply)
        except StopIteration as error:
            if message.get("n") == "next" or self._tests.expect_stop:
                raise
            # Let through, it would end a loop of the tests over map() as if all had passed.
            raised = RuntimeError("StopIteration")
            raised.from_solution = True  # pyright: ignore[reportAttributeAccessIssue]
            raise raised from error
        if self._plan.get("mutates") and "arguments" in reply and arguments:
            changed = decode(reply["arguments"], self._stand_in)
            for own, new in zip(arguments, changed if type(changed) is list else [], strict=False):
                copy_back(own, new)
        entry = message["do"] == "get" and message["n"] in self._plan["entry_points"]
        if entry and isinstance(value, RemoteClass):
            self._classes.add(value._number)
        return value

    def _helper(self, name):
        """A class of the solution that the tests use without its being an entry point."""
        found = self.ask({"do": "get", "n": name})
        if not isinstance(found, RemoteClass) or found._number in self._classes:
            self._fail("wrong", "not_callable")
        self._helpers.add(found._number)
        return HelperClass(self, found._number, False)

    def inert(self, message, arguments=None, keywords=None):
        value = self.ask(message, arguments, keywords)
        if value is not None and not isinstance(value, Inert):
            raise TypeError("a class that is no entry point gave more than an object of its own")
        return value

    def _send(self, message, arguments, keywords):
        if arguments is not None:
            message["a"] = self._encode(list(arguments))
            message["k"] = self._encode(keywords)
        try:
            self._connection.send(message)
        except OSError:
            pass  # its last words may still wait to be read

    def _next_reply(self):
        while True:
            try:
                reply = self._connection.receive()
            except (EOFError, OSError):
                self._fail("error", "lost")
            except CodecError as error:
                self._fail("wrong", str(error))
            if type(reply) is not dict:
                self._fail("error", "broken_frame")
            if "callback" not in reply:
                return reply
            self._answer_callback(reply)

    def _answer_callback(self, message):
        try:
            function = self._callbacks[message["callback"]]
            value = function(*decode(message["a"], self._stand_in))
            self._connection.send({"value": self._encode(value)})
        except (CodecError, KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            self._connection.send({"error": type(error).__name__})

    def _value(self, reply):
        if "value" in reply:
            try:
                return decode(reply["value"], self._stand_in)
            except CodecError as error:
                self._fail("wrong", str(error))
        if "refused" in reply:
            reason = reply["refused"] if reply["refused"] in REFUSALS else "not_plain"
            self._fail("error" if reason == "missing_entry_point" else "wrong", reason)
        raise self._exception(reply.get("error"))

    def _exception(self, body):
        if type(body) is not dict or type(body.get("mro")) is not list:
            self._fail("error", "broken_frame")
        if body.get("import"):
            syntax = "SyntaxError" in body["mro"] or "ValueError" in body["mro"]
            self._fail("error", "syntax_error" if syntax else "import_failed")
        numbers = [own.get("id") for own in body.get("own") or [] if type(own) is dict]
        own = [self._exceptions[n] for n in numbers if n in self._exceptions]
        try:
            given = decode(body.get("args"), self._stand_in)
        except CodecError:
            given = None
        text = str(body.get("text"))[:500]
        error = local_exception(body["mro"], given, text, own)
        if isinstance(error, Lost):
            self._fail("error", "early_exit")
        error.from_solution = True
        return error

    def _fail(self, name, reason):
        self._lost = self._lost or verdict(name, reason)
        raise Lost(reason)

    def _stand_in(self, body):
        number = body.get("id") if type(body) is dict else None
        if type(number) is not int:
            raise CodecError("broken_frame")
        if number in self._exceptions:
            return self._exceptions[number]
        if number not in self._remotes:
            mro = body.get("mro")
            if type(mro) is list and "BaseException" in mro:
                base = local_exception(mro, None, "", []).__class__
                if issubclass(base, Exception):
                    name = str(body.get("class"))[:80]
                    self._exceptions[number] = type(name, (base,), {})
                    return self._exceptions[number]
            if type(mro) is list:
                self._remotes[number] = RemoteClass(self, number, True)
            elif body.get("of") in self._helpers:
                self._remotes[number] = Inert(self, number, False)
            else:
                self._remotes[number] = Remote(self, number, body.get("of") in self._classes)
        return self._remotes[number]

    def _encode(self, value):
        return encode(value, self._own_handle)

    def _own_handle(self, value):
        if isinstance(value, Remote):
            return {"id": value._number}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise CodecError("verifier_error")
