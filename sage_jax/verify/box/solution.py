"""The solution process: runs untrusted source and answers the judge's calls.

Everything here shares a process with the program and may be taken over by it. That is harmless:
the only way out is a socket over which the judge accepts nothing but plain data.
"""

import atexit
import builtins
import operator
import os
import sys
import threading
import types

from codec import CodecError, Connection, decode, encode

UNARY = {
    "len": len, "iter": iter, "next": next, "str": str, "repr": repr, "hash": hash,
    "bool": bool, "abs": abs, "int": int, "float": float, "index": operator.index,
    "neg": operator.neg, "pos": operator.pos, "invert": operator.invert, "reversed": reversed,
}  # fmt: skip
BINARY = {
    name: getattr(operator, name)
    for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod",
        "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift", "getitem", "delitem",
        "contains", "setitem",
    )
}  # fmt: skip


def read_all(number):
    """Text of a descriptor; lone surrogates of the program text survive."""
    size = os.fstat(number).st_size
    return os.pread(number, size, 0).decode("utf-8", "surrogatepass")


def load(source, script):
    """Compile and run the source as its own module; returns the module's names."""
    name = "__main__" if script else "solution"
    module = types.ModuleType(name)
    sys.modules[name] = module
    sys.argv = ["solution.py"]
    code = compile(source, "solution.py", "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module.__dict__


def prepare():
    """What an interpreter started with -S lacks."""
    builtins.exit = builtins.quit = sys.exit
    sys.path[:] = [""] + [p for p in sys.path if p]


def run_script(source):
    """stdin to stdout: run the program to its end, as ``python solution.py`` would."""
    status = 0
    try:
        load(source, True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    if not flush_output():
        status = status or 1
    os._exit(status & 255)


def flush_output():
    """Whether all output left; the program may have put anything in place of the streams."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True


def main(source_fd, sock_fd, script, mutates):
    """Serve the judge until it hangs up."""
    source = read_all(source_fd)
    os.close(source_fd)
    prepare()
    if script:
        run_script(source)
    connection = Connection(sock_fd)
    try:
        names = load(source, False)
    except BaseException as error:
        connection.send(describe_error(error, lambda value: None, at_import=True))
        os._exit(1)
    Server(connection, names, mutates).serve()


def describe_error(error, handle, at_import=False):
    classes = type(error).__mro__
    try:
        text = str(error)[:500]
        arguments = encode(list(error.args), _refuse)
    except BaseException:
        text, arguments = "", None
    return {
        "error": {
            "mro": [base.__name__ for base in classes if base.__module__ == "builtins"],
            "own": [handle(base) for base in classes if base.__module__ != "builtins"],
            "text": text,
            "args": arguments,
            "import": at_import,
        }
    }


def _refuse(value):
    raise CodecError("not_plain")


class Server:
    def __init__(self, connection, names, mutates):
        self._connection, self._names, self._mutates = connection, names, mutates
        self._objects, self._numbers = {}, {}

    def serve(self):
        while True:
            try:
                message = self._connection.receive()
            except EOFError:
                os._exit(0)
            self._answer(message)

    def _answer(self, message):
        if message["do"] == "many":
            function = self._objects[message["h"]]
            for arguments in message["a"]:
                self._reply(lambda args=arguments: function(*self._decode(args)), None)
            return
        arguments = []
        self._reply(lambda: self._perform(message, arguments), arguments)

    def _reply(self, action, arguments):
        try:
            reply = {"value": self._encode(action())}
            if self._mutates and arguments:
                reply["arguments"] = self._encode(arguments)
        except CodecError as error:
            reply = {"refused": str(error)}
        except BaseException as error:
            reply = describe_error(error, self._register)
        flush_output()
        try:
            self._connection.send(reply)
        except CodecError as error:
            self._connection.send({"refused": str(error)})

    def _perform(self, message, arguments):
        what = message["do"]
        if what == "get":
            if message["n"] not in self._names:
                raise CodecError("missing_entry_point")
            return self._names[message["n"]]
        if what == "classes":
            return [name for name in message["of"] if isinstance(self._names.get(name), type)]
        target = self._objects[message["h"]]
        if what == "attr":
            return getattr(target, message["n"])
        arguments.extend(self._decode(message["a"]))
        if what == "call":
            return target(*arguments, **self._decode(message["k"]))
        if what == "method":
            return getattr(target, message["n"])(*arguments, **self._decode(message["k"]))
        if what == "setattr":
            return setattr(target, message["n"], arguments[0])
        if what == "isinstance":
            return isinstance(arguments[0], target)
        operation = UNARY.get(message["n"]) or BINARY[message["n"]]
        if message.get("swap"):
            return operation(arguments[0], target)
        return operation(target, *arguments)

    # --- objects that stay here -----------------------------------------------------------

    def _register(self, value):
        number = self._numbers.get(id(value))
        if number is None or self._objects[number] is not value:
            number = len(self._objects)
            self._objects[number] = value
            self._numbers[id(value)] = number
        body = {"id": number}
        if isinstance(value, type):
            body["class"] = value.__name__
            body["mro"] = [b.__name__ for b in value.__mro__ if b.__module__ == "builtins"]
        else:
            body["of"] = self._numbers.get(id(type(value)))
            body["callable"] = callable(value)
        return body

    def _encode(self, value):
        return encode(value, self._register)

    def _decode(self, data):
        return decode(data, self._stand_in)

    def _stand_in(self, body):
        if "id" in body:
            return self._objects[body["id"]]
        if "builtin" in body:
            return getattr(builtins, body["builtin"])
        number = body["callback"]

        def callback(*arguments):
            self._connection.send({"callback": number, "a": self._encode(list(arguments))})
            while True:
                answer = self._connection.receive()
                if "do" not in answer:
                    break
                self._answer(answer)
            if "error" in answer:
                kind = getattr(builtins, answer["error"], RuntimeError)
                raise kind("raised by the caller's function")
            return self._decode(answer["value"])

        return callback
