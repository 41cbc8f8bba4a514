"""Running a launch script with stand-ins for the commands it calls."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
STARTABLE = [path for path in SCRIPTS if path.name != "lib.sh"]
TRAIN = ("--", "--config=configs/tiny.py", "--config.model.path=a b")
NEEDS = {"tpu_pod.sh": ("--name=demo", "--zone=us-west4-a")}


def shell(script, *args, path="", launch=LAUNCH, **env):
    """A launch script with `path` before the usual PATH: (exit code, stdout + stderr)."""
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "HOME": os.environ["HOME"], **env}
    done = subprocess.run(
        [launch / script, *args],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def stand_in(folder, name, body):
    """An executable that writes its call to `calls`, then does `body`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"{folder}/calls"\n{body}\n')
    (folder / name).chmod(0o755)
    return folder


def calls(folder):
    log = folder / "calls"
    return log.read_text().splitlines() if log.exists() else []
