"""The front door: `python -m sage_jax.main --config=FILE --mode=MODE`."""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from sage_jax import config as schema
from sage_jax import overrides
from sage_jax.core import ending
from sage_jax.core.places import unusable
from sage_jax.spelling import hint

# Its advice about absent frameworks is not for users of this project.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

MODES = {
    "train": "self-evolution in --workdir, or its continuation (needs --config)",
    "sft": "supervised fine-tuning into WORKDIR/model (needs --config)",
    "eval": "greedy accuracy of the newest checkpoint of --workdir, or of model.path (--config)",
    "generate": "samples for the JSON lines of --input, written to --output",
    "score": "log-probabilities of the tokens of --input, written to --output",
    "export": "a Hugging Face folder (or an adapter's) in --output, read back and compared",
    "dryrun": "does a run fit the chips of --topology? compiled for them, none of them needed",
}
NEEDS_CONFIG = ("train", "sft", "eval")
# Modes that read a run; the first two do so in the default place too, unless a model is named.
READS_RUN = ("eval", "export", "generate", "score")
NEEDS_FILES = {"generate": ("input", "output"), "score": ("input", "output"), "export": ("output",)}

FLAGS = flags.FLAGS
overrides.register_list_parser()
CONFIG = config_flags.DEFINE_config_file(
    "config", schema.__file__, "Config file; its fields are changed with --config.a.b=value."
)
MODE = flags.DEFINE_string("mode", "train", "What to do.")
WORKDIR = flags.DEFINE_string("workdir", "", "Where a run lives (default: runs/<config name>).")
INPUT = flags.DEFINE_string("input", "", "JSON lines to read (generate, score).")
OUTPUT = flags.DEFINE_string(
    "output", "", "File or folder to write (generate, score, export, dryrun)."
)
TOPOLOGY = flags.DEFINE_string("topology", "", "Chips of a dry run, such as v5e:4x4 or cpu:8.")

HELP_FLAGS = ("help", "helpshort", "helpfull", "h")
USAGE = "usage: python -m sage_jax.main --config=FILE [--mode=MODE] [--workdir=DIR] [...]"
EXAMPLES = """\
examples:
  python -m sage_jax.main --config=configs/tiny.py --workdir=runs/first
  python -m sage_jax.main --config=configs/tiny.py --config.seed=1 --config.train.steps=10
  python -m sage_jax.main --config=configs/qwen0p5b_cpu.py --config.model.path=/models/qwen
  python -m sage_jax.main --mode=eval --config=configs/tiny.py --workdir=runs/first
  python -m sage_jax.main --mode=generate --workdir=runs/first --input=in.jsonl --output=out.jsonl
  python -m sage_jax.main --mode=export --workdir=runs/first --output=exported
  python -m sage_jax.main --mode=dryrun --config=configs/qwen4b.py --topology=v5e:4x4
  python -m sage_jax.verify --help

All fields with defaults and meaning: docs/config.md, or python -m sage_jax.config.
Exit codes: 0 done, 1 some input lines were bad, the run stopped itself or does not fit, 2 usage or
config, 143 saved on a signal."""


class UsageError(ValueError):
    """The command line cannot be carried out as given."""


class StopRequest:
    """Ctrl-C and SIGTERM ask for a save; a second Ctrl-C ends at once."""

    def __init__(self):
        self.signal = 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._ask)
            signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = number
        print("stopping: what is finished will be saved", file=sys.stderr)

    def __call__(self) -> bool:
        return bool(self.signal)


def help_text() -> str:
    """What --help prints: modes, flags and examples."""
    own = ("config", "mode", "workdir", "input", "output", "topology")
    width = max(map(len, (*MODES, "config.a.b")))
    lines = [USAGE, "", "modes:"]
    lines += [f"  {name:<{width}}  {text}" for name, text in MODES.items()]
    lines += ["", "flags:"]
    lines += [f"  --{name:<{width}}  {FLAGS[name].help.split(chr(10))[0]}" for name in own]
    lines += [f"  --{'config.a.b':<{width}}  Another value for field a.b of the config."]
    return "\n".join([*lines, "", EXAMPLES])


def asks_for_help(argv: list[str]) -> bool:
    """True when a help flag is among the arguments, with one dash or two."""
    return any(re.match(rf"--?({'|'.join(HELP_FLAGS)})(=|$)", arg) for arg in argv)


def parse(argv: list[str]) -> None:
    """Read the command line. UsageError for what it cannot mean."""
    if unknown := overrides.bad_overrides(argv):
        raise UsageError("\n  ".join(unknown))
    try:
        rest = FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        raise UsageError(str(error).strip().splitlines()[0]) from error
    if rest[1:]:
        raise UsageError(f"unexpected argument {rest[1]!r}; options start with --")
    if MODE.value not in MODES:
        known = ", ".join(MODES)
        raise UsageError(f"--mode={MODE.value}: choose one of {known}{hint(MODE.value, MODES)}")
    if MODE.value in NEEDS_CONFIG and not FLAGS["config"].present:
        raise UsageError(
            f"--mode={MODE.value} needs --config=FILE, such as configs/tiny.py; --help tells more"
        )
    path = config_flags.get_config_filename(FLAGS["config"])
    if not Path(path).is_file():
        raise UsageError(f"--config={path}: no such file")
    for name in NEEDS_FILES.get(MODE.value, ()):
        if not FLAGS[name].value:
            raise UsageError(f"--mode={MODE.value} needs --{name}=PATH")
    if INPUT.value and not Path(INPUT.value).is_file():
        raise UsageError(f"--input={INPUT.value}: no such file")
    to_output = MODE.value in NEEDS_FILES or (MODE.value == "dryrun" and OUTPUT.value)
    name, target = ("output", OUTPUT) if to_output else ("workdir", WORKDIR)
    folder = not (to_output and MODE.value != "export")
    if target.value and (reason := unusable(Path(target.value), folder)):
        raise UsageError(f"--{name}={target.value}: {reason}")
    if MODE.value in READS_RUN and WORKDIR.value and not Path(WORKDIR.value).is_dir():
        beside = [path.name for path in Path(WORKDIR.value).parent.glob("*")]
        near = hint(Path(WORKDIR.value).name, beside)
        raise UsageError(f"--workdir={WORKDIR.value}: no such folder{near}; give that of a run")
    if MODE.value == "export" and any(Path(OUTPUT.value).glob("*")):
        raise UsageError(f"--output={OUTPUT.value}: is not empty; choose a new folder")
    if INPUT.value and OUTPUT.value and Path(OUTPUT.value).exists():
        if Path(OUTPUT.value).samefile(INPUT.value):
            raise UsageError(f"--output={OUTPUT.value}: is the input; choose another file")


def place_of_work() -> Path:
    """--workdir, else runs/<config name>, or for eval what `eval_place` says."""
    if WORKDIR.value:
        return Path(WORKDIR.value)
    name = Path(config_flags.get_config_filename(FLAGS["config"])).stem
    if MODE.value == "eval":
        return eval_place(name, config_flags.get_override_values(FLAGS["config"]))
    return Path("runs") / name


def eval_place(name: str, given: Mapping[str, Any]) -> Path:
    """runs/<config name>; for a model that the command line names, whose figures say nothing of the
    run there, runs/<config name>_eval_<the last two parts of the model's path>."""
    if not overrides.names_model(given):
        return Path("runs") / name
    model = Path(given.get("lora.path") or given["model.path"]).expanduser()
    parts = (model.absolute() if model.is_dir() else model).parts[-2:]
    return Path("runs") / f"{name}_eval_{re.sub(r'[^a-zA-Z0-9_.-]+', '-', '-'.join(parts))}"


def read_config(workdir: Path) -> ml_collections.FrozenConfigDict:
    """The config of the command line; that of a run's model where the mode reads a run."""
    config, given = CONFIG.value, config_flags.get_override_values(FLAGS["config"])
    found = WORKDIR.value or (MODE.value in READS_RUN[:2] and not overrides.names_model(given))
    if MODE.value in READS_RUN and found:
        for line in overrides.take_model_of_run(config, given, workdir):
            print(f"sage_jax: as the run in {workdir} has it: {line}", file=sys.stderr)
    overrides.take_rank_of_adapter(config, given)
    return schema.validate(config)


def sft_hint(refused: Exception) -> str:
    """What a config that training refuses may be meant for: a line where it sets fields of sft."""
    if not isinstance(refused, schema.ConfigError) or MODE.value != "train":
        return ""
    config: Any = CONFIG.value
    usual: Any = schema.base()
    fields = [f"sft.{name}" for name, value in config.sft.items() if value != usual.sft[name]]
    if not fields:
        return ""
    path = config_flags.get_config_filename(FLAGS["config"])
    sets = ", ".join(fields[:3]) + (", ..." if len(fields) > 3 else "")
    return f"\n  --config={path} sets {sets}, which only --mode=sft uses: was that mode meant?"


def work(workdir: Path) -> int:
    """Run the mode of the command line; its exit code."""
    from sage_jax.core.distributed import start

    config = read_config(workdir)
    if MODE.value != "dryrun":
        start()  # before anything can ask JAX for its devices
    # Only now: a mistyped flag should not cost the seconds that JAX takes to load.
    from sage_jax import modes

    given = config_flags.get_override_values(FLAGS["config"])
    files = (Path(INPUT.value), Path(OUTPUT.value))
    job = modes.Job(
        config, given, workdir, *files, named=bool(WORKDIR.value), topology=TOPOLOGY.value
    )
    return modes.run(MODE.value, job, StopRequest())


def main(argv: list[str]) -> int:
    """Exit code: 0 done, 1 some input lines were bad, 2 usage, config or a full disk, 143 saved on
    SIGTERM."""
    from sage_jax.core.ending import ProcessError
    from sage_jax.tasks.sources import SourceError
    from sage_jax.verify import IsolationError

    if asks_for_help(argv[1:]):
        print(help_text())
        return 0
    try:
        parse(argv)
        return work(place_of_work())
    except (UsageError, schema.ConfigError, SourceError, IsolationError, ProcessError) as error:
        print(f"sage_jax: {error}{sft_hint(error)}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        remedy = "make room and give the same command again"
        place = OUTPUT.value or place_of_work()
        print(f"sage_jax: {place}: {error.strerror}; {remedy}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(ending.leave(main(sys.argv)))
